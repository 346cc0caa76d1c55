"""Read the texts of a Parquet file or a ``datasets`` folder in a process of its own.

Both formats are read by Arrow, which is C++. A damaged file can crash it, or make it ask for all
memory. So it runs in a process with a limit of memory, whose failure ``prepare`` can report.

This file imports nothing of its package, because that would import torch. It is run as a script
with one argument, the settings in JSON:

- ``kind``: "parquet", and the file is standard input; or "dataset";
- ``path``: the folder of the dataset;
- ``field``: the name of the column;
- ``first``: rows to pass over;
- ``longest``: the largest size of a text in bytes;
- ``memory``: the limit of memory in bytes.

Each answer is a frame: its length in 8 bytes, little-endian, then its content. The first one is
b"n" and the number of rows (int64). Then come batches: b"t", the number of texts and their lengths
in bytes (int64), then the texts in UTF-8. The last one is b".", or b"-" and the text of an error.
"""

import io
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any

_ROWS = 64  # that are decoded at once
_CPU_S = 60.0  # of processor time for these rows, and for what comes before the first ones
_FRAME_BYTES = 512 << 10  # of text in a batch, which ends with the text that reaches this


class _RefusedError(Exception):
    """The file cannot be used. The text says why."""


def main() -> None:
    """Write the texts to standard output."""
    # Ctrl-C reaches all processes of a terminal, but the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = json.loads(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    memory = settings["memory"]
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    try:
        _write_texts(settings)
        _write_frame(b".")
    except BrokenPipeError:
        # The parent has ended. Python must not write what is left to the closed pipe.
        os._exit(1)
    except BaseException as error:
        _write_frame(b"-" + _explain(error).encode(errors="replace"))


def _write_texts(settings: dict[str, Any]) -> None:
    """Write the number of rows, and the text of each row from ``first`` on.

    Raises:
        _RefusedError: the file has no such column of text, or another number of rows than it says;
            or a row has no text, or a text longer than ``longest``.
    """
    field, number = settings["field"], settings["first"]
    _limit_processor_time()
    if settings["kind"] == "parquet":
        rows, columns = _open_parquet(field, number)
    else:
        rows, columns = _open_dataset(settings["path"], field, number)
    _write_frame(b"n" + struct.pack("<q", rows))
    texts: list[bytes] = []
    size = 0
    for column in columns:
        _limit_processor_time()
        # Arrow trusts offsets and texts in a file until it is asked to look at them.
        column.validate(full=True)
        for value in column:
            number += 1
            if number > rows:
                raise _RefusedError(f"it has more than the {rows} rows that it says; copy it again")
            if not value.is_valid:
                raise _RefusedError(
                    f"row {number} has no text (its {field!r} is null); remove the row"
                )
            text = value.as_buffer().to_pybytes()
            if len(text) > settings["longest"]:
                raise _RefusedError(
                    f"row {number} has {len(text):_} bytes, but at most {settings['longest']:_} "
                    "are read into memory; cut it into several documents"
                )
            texts.append(text)
            size += len(text)
            if size >= _FRAME_BYTES:
                _write_batch(texts)
                texts, size = [], 0
    if texts:
        _write_batch(texts)
    if number != rows:
        raise _RefusedError(f"it has {number} rows, not {rows} as it says; copy it again")


def _open_parquet(field: str, first: int) -> tuple[int, Iterator[Any]]:
    """Return the number of rows, and the texts from row ``first`` on, some rows at a time.

    Raises:
        _RefusedError: the table has no column of text named ``field``.
    """
    import pyarrow
    from pyarrow import parquet

    # Read as a stream, a row group need not fit into memory.
    file = parquet.ParquetFile(
        pyarrow.PythonFile(io.FileIO(0, closefd=False)),
        pre_buffer=False,
        buffer_size=1 << 20,
        # Most writers leave them out.
        page_checksum_verification=True,
    )
    _require_text(file.schema_arrow, field)

    def columns() -> Iterator[Any]:
        skip = first
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip >= rows:
                skip -= rows
                continue
            for batch in file.iter_batches(
                batch_size=_ROWS, row_groups=[group], columns=[field], use_threads=False
            ):
                column = batch.column(batch.schema.get_field_index(field))
                if skip < len(column):
                    yield _as_text(column[skip:])
                skip = max(skip - len(column), 0)

    return file.metadata.num_rows, columns()


def _open_dataset(path: str, field: str, first: int) -> tuple[int, Iterator[Any]]:
    """Return the number of rows, and the texts from row ``first`` on, some rows at a time.

    Raises:
        _RefusedError: state.json names something that is no file of the folder, or the table has no
            column of text named ``field``.
    """
    with open(os.path.join(path, "state.json"), "rb") as file:
        state = json.load(file)
    for entry in state["_data_files"]:
        name = entry["filename"]
        # datasets would follow a path out of the folder, and wait for ever for a named pipe.
        if os.path.basename(name) != name or not os.path.isfile(os.path.join(path, name)):
            raise _RefusedError(f"its state.json names {name!r}, which is no file of the folder")

    import datasets

    dataset = datasets.load_from_disk(path, keep_in_memory=False)
    _require_text(dataset.data.schema, field)
    rows = len(dataset)
    # Arrow tables, so that no column is decoded into Python objects.
    texts = dataset.select_columns([field]).with_format("arrow").skip(first)

    def columns() -> Iterator[Any]:
        for table in texts.iter(batch_size=_ROWS):
            yield _as_text(table.column(field))

    return rows, columns()


def _limit_processor_time() -> None:
    """Give this process ``_CPU_S`` more of processor time, after which the kernel ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime + _CPU_S) + 1
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _require_text(schema: Any, field: str) -> None:
    """Raise _RefusedError unless the table has one column of text named ``field``."""
    import pyarrow

    found = schema.get_all_field_indices(field)
    if len(found) != 1:
        names = ", ".join(repr(name) for name in schema.names[:20])
        raise _RefusedError(
            f"it has {len(found) or 'no'} column{'s' * (len(found) > 1)} {field!r}; "
            f"name one of its columns with --field: {names}"
        )
    kind = schema.field(found[0]).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_string_view(kind)
    )
    if not is_text:
        raise _RefusedError(
            f"its column {field!r} holds {kind}, not text; name another one with --field"
        )


def _as_text(column: Any) -> Any:
    """Return a column of text without dictionary or views."""
    import pyarrow

    return column if pyarrow.types.is_string(column.type) else column.cast(pyarrow.large_string())


def _explain(error: BaseException) -> str:
    """Return the reason of an error on one line."""
    if isinstance(error, MemoryError):
        return "it takes too much memory; copy it again, or write it with smaller row groups"
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, _RefusedError):
        return text
    return f"cannot be read: {text}; copy it again, or move it away"


def _write_batch(texts: list[bytes]) -> None:
    """Write a frame with a batch of texts."""
    header = struct.pack(f"<{len(texts) + 1}q", len(texts), *map(len, texts))
    _write_frame(b"t" + header + b"".join(texts))


def _write_frame(content: bytes) -> None:
    """Write a frame, and flush it."""
    sys.stdout.buffer.write(struct.pack("<q", len(content)))
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
