"""Turn documents into token files in one pass, for ``composer3d prepare``.

This process reads the source and writes the shards; processes of their own tokenize, a batch of
documents at a time. The memory that this takes depends on the longest document and on the number of
processes, not on the size of the source.
"""

import contextlib
import hashlib
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer3d.data.compressed import text_suffix
from composer3d.data.documents import (
    Document,
    Position,
    SourceFile,
    identify,
    list_files,
    read_documents,
)
from composer3d.data.examples import Examples, open_example_tokenizer, settings_of
from composer3d.data.tokenizer import Encoded, Tokenizer, TokenizerPool, open_tokenizer
from composer3d.data.tokens import write_manifest
from composer3d.data.unfinished import Piece, Shard, ShardWriter, Unfinished
from composer3d.recipe.values import one_line
from composer3d.runtime.files import write_atomic
from composer3d.runtime.progress import Progress
from composer3d.spec.errors import DataError
from composer3d.spec.token_manifest import MOST_SHARDS, TOKENIZER, digest_of, shard_files

# Documents are tokenized in batches. A batch ends with the document that reaches one of these
# limits.
_BATCH_BYTES = 512 << 10  # of text
_BATCH_DOCUMENTS = 1 << 14  # each takes about 1000 bytes of memory, even if it is empty

SHARD_TOKENS = 100_000_000

# The folders to make: the one that is named, or two in it.
_WHOLE, _TRAIN, _VALIDATION = "", "train", "validation"

# Suffixes of files that are refused because they are not text, each with what to do about it.
_JSON_SUFFIXES = (".json", ".ndjson")
_JSON_ADVICE = "rename it to .jsonl if each line is an object, else convert it or move it away"
_NO_TEXT = {
    ".parquet": "convert it to JSONL",
    ".json": _JSON_ADVICE,
    ".ndjson": _JSON_ADVICE,
    ".bz2": "decompress it",
    ".xz": "decompress it",
}


def prepare(
    sources: Sequence[str],
    out: str,
    *,
    tokenizer: str,
    eod: str | None = None,
    field: str | None = None,
    processes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    split: float | None = None,
    examples: Examples | None = None,
) -> dict[str, Any]:
    """Write the folder ``out`` of token files (see ``tokens``), whole or not at all.

    The folder is written as ``OUT.partial`` (see ``unfinished``) and renamed when it is on disk.
    After an error or an interrupt, the same call goes on after the last finished shard. The files
    depend on the arguments but not on ``processes``, nor on interrupts. Call this function in the
    main thread, because it handles SIGTERM.

    Args:
        sources: text files, JSONL files, or folders; all of one kind. They may be compressed, and
            are read in this order.
        out: the folder to make. It must not exist.
        tokenizer: "bytes", or the path of a tokenizer.json.
        eod: the name of the token that ends each document. None: a usual name that the tokenizer
            has, such as "</s>". It must be None for "bytes".
        field: the key of the text in JSONL. None: "text". If it is given, a single file is read as
            JSONL, whatever its name.
        processes: the processes that tokenize. None: one for each core of this process.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        split: make the folders ``train`` and ``validation`` in ``out``, with this share of the
            documents in the latter. The text of a document decides, so equal documents are on one
            side.
        examples: the lines of JSONL are examples of this kind, which give a mask. ``tokenizer`` may
            then be a folder. None: they have texts, all of which are learned.

    Returns:
        The facts in ``tokens.json``: the numbers of ``documents`` and ``tokens``, and with
        ``examples`` of tokens that are ``learned``; ``vocab`` (the
        size of the vocabulary), ``dtype``, ``end_of_document`` (a token) and ``tokenizer`` (its
        name and digest); ``shards``, their number; ``source_bytes``, the number of bytes that were
        read; and ``resumed_bytes``, the part of them that an earlier call had read. With ``split``,
        ``splits`` has the numbers of documents, tokens and shards of each folder.

    Raises:
        DataError: the source or the tokenizer cannot be used, or ``out`` exists or cannot be
            written, or ``OUT.partial`` is of another call or in use.
        SystemExit: SIGTERM has arrived.
    """
    options = [*(("SRC", source) for source in sources), ("-o", out), ("--tokenizer", tokenizer)]
    for option, path in options:
        _require_valid_path(option, path)
    target = Path(os.path.abspath(out))
    if os.path.lexists(target):
        raise DataError(f"{_shown(target)} exists; remove it, or give another -o")
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        files, field = _list_sources([Path(source) for source in sources], field)
        with (
            contextlib.closing(_open_tokenizer(tokenizer, eod, examples)) as opened,
            contextlib.closing(TokenizerPool(opened, processes or _cores())) as pool,
        ):
            if examples is not None and field is None:
                raise DataError(
                    f"{one_line(sources[0])}: --kind {examples.kind} reads JSONL, and this is "
                    "text; give .jsonl files"
                )
            work = _Work(target, files, field, opened, pool, shard_tokens, split, examples)
            return work.run(" ".join(sources))
    finally:
        signal.signal(signal.SIGTERM, handler)


