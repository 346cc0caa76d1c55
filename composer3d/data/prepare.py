"""Turn documents into token files in one pass, for ``composer3d prepare``.

This process reads the source and writes the shards; processes of their own tokenize, a batch of
documents at a time. The memory that this takes depends on the longest document and on the number of
processes, not on the size of the source.
"""

import contextlib
import json
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

from composer3d.data import train_tokenizer as train
from composer3d.data.compressed import is_compressed, text_suffix
from composer3d.data.documents import (
    MAX_EXPANSION,
    Document,
    Position,
    SourceFile,
    identify,
    is_drawn,
    list_files,
    read_documents,
)
from composer3d.data.examples import Examples, identity_of, open_example_tokenizer, settings_of
from composer3d.data.tables import PARQUET_SUFFIX, is_dataset, require_package
from composer3d.data.tokenizer import (
    DOCUMENT_BYTES,
    FILE_BYTES,
    Encoded,
    FileTokenizer,
    Tokenizer,
    TokenizerPool,
    open_tokenizer,
    repeated_beginnings,
)
from composer3d.data.tokens import write_manifest
from composer3d.data.unfinished import (
    FinishedShard,
    Piece,
    ShardWriter,
    Unfinished,
    unfinished_folder,
)
from composer3d.facts.errors import DataError
from composer3d.facts.files import read_plain
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import (
    MOST_SHARDS,
    TOKENIZER,
    ContentDigest,
    digest_of,
    digest_of_files,
    shard_files,
)
from composer3d.runtime.files import write_atomic
from composer3d.runtime.launch import usable_cores
from composer3d.runtime.progress import Progress

# Documents are tokenized in batches. A batch ends with the document that reaches one of these
# limits.
_BATCH_BYTES = 512 << 10  # of text
_BATCH_DOCUMENTS = 1 << 14  # each takes about 1000 bytes of memory, even if it is empty

_SHARD_TOKENS = 100_000_000

# The folders to make: the one that is named, or two in it.
_WHOLE, _TRAIN, _VALIDATION = "", "train", "validation"

# Suffixes of files that are refused because they are not text, each with what to do about it.
_JSON_SUFFIXES = (".json", ".ndjson")
_JSON_ADVICE = "rename it to .jsonl if each line is an object, else convert it or move it away"
_NO_TEXT = {
    ".arrow": "give the folder that save_to_disk of datasets made",
    ".json": _JSON_ADVICE,
    ".ndjson": _JSON_ADVICE,
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".lzma", ".lz", ".br", ".z"), "decompress it"),
    **dict.fromkeys(
        (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar"),
        "unpack it, and give the folder",
    ),
}


