"""Read the texts of Parquet files, and of folders that ``datasets`` has saved to disk.

pyarrow and datasets read them, in a process of their own (``table_worker``): nothing here trusts
such a file.
"""

import contextlib
import importlib.util
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Literal, NamedTuple

from composer3d.facts.errors import DataError
from composer3d.facts.text import one_line

TableKind = Literal["parquet", "dataset"]

PARQUET_SUFFIX = ".parquet"
# What save_to_disk writes beside its .arrow files; and the file of a folder of several splits.
_DATASET_FILES = ("state.json", "dataset_info.json")
_SPLITS_FILE = "dataset_dict.json"

_LONGEST_BYTES = 16 << 20  # of a text, as in a line of JSONL
# Of the process. 64 texts of that size are decoded at once, and sent one after the other.
_MEMORY = 4 << 30

# The package that reads each kind, and the extra of composer3d that has it.
_PACKAGES: dict[TableKind, tuple[str, str]] = {
    "parquet": ("pyarrow", "data"),
    "dataset": ("datasets", "datasets"),
}


class TableRow(NamedTuple):
    """A row of a table.

    Attributes:
        number: its number, from 1.
        of: the number of rows of the table.
        text: the text in UTF-8.
    """

    number: int
    of: int
    text: bytes


def is_dataset(path: Path) -> bool:
    """Return whether a folder is one that ``Dataset.save_to_disk`` made.

    Raises DataError if it holds several such folders, the splits of a ``DatasetDict``.
    """
    if os.path.isfile(path / _SPLITS_FILE):
        splits = sorted(file.parent.name for file in path.glob(f"*/{_DATASET_FILES[0]}"))
        example = path / splits[0] if splits else path / "train"
        raise DataError(
            f"{one_line(path)} holds several splits ({one_line(', '.join(splits[:20]))}); "
            f"give one of them, such as {one_line(example)}"
        )
    return all(os.path.isfile(path / name) for name in _DATASET_FILES)


def identify_dataset(path: Path) -> tuple[int, int]:
    """Return the size of all files of a dataset's folder, and the newest time of one in ns.

    Raises OSError if the folder cannot be read.
    """
    size = newest_ns = 0
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat()
            if stat.S_ISREG(status.st_mode):
                size += status.st_size
                newest_ns = max(newest_ns, status.st_mtime_ns)
    return size, newest_ns


def require_package(kind: TableKind, path: Path) -> None:
    """Raise DataError if the package that reads ``path`` is not installed."""
    package, extra = _PACKAGES[kind]
    if importlib.util.find_spec(package) is None:
        raise DataError(
            f"{one_line(path)}: reading it needs the package {package}; install it with "
            f"pip install 'composer3d[{extra}]', or convert it to JSONL"
        )


def read_rows(
    kind: TableKind, path: Path, content: BinaryIO | None, field: str, *, first: int
) -> Generator[TableRow, None, None]:
    """Yield the rows of a table, in order. Close the iterator to end its process.

    Memory does not depend on the size of the table, nor on that of its row groups.

    Args:
        kind: the format.
        path: the folder of a dataset; of a Parquet file, its path for messages.
        content: the open Parquet file; None for a dataset.
        field: the name of the column of the texts.
        first: the number of rows to pass over.

    Raises:
        DataError: the package is not installed; the table is damaged; it has no such column, or
            not of text; or a row has no text or a text of more than 16 MiB.
    """
    require_package(kind, path)
    settings = {
        "kind": kind,
        "path": str(path),
        "field": field,
        "first": first,
        "longest": _LONGEST_BYTES,
        "memory": _MEMORY,
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            str(Path(__file__).with_name("table_worker.py")),
            json.dumps(settings),
        ],
        stdin=subprocess.DEVNULL if content is None else content,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            # Nothing is fetched, whatever a dataset says.
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            # Other allocators reserve memory that they may never use, which the limit would count.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    answers = process.stdout
    assert answers is not None
    number, rows = first, 0
    try:
        while (frame := read_frame(answers)) != b".":
            match frame[:1]:
                case b"n":
                    (rows,) = struct.unpack_from("<q", frame, 1)
                case b"t":
                    for text in _unpack(frame):
                        number += 1
                        yield TableRow(number, rows, text)
                case b"-":
                    reason = frame[1:].decode(errors="replace")
                    raise DataError(f"{one_line(path)}: {one_line(reason)}")
                case _:
                    status = process.wait()
                    raise DataError(
                        f"{one_line(path)}: {_PACKAGES[kind][0]} ends with status {status} "
                        "while it reads it, as if it were damaged; copy it again, or move it away"
                    )
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            answers.close()
        process.wait()


def read_frame(answers: IO[bytes]) -> bytes:
    """Return the next frame of what a process answers. It is empty if the process has ended."""
    header = answers.read(8)
    if len(header) < 8:
        return b""
    (length,) = struct.unpack("<q", header)
    frame = answers.read(length)
    return frame if len(frame) == length else b""


def _unpack(frame: bytes) -> Iterator[bytes]:
    (count,) = struct.unpack_from("<q", frame, 1)
    lengths = struct.unpack_from(f"<{count}q", frame, 9)
    begin = 1 + 8 * (1 + count)
    for length in lengths:
        yield frame[begin : begin + length]
        begin += length
