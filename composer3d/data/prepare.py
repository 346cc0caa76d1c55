"""``composer3d prepare``: documents to token files, in one pass, in memory that the longest document decides."""

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
from typing import Any

import numpy as np

from composer3d.data.documents import Document, documents_of, files_of, refuse_unreadable
from composer3d.data.tokenizer import Tokenizer, open_tokenizer
from composer3d.data.tokens import write_manifest
from composer3d.recipe.values import one_line
from composer3d.runtime.files import publish
from composer3d.spec.errors import DataError
from composer3d.spec.token_manifest import digest_of

_BATCH_BYTES = 2 << 20  # of text that is tokenized at once, and the rest of its last document
_BATCH_DOCUMENTS = 1 << 14  # at most: each takes a thousand bytes of memory, were it empty
_PROGRESS_S = 60.0  # between lines of progress, and on a terminal a sixth of it
_JSON = (".json", ".ndjson")
_NO_TEXT = {
    ".parquet": "convert it to JSONL"
}  # what would be read as prose: suffixes, and the way out
_NO_TEXT |= dict.fromkeys(
    _JSON, "rename it to .jsonl if each line is an object, else convert it or move it away"
)
_NO_TEXT |= dict.fromkeys((".gz", ".zst", ".bz2", ".xz"), "decompress it")


def prepare(
    source: str, out: str, *, tokenizer: str, eod: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Write the folder ``out`` of token files (see ``tokens``), whole or not at all.

    The folder is written as ``OUT.tmp-*`` and renamed when it is on disk. An error or an interrupt
    removes it.

    Args:
        source, out, tokenizer, eod: as on the command line.
        field: the key of the text in JSONL; None: "text".

    Returns:
        What was written: ``documents``, ``tokens``, ``vocab``, ``dtype``, ``source_bytes`` and more.

    Raises:
        DataError: the source or the tokenizer cannot be used, or ``out`` exists or cannot be written.
        SystemExit: on SIGTERM, which ends it as Ctrl-C does.
    """
    for option, path in (("SRC", source), ("-o", out), ("--tokenizer", tokenizer)):
        _require_path(option, path)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with contextlib.closing(open_tokenizer(tokenizer, eod)) as coder:
            return _prepare(Path(source), Path(os.path.abspath(out)), coder, field)
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_path(option: str, path: str) -> None:
    """Raises DataError where no file can have such a name."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass
    raise DataError(f"{option} {one_line(path)}: no file can have such a name; give another")


def _prepare(source: Path, out: Path, tokenizer: Tokenizer, field: str | None) -> dict[str, Any]:
    """Returns what ``tokens.json`` says, and ``source_bytes``."""
    if os.path.lexists(out):
        raise DataError(f"{_shown(out)} exists; remove it, or give another -o")
    for left in sorted(out.parent.glob(f"{glob.escape(out.name)}.tmp-*")):
        print(
            f"{_shown(left)} is left of a prepare that was killed, or is running; remove it if none is",
            file=sys.stderr,
        )
    files, field = _open_source(source, field)
    staging = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        staging.mkdir(parents=True)
        documents, tokens, source_bytes = _write(staging, files, field, tokenizer)
        if not documents:
            raise DataError(f"{_shown(source)}: all files are empty; give a path that holds text")
        facts = {
            "dtype": tokenizer.dtype.name,
            "vocab": tokenizer.vocab,
            "tokens": tokens,
            "documents": documents,
            "end_of_document": tokenizer.end,
            "tokenizer": {
                "name": tokenizer.name,
                "digest": tokenizer.content and digest_of(tokenizer.content),
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
    return {**facts, "source_bytes": source_bytes}


def _open_source(source: Path, field: str | None) -> tuple[list[Path], str | None]:
    """The files, and the key of the text if they are JSONL, which ``field`` makes of one file of any name."""
    if not os.path.exists(source):
        raise DataError(
            f"{_shown(source)} does not exist; give a text file, a .jsonl file or a folder of one kind"
        )
    files = files_of(source)
    if not files:
        raise DataError(f"{_shown(source)}: no files found; give a path that holds text")
    kinds = {file.suffix.lower(): file for file in files}
    one = field is not None and files == [source]
    for kind, file in kinds.items():
        if kind in _NO_TEXT and not (one and kind in _JSON):
            raise DataError(
                f"{_shown(file)}: a {one_line(kind)} file is not read as text; {_NO_TEXT[kind]}"
            )
    if one or ".jsonl" in kinds:
        others = [file for kind, file in kinds.items() if kind != ".jsonl"]
        if len(kinds) > 1:
            raise DataError(
                f"{_shown(source)} holds JSONL and other files, such as {_shown(others[0])}; give a folder of one kind"
            )
        return files, "text" if field is None else field
    if field is not None:
        raise DataError(
            f"--field {one_line(field)} is not read with text, and {_shown(source)} holds no .jsonl file; remove it"
        )
    return files, None


def _write(
    folder: Path, files: list[Path], field: str | None, tokenizer: Tokenizer
) -> tuple[int, int, int]:
    """Everything but the manifest. Returns how many documents, tokens and bytes of the source there were."""
    if tokenizer.content is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.content)
    n_documents = n_tokens = read = 0
    total = sum(map(_size, files))
    pause_s = _PROGRESS_S / 6 if sys.stderr.isatty() else _PROGRESS_S
    began = told = time.monotonic()
    with (
        open(folder / "tokens.bin", "wb") as tokens_file,
        open(folder / "documents.bin", "wb") as starts_file,
    ):
        for batch in _batches(documents_of(files, field, longest=tokenizer.longest)):
            tokens, lengths = tokenizer.encode(batch)
            tokens_file.write(tokens.data)
            starts_file.write((n_tokens + np.cumsum(lengths) - lengths).astype("<i8").data)
            n_documents += len(batch)
            n_tokens += len(tokens)
            read += sum(document.size for document in batch)
            now = time.monotonic()
            if now - told >= pause_s:
                told, left = now, timedelta(seconds=round((now - began) * max(total / read - 1, 0)))
                shown = f"{n_documents:,} documents, {n_tokens:,} tokens, {read / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                print(f"{shown}, {left} left", file=sys.stderr)
        starts_file.write(np.array([n_tokens], dtype="<i8").data)
    return n_documents, n_tokens, read


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        refuse_unreadable(error, file)


def _shown(path: Path) -> str:
    return one_line(str(path))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
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