def prepare(
    sources: Sequence[str],
    out: str,
    *,
    tokenizer: str | None = None,
    train_tokenizer: int | None = None,
    eod: str | None = None,
    field: str | None = None,
    processes: int | None = None,
    shard_tokens: int = _SHARD_TOKENS,
    split: float | None = None,
    examples: Examples | None = None,
    max_expansion: int = MAX_EXPANSION,
    keeps_unfinished: bool = True,
) -> dict[str, Any]:
    """Write the folder ``out`` of token files (see ``tokens``), whole or not at all.

    The folder is written as ``OUT.partial`` (see ``unfinished``) and renamed when it is on disk.
    After an error or an interrupt, the same call goes on after the last finished shard. The files
    depend on the arguments but not on ``processes``, nor on interrupts. Call this function in the
    main thread, because it handles SIGTERM.

    Args:
        sources: text files; or JSONL files and tables, which are Parquet files and folders that
            ``datasets`` saved; or folders of one kind of file. Text and JSONL may be compressed.
            They are read in this order.
        out: the folder to make. It must not exist.
        tokenizer: "bytes", or the path of a tokenizer.json.
        train_tokenizer: instead of ``tokenizer``: train a tokenizer of this number of tokens on the
            sources (see ``train_tokenizer.train_tokenizer``). ``out`` gets its tokenizer.json and
            its tokenizer_config.json, also with ``split``.
        eod: the name of the token that ends each document. None: a usual name that the tokenizer
            has, such as "</s>"; of a trained one, "<|endoftext|>". It must be None for "bytes".
        field: the key of the text in JSONL, or its column in a table. None: "text". If it is given,
            a single file is read as JSONL, whatever its name, unless it is a table.
        processes: the processes that tokenize. None: one for each core of this process.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        split: make the folders ``train`` and ``validation`` in ``out``, with this share of the
            documents in the latter. The text of a document decides, so equal documents are on one
            side.
        examples: the lines of JSONL are examples of this kind, which give a mask. ``tokenizer`` may
            then be a folder. None: they have texts, all of which are learned.
        max_expansion: the most bytes of text for each byte of a compressed file or a table, as in
            ``read_documents``.
        keeps_unfinished: whether a later call may go on after an error or an interrupt. Otherwise
            nothing is left then.

    Returns:
        The facts in ``tokens.json``: the numbers of ``documents`` and ``tokens``, and with
        ``examples`` of tokens that are ``learned``; ``vocab`` (the size of the vocabulary),
        ``dtype``, ``end_of_document`` (a token) and ``tokenizer`` (its name and digest);
        ``shards``, their number; ``source_bytes``, the number of bytes that were read; and
        ``resumed_bytes``, the part of them that an earlier call had read. With ``split``,
        ``splits`` has the numbers of documents, tokens and shards of each folder. With
        ``train_tokenizer``, ``trained_tokenizer`` is the path of the tokenizer.json.

    Raises:
        DataError: the source or the tokenizer cannot be used, or the text is too little to train
            one, or ``out`` exists or cannot be written, or ``OUT.partial`` is of another call or in
            use.
        SystemExit: SIGTERM has arrived.
    """
    assert (tokenizer is None) != (train_tokenizer is None)
    options = [*(("SRC", source) for source in sources), ("-o", out)]
    if tokenizer is not None:
        options.append(("--tokenizer", tokenizer))
    for option, path in options:
        _require_valid_path(option, path)
    target = Path(os.path.abspath(out))
    if os.path.lexists(target):
        raise DataError(f"{one_line(target)} exists; remove it, or give another -o")
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        unfinished = unfinished_folder(target)
        files, field = _list_sources([Path(source) for source in sources], field, unfinished)
        source = " ".join(sources)
        if examples is not None and (field is None or any(file.kind != "text" for file in files)):
            what = "text" if field is None else "a table"
            raise DataError(
                f"{one_line(source)}: --kind {examples.kind} reads JSONL, and this is {what}; give "
                ".jsonl files"
            )
        processes = processes or usable_cores()
        work = _Work(
            target,
            files,
            field,
            processes,
            shard_tokens,
            split,
            examples,
            max_expansion,
            keeps_unfinished,
        )
        if train_tokenizer is not None:
            return work.run_with_trained(source, train_tokenizer, eod or train.END)
        assert tokenizer is not None
        with contextlib.closing(_open_tokenizer(tokenizer, eod, examples)) as opened:
            return work.run(source, opened)
    finally:
        signal.signal(signal.SIGTERM, handler)


