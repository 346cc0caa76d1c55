"""Turn documents into token files in one pass, for ``composer3d prepare``.

The memory that this takes depends on the longest document, not on the size of the source.
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer3d.data.documents import Document, list_files, read_documents, refuse_unreadable
from composer3d.data.tokenizer import Tokenizer, open_tokenizer
from composer3d.data.tokens import write_manifest
from composer3d.recipe.values import one_line
from composer3d.runtime.files import publish
from composer3d.spec.errors import DataError
from composer3d.spec.token_manifest import digest_of

# Documents are tokenized in batches. A batch ends with the document that reaches one of these
# limits.
_BATCH_BYTES = 2 << 20  # of text
_BATCH_DOCUMENTS = 1 << 14  # each takes about 1000 bytes of memory, even if it is empty

_PROGRESS_S = 60.0  # between lines of progress; a terminal gets six times as many

# Suffixes of files that are refused because they are not text, each with what to do about it.
_JSON_SUFFIXES = (".json", ".ndjson")
_JSON_ADVICE = "rename it to .jsonl if each line is an object, else convert it or move it away"
_NO_TEXT = {
    ".parquet": "convert it to JSONL",
    ".json": _JSON_ADVICE,
    ".ndjson": _JSON_ADVICE,
    ".gz": "decompress it",
    ".zst": "decompress it",
    ".bz2": "decompress it",
    ".xz": "decompress it",
}


class _Counts(NamedTuple):
    """The documents and tokens that were written, and the bytes that were read of the source."""

    documents: int
    tokens: int
    source_bytes: int


def prepare(
    source: str, out: str, *, tokenizer: str, eod: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Write the folder ``out`` of token files (see ``tokens``), whole or not at all.

    The folder is written as ``OUT.tmp-*`` and renamed when it is on disk. An error or an interrupt
    removes it. Call this function in the main thread, because it handles SIGTERM.

    Args:
        source: a text file, a JSONL file, or a folder of one kind.
        out: the folder to make. It must not exist.
        tokenizer: "bytes", or the path of a tokenizer.json.
        eod: the name of the token that ends each document. None: a usual name that the tokenizer
            has, such as "</s>". It must be None for "bytes".
        field: the key of the text in JSONL. None: "text". If it is given, a single file is read as
            JSONL, whatever its name.

    Returns:
        The facts in ``tokens.json``: the numbers of ``documents`` and ``tokens``, ``vocab`` (the
        size of the vocabulary), ``dtype``, ``end_of_document`` (a token) and ``tokenizer`` (its
        name and digest); and ``source_bytes``, the number of bytes that were read.

    Raises:
        DataError: the source or the tokenizer cannot be used, or ``out`` exists or cannot be
            written.
        SystemExit: SIGTERM has arrived. The folder is removed, as after Ctrl-C.
    """
    for option, path in (("SRC", source), ("-o", out), ("--tokenizer", tokenizer)):
        _require_valid_path(option, path)
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with contextlib.closing(open_tokenizer(tokenizer, eod)) as opened:
            return _prepare(Path(source), Path(os.path.abspath(out)), opened, field)
    finally:
        signal.signal(signal.SIGTERM, handler)


def _require_valid_path(option: str, path: str) -> None:
    """Raise DataError if a path contains NUL or cannot be encoded, so that no file can have it."""
    try:
        is_valid = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_valid = False
    if not is_valid:
        raise DataError(f"{option} {one_line(path)}: no file can have such a name; give another")


