"""``composer3d prepare``: documents to token files, in one pass, in memory that the longest document decides."""

import errno
import glob
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.data.documents import Document, files_of, jsonl_documents, refuse_unreadable, text_documents
from composer3d.data.tokenizer import Tokenizer, open_tokenizer
from composer3d.data.tokens import sync, write_manifest
from composer3d.errors import DataError

_BATCH_BYTES = 2 << 20  # of text that is tokenized at once, and the rest of its last document
_PROGRESS_S = 60.0  # between lines of progress, where no terminal shows a bar
_JSON = (".json", ".ndjson")
_NO_TEXT = {".parquet": "convert it to JSONL"}  # what would be read as prose: suffixes, and the way out
_NO_TEXT |= dict.fromkeys(_JSON, "rename it to .jsonl if each line is an object, else convert it or move it away")
_NO_TEXT |= dict.fromkeys((".gz", ".zst", ".bz2", ".xz"), "decompress it")


def main_prepare(*, source: str, out: str, tokenizer: str, eod: str | None, field: str | None, as_json: bool) -> int:
    """Writes token files and says what they hold. Returns the exit status 0.

    Raises DataError where the source or the tokenizer cannot be used, or ``out`` exists or cannot be written. SIGTERM
    ends it as Ctrl-C does, by SystemExit.
    """
    begin = time.monotonic()
    folder = Path(os.path.abspath(out))
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        answer = prepare(Path(source), folder, open_tokenizer(tokenizer, eod), field=field)
    except (KeyboardInterrupt, SystemExit):
        if not os.path.lexists(folder):
            print("interrupted: nothing was written", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    seconds = time.monotonic() - begin
    megabytes = answer["source_bytes"] / 1e6
    print(
        f"{out}: {answer['documents']:,} documents, {answer['tokens']:,} tokens of {answer['vocab']:,} "
        f"({answer['dtype']}), {megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:.1f} MB/s)"
    )
    if as_json:
        print(json.dumps({"ok": True, "out": out, **answer, "seconds": seconds}))
    return 0


def prepare(source: Path, out: Path, tokenizer: Tokenizer, *, field: str | None) -> dict[str, Any]:
    """Writes the folder ``out`` of token files (see ``tokens``), whole or not at all.

    ``out`` is absolute. It is written beside itself, as ``OUT.tmp-*``, and renamed when it is on disk; an error or an
    interrupt removes that. ``field``: key of the text in JSONL, None: "text".

    Returns what ``tokens.json`` says, and ``source_bytes``. Raises DataError as ``main_prepare`` does.
    """
    if os.path.lexists(out):
        raise DataError(f"{out} exists; remove it, or give another -o")
    for left in sorted(out.parent.glob(f"{glob.escape(out.name)}.tmp-*")):
        print(f"{left} is left of a prepare that was killed, or is running; remove it if none is", file=sys.stderr)
    documents, total = _open_source(source, field)
    staging = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        staging.mkdir(parents=True)
        counts = _write(staging, documents, total, tokenizer)
        if not counts["documents"]:
            raise DataError(f"{source}: all files are empty; give a path that holds text")
        facts = {
            "dtype": tokenizer.dtype.name,
            "vocab": tokenizer.vocab,
            "tokens": counts["tokens"],
            "documents": counts["documents"],
            "end_of_document": tokenizer.end,
            "tokenizer": {"name": tokenizer.name, "digest": tokenizer.digest},
        }
        write_manifest(staging, facts)
        staging.rename(out)
        sync(out.parent)
    except BrokenPipeError:  # nobody reads the progress
        raise
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and os.path.lexists(out):
            raise DataError(f"{out} exists now: another prepare made it; remove it, or give another -o") from error
        space = "free space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DataError(f"{out} cannot be written: {error.strerror}; {space}give another -o") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {**facts, "source_bytes": counts["source_bytes"]}


def _open_source(source: Path, field: str | None) -> tuple[Iterator[Document], int]:
    """The documents, and the bytes that will be read for them. ``field`` makes one file JSONL, whatever its name."""
    try:
        if not source.exists():
            raise DataError(f"{source} does not exist; give a text file, a .jsonl file or a folder of one kind")
        files = files_of(source)
        total = sum(os.path.getsize(file) for file in files)
    except OSError as error:
        refuse_unreadable(error, source)
    if not files:
        raise DataError(f"{source}: no files found; give a path that holds text")
    one = field is not None and files == [source]
    for file in files:
        suffix = file.suffix.lower()
        if suffix in _NO_TEXT and not (one and suffix in _JSON):
            raise DataError(f"{file}: a {suffix} file is not read as text; {_NO_TEXT[suffix]}")
    lines = [file for file in files if one or file.suffix.lower() == ".jsonl"]
    others = [] if lines == files else [file for file in files if file.suffix.lower() != ".jsonl"]
    if lines and others:
        raise DataError(
            f"{source} holds JSONL, such as {lines[0]}, and other files, such as {others[0]}; "
            "give a folder of one kind, or a file"
        )
    if others and field is not None:
        raise DataError(f"--field {field} is not read with text, and {others[0]} is no .jsonl file; remove it")
    documents = jsonl_documents(lines, "text" if field is None else field) if lines else text_documents(others)
    return documents, total


def _write(folder: Path, documents: Iterable[Document], total: int, tokenizer: Tokenizer) -> dict[str, int]:
    """Everything but the manifest. Returns how many documents, tokens and bytes of the source there were."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    if tokenizer.content is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer.content)
    counts = {"documents": 0, "tokens": 0, "source_bytes": 0}
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TransferSpeedColumn(), TimeRemainingColumn())
    with (
        open(folder / "tokens.bin", "wb") as tokens_file,
        open(folder / "documents.bin", "wb") as starts_file,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        task, told = progress.add_task("", total=total), time.monotonic()
        for batch in _batches(documents):
            tokens, lengths = tokenizer.encode(batch)
            stops = counts["tokens"] + np.cumsum(lengths)
            tokens_file.write(tokens.data)
            starts_file.write((stops - lengths).astype("<i8").data)
            read = sum(document.size for document in batch)
            counts["documents"] += len(batch)
            counts["tokens"] += len(tokens)
            counts["source_bytes"] += read
            shown = f"{counts['documents']:,} documents, {counts['tokens']:,} tokens"
            progress.update(task, advance=read, description=shown)
            if not console.is_terminal and time.monotonic() - told >= _PROGRESS_S:
                print(f"{shown}, {counts['source_bytes'] / 1e6:,.0f} of {total / 1e6:,.0f} MB", file=sys.stderr)
                told = time.monotonic()
        starts_file.write(np.array([counts["tokens"]], dtype="<i8").data)
    return counts


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