def _open_tokenizer(name: str, eod: str | None, examples: Examples | None) -> Tokenizer:
    if examples is None:
        return open_tokenizer(name, eod)
    return open_example_tokenizer(name, eod, examples)


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require_valid_path(option: str, path: str) -> None:
    """Raise DataError if a path contains NUL or cannot be encoded, so that no file can have it."""
    try:
        is_valid = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_valid = False
    if not is_valid:
        raise DataError(f"{option} {one_line(path)}: no file can have such a name; give another")


class _EncodedBatch(NamedTuple):
    """A batch of documents, and what ``Tokenizer.encode`` returns for it."""

    batch: list[Document]
    encoded: Encoded


@dataclass
class _Work:
    """One call of ``prepare``.

    Attributes:
        out: the folder to make.
        files: the files of the source.
        field: the key of the text in JSONL; None for text files.
        tokenizer: the tokenizer.
        pool: as many of it as there are processes.
        shard_tokens: as in ``prepare``.
        split: as in ``prepare``.
        examples: as in ``prepare``.
    """

    out: Path
    files: list[SourceFile]
    field: str | None
    tokenizer: Tokenizer
    pool: TokenizerPool
    shard_tokens: int
    split: float | None
    examples: Examples | None

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the folders to make."""
        return (_WHOLE,) if self.split is None else (_TRAIN, _VALIDATION)

    def run(self, source: str) -> dict[str, Any]:
        """Write the folder, and return what ``prepare`` returns. ``source`` is for messages."""
        content = self.tokenizer.content
        digest = None if content is None else digest_of(content)
        settings = {
            "format": "composer3d prepare",
            "version": 1,
            "tokenizer": digest,
            "eod": self.tokenizer.end,
            "field": self.field,
            "shard tokens": self.shard_tokens,
            "split": self.split,
        }
        if self.examples is not None:
            settings["examples"] = settings_of(self.examples, self.tokenizer)
        facts: dict[str, Any] = {
            "dtype": self.tokenizer.dtype.name,
            "vocab": self.tokenizer.vocab,
            "end_of_document": self.tokenizer.end,
            "tokenizer": {"name": self.tokenizer.name, "digest": digest},
        }
        try:
            with Unfinished(self.out, settings, self.files, self.splits) as unfinished:
                resumed_bytes = unfinished.source_bytes
                self._write_pieces(unfinished)
                counts = {name: _count(unfinished.shards_of(name)) for name in self.splits}
                if not unfinished.pieces:
                    raise DataError(
                        f"{one_line(source)}: all files are empty; give a path that holds text"
                    )
                for name, count in counts.items():
                    if not count["documents"]:
                        raise DataError(
                            f"--split {self.split} leaves no document for {name}; use another "
                            "--split, or give more documents"
                        )
                    _finish_folder(
                        unfinished.folder / name, facts, unfinished.shards_of(name), content
                    )
                unfinished.publish()
        except OSError as error:
            raise DataError(
                f"{_shown(self.out)} cannot be written: {error.strerror}; give another -o"
            ) from error
        keys = [key for key in _COUNTS if key != "learned" or self.examples is not None]
        whole = {key: sum(count[key] for count in counts.values()) for key in keys}
        return {
            **facts,
            **whole,
            "source_bytes": unfinished.source_bytes,
            "resumed_bytes": resumed_bytes,
            **({} if self.split is None else {"splits": counts}),
        }

    def _write_pieces(self, unfinished: Unfinished) -> None:
        """Tokenize what is left of the source, and add it to the folder piece by piece."""
        documents = read_documents(
            self.files,
            self.field if self.examples is None else self.examples.parse,
            longest=self.tokenizer.longest,
            start=unfinished.end,
        )
        source_bytes = unfinished.source_bytes
        total_bytes = sum(file.size for file in self.files) - source_bytes
        counted = {name: _count(unfinished.shards_of(name)) for name in self.splits}
        documents_done = sum(count["documents"] for count in counted.values())
        tokens_done = sum(count["tokens"] for count in counted.values())
        end = unfinished.end
        writers: dict[str, ShardWriter] = {}  # of the piece that is being written

        try:
            with Progress("prepare", total_bytes, "B") as progress:
                for batch, (tokens, lengths, mask) in self._encode(_batches(documents)):
                    is_held_out = np.array([self._is_held_out(document) for document in batch])
                    # A piece ends within the batch, at a document.
                    first, first_token = 0, 0
                    while first < len(batch):
                        if not writers:
                            writers = self._begin_piece(unfinished)
                        done = sum(writer.tokens for writer in writers.values())
                        totals = done + np.cumsum(lengths[first:])
                        room = int(np.searchsorted(totals, self.shard_tokens)) + 1
                        stop = min(first + room, len(batch))
                        stop_token = first_token + int(lengths[first:stop].sum())
                        _write_documents(
                            writers,
                            tokens[first_token:stop_token],
                            lengths[first:stop],
                            is_held_out[first:stop],
                            None if mask is None else mask[first_token:stop_token],
                        )
                        source_bytes += sum(document.size for document in batch[first:stop])
                        end = batch[stop - 1].end
                        if done + stop_token - first_token >= self.shard_tokens:
                            unfinished.add(_finish_piece(writers, end, source_bytes))
                        first, first_token = stop, stop_token
                    documents_done += len(batch)
                    tokens_done += len(tokens)
                    note = f"{documents_done:,} documents, {tokens_done:,} tokens"
                    progress.advance(sum(document.size for document in batch), note)
            if writers:
                unfinished.add(_finish_piece(writers, end, source_bytes))
        finally:
            for writer in writers.values():
                writer.remove()

    def _begin_piece(self, unfinished: Unfinished) -> dict[str, ShardWriter]:
        """Open the files of the next shard of each split."""
        writers = {}
        for name in self.splits:
            number = len(unfinished.shards_of(name))
            if number == MOST_SHARDS:
                raise DataError(
                    f"{_shown(self.out)} would have more than {MOST_SHARDS:,} shards; "
                    "use a larger --shard-tokens"
                )
            has_mask = self.examples is not None
            writers[name] = ShardWriter(unfinished.folder / name, number, has_mask=has_mask)
        return writers

    def _is_held_out(self, document: Document) -> bool:
        """Return whether a document belongs to validation: by its text alone."""
        if self.split is None:
            return False
        digest = hashlib.blake2b(document.text, digest_size=8, person=b"split").digest()
        return int.from_bytes(digest, "big") < self.split * 2**64

    def _encode(self, batches: Iterator[list[Document]]) -> Iterator[_EncodedBatch]:
        """Tokenize batches in parallel; yield them in order.

        Errors are raised in the order of the documents, whatever the processes do. The bytes of
        text that are in work are bounded, so that memory is.
        """
        pending: deque[tuple[list[Document], Future[Encoded], int]] = deque()
        budget = 2 * _BATCH_BYTES * self.pool.processes
        error: DataError | None = None
        while True:
            batch: list[Document] = []
            try:
                batch = next(batches, [])
            except DataError as reading_error:
                # A document before the one that cannot be read may have an error of its own.
                error = reading_error
            size = sum(len(document.text) for document in batch)
            while pending and (
                not batch
                or len(pending) >= 2 * self.pool.processes
                or sum(entry[2] for entry in pending) + size > budget
            ):
                done, future, _ = pending.popleft()
                yield _EncodedBatch(done, future.result())
            if error is not None:
                raise error
            if not batch:
                return
            pending.append((batch, self.pool.encode(batch), size))


# What is counted of a folder.
_COUNTS = ("documents", "tokens", "learned", "shards")


def _count(shards: Sequence[Shard]) -> dict[str, int]:
    """Count what shards hold. Only shards with masks have ``learned``."""
    learned = [shard.learned for shard in shards if shard.learned is not None]
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        **({"learned": sum(learned)} if learned else {}),
        "shards": len(shards),
    }


def _write_documents(
    writers: dict[str, ShardWriter],
    tokens: np.ndarray,
    lengths: np.ndarray,
    is_held_out: np.ndarray,
    mask: np.ndarray | None,
) -> None:
    """Write each document into its split: the first one, or the last one if it is held out."""
    if len(writers) == 1:
        writers[_WHOLE].write(tokens, lengths, mask)
        return
    for name, chosen in ((_TRAIN, ~is_held_out), (_VALIDATION, is_held_out)):
        is_chosen = np.repeat(chosen, lengths)
        chosen_mask = None if mask is None else mask[is_chosen]
        writers[name].write(tokens[is_chosen], lengths[chosen], chosen_mask)


def _finish_piece(writers: dict[str, ShardWriter], end: Position, source_bytes: int) -> Piece:
    """Finish the shards, take them out of ``writers``, and return the piece."""
    shards = {}
    for name in list(writers):
        shard = writers[name].finish()
        del writers[name]
        if shard is not None:
            shards[name] = shard
    return Piece(end, source_bytes, shards)


def _finish_folder(
    folder: Path, facts: dict[str, Any], shards: Sequence[Shard], tokenizer: bytes | None
) -> None:
    """Write the tokenizer and the manifest of a folder whose shards are written, and sync it."""
    counts = _count(shards)
    facts = {**facts, "tokens": counts["tokens"], "documents": counts["documents"]}
    files: dict[str, dict[str, Any]] = {}
    if tokenizer is not None:
        write_atomic(folder / TOKENIZER, tokenizer)
        files[TOKENIZER] = {"bytes": len(tokenizer), "digests": [digest_of(tokenizer)]}
    has_mask = shards[0].mask_file is not None
    if len(shards) == 1 and not has_mask:  # version 1 of the format
        (shard,) = shards
        for name, old_name in zip(shard_files(None), shard_files(0), strict=True):
            (folder / old_name).rename(folder / name)
            files[name] = shard.files(0)[old_name]._asdict()
    else:
        parts = [{"tokens": shard.tokens, "documents": shard.documents} for shard in shards]
        facts = {**facts, "shards": parts}
        for number, shard in enumerate(shards):
            files |= {name: entry._asdict() for name, entry in shard.files(number).items()}
    if has_mask:
        facts = {**facts, "learned": counts["learned"]}
    write_manifest(folder, facts, files)


def _list_sources(
    sources: Sequence[Path], field: str | None
) -> tuple[list[SourceFile], str | None]:
    """Return the files of all sources, and the key of the text, which is None for text files.

    Raises DataError as ``_list_source``, or if the sources are not of one kind.
    """
    files, fields = [], []
    for source in sources:
        found, field_of_source = _list_source(source, field)
        files += found
        fields.append(field_of_source)
        if field_of_source != fields[0]:
            raise DataError(
                f"{_shown(sources[0])} and {_shown(source)}: one is text and the other is JSONL; "
                "give sources of one kind, and prepare the others into a folder of their own"
            )
    return identify(files), fields[0]


def _list_source(source: Path, field: str | None) -> tuple[list[Path], str | None]:
    """Return the files of a source, and the key of the text, which is None for text files.

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

    examples = {text_suffix(file): file for file in files}  # a file of each suffix
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