def _prepare(source: Path, out: Path, tokenizer: Tokenizer, field: str | None) -> dict[str, Any]:
    """Write the folder ``out``, and return what ``prepare`` returns."""
    if os.path.lexists(out):
        raise DataError(f"{_shown(out)} exists; remove it, or give another -o")
    for leftover in sorted(out.parent.glob(f"{glob.escape(out.name)}.tmp-*")):
        print(
            f"{_shown(leftover)} is left of a prepare that was killed, or belongs to one that is "
            "running; remove it if no prepare is running",
            file=sys.stderr,
        )

    files, field = _list_source(source, field)
    staging = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        staging.mkdir(parents=True)
        counts = _write(staging, files, field, tokenizer)
        if not counts.documents:
            raise DataError(f"{_shown(source)}: all files are empty; give a path that holds text")
        content = tokenizer.content
        facts = {
            "dtype": tokenizer.dtype.name,
            "vocab": tokenizer.vocab,
            "tokens": counts.tokens,
            "documents": counts.documents,
            "end_of_document": tokenizer.end,
            "tokenizer": {
                "name": tokenizer.name,
                "digest": None if content is None else digest_of(content),
            },
        }
        write_manifest(staging, facts)
        publish(staging, out)
    except OSError as error:
        raise DataError(
            f"{_shown(out)} cannot be written: {error.strerror}; give another -o"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {**facts, "source_bytes": counts.source_bytes}


def _list_source(source: Path, field: str | None) -> tuple[list[Path], str | None]:
    """Return the files of the source, and the key of the text, which is None for text files.

    A single file of any name is JSONL if ``field`` is given.

    Raises DataError if there are no files, or they are not all text or all JSONL.
    """
    if not os.path.exists(source):
        raise DataError(
            f"{_shown(source)} does not exist; "
            "give a text file, a .jsonl file or a folder of one kind"
        )
    files = list_files(source)
    if not files:
        raise DataError(f"{_shown(source)}: no files found; give a path that holds text")

    examples = {file.suffix.lower(): file for file in files}  # a file of each suffix
    is_jsonl_by_field = field is not None and files == [source]
    for suffix, file in examples.items():
        is_accepted = suffix not in _NO_TEXT or (is_jsonl_by_field and suffix in _JSON_SUFFIXES)
        if not is_accepted:
            raise DataError(
                f"{_shown(file)}: a {one_line(suffix)} file is not read as text; {_NO_TEXT[suffix]}"
            )

    if is_jsonl_by_field or ".jsonl" in examples:
        others = [file for suffix, file in examples.items() if suffix != ".jsonl"]
        if len(examples) > 1:
            raise DataError(
                f"{_shown(source)} holds JSONL and other files, such as {_shown(others[0])}; "
                "give a folder of one kind"
            )
        return files, "text" if field is None else field
    if field is not None:
        raise DataError(
            f"--field {one_line(field)} is only read with JSONL, and {_shown(source)} holds no "
            ".jsonl file; remove it"
        )
    return files, None


def _write(folder: Path, files: list[Path], field: str | None, tokenizer: Tokenizer) -> _Counts:
    """Write all files of the folder except the manifest, and return what was counted."""
    if tokenizer.content is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.content)
    counts = _Counts(0, 0, 0)
    progress = _Progress(sum(map(_size, files)))
    with (
        open(folder / "tokens.bin", "wb") as tokens_file,
        open(folder / "documents.bin", "wb") as starts_file,
    ):
        for batch in _batches(read_documents(files, field, longest=tokenizer.longest)):
            tokens, lengths = tokenizer.encode(batch)
            tokens_file.write(tokens.data)
            starts = counts.tokens + np.cumsum(lengths) - lengths
            starts_file.write(starts.astype("<i8").data)
            counts = _Counts(
                counts.documents + len(batch),
                counts.tokens + len(tokens),
                counts.source_bytes + sum(document.size for document in batch),
            )
            progress.report(counts)
        starts_file.write(np.array([counts.tokens], dtype="<i8").data)
    return counts


class _Progress:
    """Prints the progress and the estimated time that is left, at most once per interval."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._pause_s = _PROGRESS_S / 6 if sys.stderr.isatty() else _PROGRESS_S
        self._started_s = self._reported_s = time.monotonic()

    def report(self, counts: _Counts) -> None:
        """Print a line if the last one is old enough."""
        now_s = time.monotonic()
        if now_s - self._reported_s < self._pause_s:
            return
        self._reported_s = now_s
        # Assume the average speed so far. The source may have grown since its size was read.
        ratio_left = max(self._total_bytes / counts.source_bytes - 1, 0)
        left = timedelta(seconds=round((now_s - self._started_s) * ratio_left))
        print(
            f"{counts.documents:,} documents, {counts.tokens:,} tokens, "
            f"{counts.source_bytes / 1e6:,.0f} of {self._total_bytes / 1e6:,.0f} MB, {left} left",
            file=sys.stderr,
        )


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        refuse_unreadable(error, file)


def _shown(path: Path) -> str:
    """Return a path on one line."""
    return one_line(str(path))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of bounded size. Each batch has at least one document."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