def _open_tokenizer(name: str, eod: str | None, examples: Examples | None) -> Tokenizer:
    if examples is None:
        return open_tokenizer(name, eod)
    return open_example_tokenizer(name, eod, examples)


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
    """One call of ``prepare``, with its arguments.

    Attributes:
        files: the files of the source.
        field: the key or the column of the text; None for text files.
    """

    out: Path
    files: list[SourceFile]
    field: str | None
    processes: int
    shard_tokens: int
    split: float | None
    examples: Examples | None
    max_expansion: int
    keeps_unfinished: bool

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the folders to make."""
        return (_WHOLE,) if self.split is None else (_TRAIN, _VALIDATION)

    def run(self, source: str, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write the folder, and return what ``prepare`` returns. ``source`` is for messages."""
        digest = None if tokenizer.content is None else digest_of(tokenizer.content)
        settings = self._settings(digest, tokenizer.end)
        if self.examples is not None:
            settings["examples"] = settings_of(self.examples, tokenizer)
        with (
            self._reports_unwritable(),
            Unfinished(
                self.out, settings, self.files, self.splits, is_kept=self.keeps_unfinished
            ) as unfinished,
        ):
            return self._write(unfinished, source, tokenizer)

    def run_with_trained(self, source: str, size: int, end: str) -> dict[str, Any]:
        """Do as ``run``, with a tokenizer that is trained first.

        The tokenizer depends on the whole source. So an unfinished folder is only of this call if
        no file of the source has changed, and then its tokenizer is the one to use.
        """
        identities = [[os.fsencode(file.path).hex(), *file[1:]] for file in self.files]
        trained = {"size": size, "sources": digest_of(json.dumps(identities).encode())}
        settings = self._settings(trained, end)
        with (
            self._reports_unwritable(),
            Unfinished(
                self.out,
                settings,
                self.files,
                self.splits,
                keeps_tokenizer=True,
                is_kept=self.keeps_unfinished,
            ) as unfinished,
        ):
            path = unfinished.folder / TOKENIZER
            if os.path.lexists(path):
                content = read_plain(path, limit=FILE_BYTES, follow_links=False)
                shown = one_line(unfinished.folder)
                print(f"{shown}: goes on with the tokenizer that it holds", file=sys.stderr)
            else:
                documents = read_documents(
                    self.files,
                    self.field,
                    longest=DOCUMENT_BYTES,
                    max_expansion=self.max_expansion,
                )
                with contextlib.closing(documents):
                    content = train.train_tokenizer(
                        documents,
                        size=size,
                        end=end,
                        source_bytes=sum(file.size for file in self.files),
                        processes=self.processes,
                    )
                write_atomic(path, content)
            write_atomic(unfinished.folder / train.CONFIG, train.make_config(end))
            name = f"{TOKENIZER} (trained)"
            with contextlib.closing(FileTokenizer(name, content, (end,))) as tokenizer:
                result = self._write(unfinished, source, tokenizer)
        return {**result, "trained_tokenizer": str(self.out / TOKENIZER)}

    def _settings(self, tokenizer: Any, end: int | str) -> dict[str, Any]:
        """Return all that determines the output, besides the source."""
        return {
            "format": "composer3d prepare",
            "version": 2,  # of the journal
            "tokenizer": tokenizer,
            "eod": end,
            "field": self.field,
            "shard tokens": self.shard_tokens,
            "split": self.split,
        }

    @contextlib.contextmanager
    def _reports_unwritable(self) -> Iterator[None]:
        """Raise DataError if the body cannot write the folder."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{one_line(self.out)} cannot be written: {error.strerror}; give another -o"
            ) from error

    def _write(self, unfinished: Unfinished, source: str, tokenizer: Tokenizer) -> dict[str, Any]:
        """Write what is missing in the unfinished folder, and give it its name."""
        content = tokenizer.content
        facts: dict[str, Any] = {
            "dtype": tokenizer.dtype.name,
            "vocab": tokenizer.vocab,
            "end_of_document": tokenizer.end,
            "tokenizer": {
                "name": tokenizer.name,
                "digest": None if content is None else digest_of(content),
            },
        }
        if tokenizer.template is not None:
            facts["chat_template"] = digest_of(tokenizer.template.encode())
        resumed_bytes = unfinished.last.source_bytes
        with contextlib.closing(TokenizerPool(tokenizer, self.processes)) as pool:
            self._write_pieces(unfinished, pool, longest=tokenizer.longest)
        counts = {name: _count(unfinished.shards_of(name)) for name in self.splits}
        if not unfinished.pieces:
            raise DataError(f"{one_line(source)}: all files are empty; give a path that holds text")
        if unfinished.last.turn_ends:
            facts["turn_ends"] = sorted(unfinished.last.turn_ends)
        for name, count in counts.items():
            if not count["documents"]:
                unfinished.discard()
                raise DataError(
                    f"--split {self.split} leaves no document for {name}; use another --split, or "
                    "give more documents"
                )
            if count.get("learned") == 0:
                unfinished.discard()
                raise DataError(
                    f"{one_line(source)}: no token{f' of {name}' if name else ''} is learned, "
                    "because all examples say that they are not; give others"
                )
            _finish_folder(unfinished.folder / name, facts, unfinished.shards_of(name), content)
        unfinished.publish()
        keys = [key for key in _COUNTS if key != "learned" or self.examples is not None]
        whole = {key: sum(count[key] for count in counts.values()) for key in keys}
        return {
            **facts,
            **whole,
            "source_bytes": unfinished.last.source_bytes,
            "resumed_bytes": resumed_bytes,
            **({} if self.split is None else {"splits": counts}),
        }

    def _write_pieces(self, unfinished: Unfinished, pool: TokenizerPool, *, longest: int) -> None:
        """Tokenize what is left of the source, and add it to the folder piece by piece."""
        end, source_bytes, _, turn_ends = unfinished.last
        documents = read_documents(
            self.files,
            self.field if self.examples is None else self.examples.parse,
            longest=longest,
            start=end,
            max_expansion=self.max_expansion,
        )
        total_bytes = sum(file.size for file in self.files) - source_bytes
        counted = {name: _count(unfinished.shards_of(name)) for name in self.splits}
        documents_done = sum(count["documents"] for count in counted.values())
        tokens_done = sum(count["tokens"] for count in counted.values())
        repeated = 0
        writers: dict[str, ShardWriter] = {}  # of the piece that is being written

        try:
            with Progress("prepare", total_bytes, "B") as progress:
                for batch, encoded in _encode(pool, _batches(documents)):
                    tokens, lengths, mask = encoded[:3]
                    turn_ends |= encoded.turn_ends
                    repeated += encoded.repeated
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
                            unfinished.add(_finish_piece(writers, end, source_bytes, turn_ends))
                        first, first_token = stop, stop_token
                    documents_done += len(batch)
                    tokens_done += len(tokens)
                    note = f"{documents_done:,} documents, {tokens_done:,} tokens"
                    progress.advance(sum(document.size for document in batch), note)
            if writers:
                unfinished.add(_finish_piece(writers, end, source_bytes, turn_ends))
            if repeated:
                print(f"note: {repeated_beginnings(repeated, 'examples')}", file=sys.stderr)
        finally:
            documents.close()
            for writer in writers.values():
                writer.remove()

    def _begin_piece(self, unfinished: Unfinished) -> dict[str, ShardWriter]:
        """Open the files of the next shard of each split."""
        writers = {}
        for name in self.splits:
            number = len(unfinished.shards_of(name))
            if number == MOST_SHARDS:
                raise DataError(
                    f"{one_line(self.out)} would have more than {MOST_SHARDS:,} shards; "
                    "use a larger --shard-tokens"
                )
            has_mask = self.examples is not None
            writers[name] = ShardWriter(unfinished.folder / name, number, has_mask=has_mask)
        return writers

    def _is_held_out(self, document: Document) -> bool:
        """Return whether a document belongs to validation."""
        if self.split is None:
            return False
        text = document.text if self.examples is None else identity_of(document.text)
        return is_drawn(text, self.split, b"split")


def _encode(pool: TokenizerPool, batches: Iterator[list[Document]]) -> Iterator[_EncodedBatch]:
    """Tokenize batches in parallel; yield them in order.

    Errors are raised in the order of the documents, whatever the processes do. The bytes of
    text that are in work are bounded, so that memory is.
    """
    pending: deque[tuple[list[Document], Future[Encoded], int]] = deque()
    budget = 2 * _BATCH_BYTES * pool.processes
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
            or len(pending) >= 2 * pool.processes
            or sum(entry[2] for entry in pending) + size > budget
        ):
            done, future, _ = pending.popleft()
            yield _EncodedBatch(done, future.result())
        if error is not None:
            raise error
        if not batch:
            return
        pending.append((batch, pool.encode(batch), size))


# What is counted of a folder.
_COUNTS = ("documents", "tokens", "learned", "shards")


def _count(shards: Sequence[FinishedShard]) -> dict[str, int]:
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


def _finish_piece(
    writers: dict[str, ShardWriter], end: Position, source_bytes: int, turn_ends: frozenset[int]
) -> Piece:
    """Finish the shards, take them out of ``writers``, and return the piece."""
    shards = {}
    for name in list(writers):
        shard = writers[name].finish()
        del writers[name]
        if shard is not None:
            shards[name] = shard
    return Piece(end, source_bytes, shards, turn_ends)


def _finish_folder(
    folder: Path, facts: dict[str, Any], shards: Sequence[FinishedShard], tokenizer: bytes | None
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
    content = ContentDigest()
    for shard in shards:
        content.join(ContentDigest(int(shard.content, 16), shard.documents))
    in_order = [shard.tokens_file for shard in shards]
    in_order += [shard.mask_file for shard in shards if shard.mask_file is not None]
    facts["content"] = {
        "digest": content.hexdigest(),
        "files": digest_of_files(entry.digests for entry in in_order),
    }
    write_manifest(folder, facts, files)


def _list_sources(
    sources: Sequence[Path], field: str | None, unfinished: Path
) -> tuple[list[SourceFile], str | None]:
    """Return the files of all sources, and the key of the text, which is None for text files.

    Files in the folder ``unfinished`` are left out: prepare writes them.

    Raises DataError as ``_list_source``, or if one source is text and another one is not, or if two
    sources have the same file.
    """
    files: list[SourceFile] = []
    fields = []
    owners: dict[str, Path] = {}  # the source of each file
    for source in sources:
        found, field_of_source = _list_source(source, field, unfinished)
        files += found
        own = {os.path.realpath(file.path): source for file in found}
        for path in own.keys() & owners.keys():
            raise DataError(
                f"{one_line(path)}: is in {one_line(owners[path])} and in {one_line(source)}, so "
                "that its text would be there twice; give it once"
            )
        owners |= own
        fields.append(field_of_source)
        if field_of_source != fields[0]:
            raise DataError(
                f"{one_line(sources[0])} and {one_line(source)}: one is text and the other is "
                "JSONL or a table; give sources of one kind, and prepare the others into a folder "
                "of their own"
            )
    return files, fields[0]


def _list_source(
    source: Path, field: str | None, unfinished: Path
) -> tuple[list[SourceFile], str | None]:
    """Return the files of a source, and the key of the text, which is None for text files.

    Files in the folder ``unfinished`` are left out.

    A single file of any name is JSONL if ``field`` is given, unless it is Parquet. A folder that
    ``datasets`` saved is one "file".

    Raises DataError if there are no files, or they are not all of one kind.
    """
    if not os.path.exists(source):
        raise DataError(
            f"{one_line(source)} does not exist; "
            "give a text file, a .jsonl or .parquet file, or a folder of one kind"
        )
    key = "text" if field is None else field
    if is_dataset(source):
        require_package("dataset", source)
        return [identify(source, "dataset")], key
    own = source / os.path.relpath(os.path.realpath(unfinished), os.path.realpath(source))
    files = [file for file in list_files(source) if not file.is_relative_to(own)]
    if not files:
        raise DataError(f"{one_line(source)}: no files found; give a path that holds text")

    examples = {text_suffix(file): file for file in files}  # a file of each suffix
    is_parquet = PARQUET_SUFFIX in examples
    is_jsonl_by_field = field is not None and files == [source] and not is_parquet
    for suffix, file in examples.items():
        is_accepted = suffix not in _NO_TEXT or (is_jsonl_by_field and suffix in _JSON_SUFFIXES)
        if not is_accepted:
            raise DataError(
                f"{one_line(file)}: a {one_line(suffix)} file is not read as text; "
                f"{_NO_TEXT[suffix]}"
            )

    for suffix, kind in ((".jsonl", "JSONL"), (PARQUET_SUFFIX, "Parquet")):
        others = [file for other, file in examples.items() if other != suffix]
        if suffix in examples and others:
            raise DataError(
                f"{one_line(source)} holds {kind} and other files, such as {one_line(others[0])}; "
                "give a folder of one kind"
            )
    if is_parquet:
        compressed = [file for file in files if is_compressed(file)]
        if compressed:
            raise DataError(
                f"{one_line(compressed[0])}: Parquet is compressed inside; decompress it"
            )
        require_package("parquet", source)
        return [identify(file, "parquet") for file in files], key
    if is_jsonl_by_field or ".jsonl" in examples:
        return [identify(file, "text") for file in files], key
    if field is not None:
        raise DataError(
            f"--field {one_line(field)} is only read with JSONL and tables, and {one_line(source)} "
            "holds neither a .jsonl nor a .parquet file; remove it"
        )
    return [identify(file, "text") for file in files], None


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
