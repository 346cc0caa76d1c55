"""Token files: a folder that ``composer3d prepare`` writes once and training maps into memory.

The folder holds one shard or more, each with

- ``tokens.bin``: the tokens of all documents, each document followed by an end-of-document token;
  little-endian uint16 or uint32;
- ``documents.bin``: the index of each document's first token, and at the end the number of tokens;
  little-endian int64. Indices count from the first token of the shard;
- if only some tokens are learned, ``mask-00000.bin``: a byte for each token, 1 if it is learned
  and else 0;

and

- ``tokenizer.json``: a copy of the tokenizer; absent if the tokens are bytes;
- ``tokens.json``: the manifest, with the size and the digests of each file and a digest of itself;
  written last.

In a folder of several shards or with masks, the files of a shard are ``tokens-00000.bin`` and
``documents-00000.bin``, with the number of the shard. The tokens of a folder are those of its
shards, joined. So a sample may begin in one shard and end in the next one, and the samples of a
folder do not depend on how it is cut.
"""

import json
import os
import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError, RankDataError
from composer3d.facts.token_manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    MASK_VERSION,
    SHARDS_VERSION,
    VERSION,
    ContentDigest,
    Shard,
    TokenManifest,
    digest_of,
    digest_of_manifest,
)
from composer3d.runtime import environment, log
from composer3d.runtime.files import sync, write_atomic
from composer3d.runtime.launch import usable_cores

_BLOCK_TOKENS = 1 << 18  # tokens that are compared at a time, so that they fit into a cache
_BLOCK_DOCUMENTS = 1 << 12  # documents that are digested at a time
_START_BYTES = 8  # in an entry of documents.bin
_MOST_CHUNKS = 16  # that a rank verifies when it opens a folder
_MOST_THREADS = 4  # of a rank that verifies; each holds a chunk in memory
MOST_MAPS = 128  # shards of a folder that are mapped at once; each map holds an open file


class ShardedTokens:
    """The tokens of several shards, or their masks, as one read-only array without joining them.

    A shard is mapped into memory when one of its tokens is first read. At most ``most_maps`` shards
    are mapped at once; the one that was read longest ago makes room. One thread at a time may read.

    Args:
        manifest: the folder.
        most_maps: at least 1.
        masks: whether the masks are read instead of the tokens.
    """

    def __init__(self, manifest: TokenManifest, most_maps: int, *, masks: bool = False) -> None:
        self._manifest = manifest
        self._most_maps = most_maps
        self._masks = masks
        self._stops = np.cumsum([shard.tokens for shard in manifest.shards])
        self._maps: OrderedDict[int, np.ndarray] = OrderedDict()  # the last one is the newest
        self.dtype = np.dtype(np.uint8) if masks else _dtype(manifest)

    def __len__(self) -> int:
        return self._manifest.tokens

    def __getitem__(self, index: np.ndarray | int) -> np.ndarray:
        """Return copies of the tokens at ``index``: integers from 0 to len - 1, in any shape.

        Raises:
            RankDataError: the file of a shard is missing, or has another size than before.
        """
        flat = np.asarray(index).reshape(-1)
        result = np.empty(flat.shape, self.dtype)
        owners = np.searchsorted(self._stops, flat, side="right")
        for number in np.unique(owners):
            here = owners == number
            first = self._stops[number] - self._manifest.shards[number].tokens
            result[here] = self._map(int(number))[flat[here] - first]
        return result.reshape(np.shape(index))

    def _map(self, number: int) -> np.ndarray:
        """Return the tokens or the mask of a shard, mapped into memory."""
        if number in self._maps:
            self._maps.move_to_end(number)
            return self._maps[number]
        while len(self._maps) >= self._most_maps:
            self._maps.popitem(last=False)
        shard = self._manifest.shards[number]
        map_part = _map_mask if self._masks else _map_shard
        try:
            self._maps[number] = map_part(self._manifest, shard)
        except DataError as error:
            # Ranks read other shards, and at other times.
            raise RankDataError(error.lines) from error
        return self._maps[number]


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split.

    Attributes:
        tokens: 1-D and read-only: uint8 in memory, or little-endian uint16 or uint32 in a
            memory-mapped file, or in the files of several shards. Index it with an array of
            integers, which all three accept. Each document is followed by one end-of-document
            token, which appears nowhere else.
        end_of_document: the end-of-document token.
        digest: the digest of the tokens and of the mask, in hexadecimal. Equal digests mean equal
            tokens, and that the same ones are learned. It does not depend on shards.
        n_documents: the number of documents.
        name: the name of the corpus, for messages.
        mask: uint8, as long as ``tokens`` and indexed in the same way: 1 where a token is learned,
            and else 0. None: all tokens are learned.
        manifest: the manifest of the folder of the tokens. None: they are only in memory.
    """

    tokens: np.ndarray | ShardedTokens
    end_of_document: int
    digest: str
    n_documents: int
    name: str
    mask: np.ndarray | ShardedTokens | None = None
    manifest: TokenManifest | None = None

    @property
    def older_digest(self) -> str:
        """What checkpoints of an older composer3d have in place of ``digest``."""
        return self.digest if self.manifest is None else self.manifest.files_digest


def write_manifest(
    folder: Path, facts: dict[str, Any], files: dict[str, dict[str, Any]] | None = None
) -> None:
    """Add ``tokens.json`` to a folder that is complete otherwise.

    Args:
        folder: the folder of token files.
        facts: ``dtype`` ("uint16" or "uint32"); ``vocab``, the size of the vocabulary; the numbers
            of ``tokens`` and ``documents``; ``end_of_document``, a token; ``tokenizer``, a dict
            with its ``name`` and its ``digest`` (None for bytes); and in a folder of several
            shards, ``shards``: a list with the ``tokens`` and ``documents`` of each. In a folder
            with masks, ``learned``, the number of tokens that are learned, and ``shards``. It may
            have ``content`` and ``turn_ends``, as ``token_manifest`` reads them.
        files: the ``bytes`` and ``digests`` of each file, which must be on the disk. None: all
            files of the folder are read for their digests, and synced to the disk.

    Raises:
        OSError: a file cannot be read or written.
    """
    if files is None:
        files = _read_entries(folder)
    version = SHARDS_VERSION if "shards" in facts else VERSION
    if "learned" in facts:
        version = MASK_VERSION
    manifest = {"format": FORMAT, "version": version, **facts, "files": files}
    manifest["digest"] = digest_of_manifest(manifest)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(folder)


def add_content(
    content: ContentDigest, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None
) -> None:
    """Add documents to the digest of their contents.

    Args:
        content: the digest.
        tokens: the tokens of all documents, in the dtype of the files: 1-D.
        lengths: the number of tokens of each document: integers, 1-D.
        mask: a byte for each token: uint8, 1-D; None if all are learned.
    """
    view = np.ascontiguousarray(tokens).data.cast("B")
    mask_view = None if mask is None else np.ascontiguousarray(mask).data.cast("B")
    size, start = tokens.itemsize, 0
    for length in lengths.tolist():
        stop = start + length
        document = view[start * size : stop * size]
        if mask_view is None:
            content.add(document)
        else:
            content.add(document, mask_view[start:stop])
        start = stop


def _read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Sync all files of a folder, and return the size and the digests of each."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        size = path.stat().st_size
        n_chunks = -(-size // token_manifest.CHUNK_BYTES)
        with open(path, "rb") as file:
            digests = [digest_of(_read_chunk(file, number)) for number in range(n_chunks)]
        files[path.name] = {"bytes": size, "digests": digests}
    return files


def open_tokens(folder: Path, *, name: str, most_maps: int = MOST_MAPS) -> Corpus:
    """Verify a folder of token files and map its tokens into memory.

    Shards are mapped when they are read. Every rank verifies the sizes of all files. The content
    is verified in chunks: each chunk must have its digest, every token must be in the vocabulary,
    documents must be in order, and end-of-document tokens must stand at their ends and nowhere
    else.

    The LOCAL_WORLD_SIZE ranks of a node share the chunks: each verifies its part, or 16 random
    chunks of it (1 GiB) if it has more, in a thread for each of its cores. ``find_damage`` can
    verify all chunks. So all ranks must call this function, and all must stop if one of them fails
    (see ``process_group.on_all``). This function runs no collective. A process without
    LOCAL_WORLD_SIZE has all chunks as its part.

    Args:
        folder: a folder that ``composer3d prepare`` made.
        name: the name of the corpus, for messages.
        most_maps: the number of files that may be mapped at once.

    Raises:
        DataError: a file is missing, or is not what ``prepare`` wrote. The message names the file.
    """
    manifest = token_manifest.read_manifest(folder)
    manifest.check_files()

    chunks = _chunks_of(manifest)
    ranks = environment.local_world_size(default=1)
    rank = environment.local_rank() % ranks
    own = chunks[rank::ranks]
    if len(own) > _MOST_CHUNKS:
        # Other ones at each start, and on each node. No global generator is used.
        own = random.SystemRandom().sample(own, _MOST_CHUNKS)
        log.get().info(
            f"{folder} has {len(chunks):,} parts of up to {token_manifest.CHUNK_BYTES >> 20} MiB: "
            f"each node verifies {ranks * _MOST_CHUNKS} at random; "
            f"composer3d inspect {folder} --full verifies all"
        )
    threads = max(1, min(_MOST_THREADS, usable_cores() // ranks))
    with ThreadPoolExecutor(threads) as pool:
        verified = [pool.submit(_verify_chunk, manifest, *chunk) for chunk in own]
        try:
            for chunk in verified:
                chunk.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    shards = manifest.shards
    has_mask = manifest.learned is not None
    if has_mask:
        most_maps = max(1, most_maps // 2)
    tokens: np.ndarray | ShardedTokens
    mask: np.ndarray | ShardedTokens | None = None
    if len(shards) == 1:
        tokens = _map_shard(manifest, shards[0])
        mask = _map_mask(manifest, shards[0]) if has_mask else None
    else:
        tokens = ShardedTokens(manifest, most_maps)
        mask = ShardedTokens(manifest, most_maps, masks=True) if has_mask else None
    digest = manifest.content or manifest.files_digest
    return Corpus(
        tokens, manifest.end_of_document, digest, manifest.documents, name, mask, manifest
    )


def document_bounds(corpus: Corpus) -> np.ndarray:
    """Return the first token of each document, and the token after the last document.

    For a folder of token files, the files of documents are read, and no tokens.

    Returns:
        int64, (documents + 1,), ascending from 0.

    Raises:
        DataError: a file of documents is missing, or is not what ``prepare`` wrote.
    """
    if corpus.manifest is None:
        assert isinstance(corpus.tokens, np.ndarray)
        ends = np.flatnonzero(corpus.tokens == corpus.end_of_document)
        return np.concatenate([[0], ends + 1])
    parts, first_token = [np.zeros(1, dtype=np.int64)], 0
    for shard in corpus.manifest.shards:
        with corpus.manifest.open(shard.documents_file) as file:
            content = file.read()
        path = corpus.manifest.folder / shard.documents_file
        _check_starts(shard, path, content, is_first=True, is_last=True)
        parts.append(np.frombuffer(content, dtype="<i8")[1:] + first_token)
        first_token += shard.tokens
    return np.concatenate(parts)


def _map_shard(manifest: TokenManifest, shard: Shard) -> np.ndarray:
    with manifest.open(shard.tokens_file) as file:
        return np.memmap(file, dtype=_dtype(manifest), mode="r")


def _map_mask(manifest: TokenManifest, shard: Shard) -> np.ndarray:
    assert shard.mask_file is not None  # of a folder with masks
    with manifest.open(shard.mask_file) as file:
        return np.memmap(file, dtype=np.uint8, mode="r")


def find_damage(manifest: TokenManifest, *, full: bool) -> list[str]:
    """Verify the sizes of all files, and if ``full``, all chunks, in a thread for each core.

    Returns one line for each problem. The list is empty if the files are what ``prepare`` wrote.
    """

    def problem_of(chunk: tuple[str, int]) -> str | None:
        try:
            if full:
                _verify_chunk(manifest, *chunk)
            else:
                manifest.open(chunk[0]).close()
        except DataError as error:
            return error.lines[0]
        return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        chunks = _chunks_of(manifest) if full else [(name, 0) for name in manifest.files]
        problems = threads.map(problem_of, chunks)
        # A file that is missing or cut has the same line for each of its chunks.
        found = list(dict.fromkeys(filter(None, problems)))
    if full and not found and manifest.content not in (None, _read_content(manifest)):
        found.append(
            f"{manifest.folder / MANIFEST} has another digest of the documents than its files; "
            f"{AGAIN}"
        )
    if full and not found and manifest.learned is not None:
        learned = sum(_count_learned(manifest, shard) for shard in manifest.shards)
        if learned != manifest.learned:
            found.append(
                f"{manifest.folder / MANIFEST} says that {manifest.learned} tokens are learned, "
                f"but its masks have {learned}; {AGAIN}"
            )
    return found


def _read_content(manifest: TokenManifest) -> str:
    """Return the digest of all documents, some of them at a time."""
    content = ContentDigest()
    for shard in manifest.shards:
        tokens = _map_shard(manifest, shard)
        mask = None if shard.mask_file is None else _map_mask(manifest, shard)
        with manifest.open(shard.documents_file) as file:
            starts = np.memmap(file, dtype="<i8", mode="r")
        for first in range(0, shard.documents, _BLOCK_DOCUMENTS):
            bounds = starts[first : first + _BLOCK_DOCUMENTS + 1]
            span = slice(int(bounds[0]), int(bounds[-1]))
            part_of_mask = None if mask is None else mask[span]
            add_content(content, tokens[span], np.diff(bounds), part_of_mask)
    return content.hexdigest()


def _count_learned(manifest: TokenManifest, shard: Shard) -> int:
    """Count the tokens of a shard that are learned, a block at a time."""
    mask = _map_mask(manifest, shard)
    blocks = range(0, len(mask), _BLOCK_TOKENS)
    return sum(int(np.count_nonzero(mask[first : first + _BLOCK_TOKENS])) for first in blocks)


def _chunks_of(manifest: TokenManifest) -> list[tuple[str, int]]:
    """Return the file and the number of each chunk.

    Files of documents come first: tokens are compared with them.
    """
    return [
        (file_name, number)
        for file_name, entry in sorted(manifest.files.items())
        for number in range(len(entry.digests))
    ]


def _dtype(manifest: TokenManifest) -> np.dtype[Any]:
    return np.dtype(manifest.dtype).newbyteorder("<")


def _read_chunk(file: BinaryIO, number: int) -> bytes:
    file.seek(number * token_manifest.CHUNK_BYTES)
    return file.read(token_manifest.CHUNK_BYTES)


def _verify_chunk(manifest: TokenManifest, file_name: str, number: int) -> None:
    """Compare one chunk with its digest, and its tokens or document starts with the manifest.

    Raises DataError if they differ.
    """
    path = manifest.folder / file_name
    shard = manifest.shards_by_file.get(file_name)
    is_starts = shard is not None and file_name == shard.documents_file
    begin = number * token_manifest.CHUNK_BYTES
    place = f"between bytes {begin} and {begin + token_manifest.CHUNK_BYTES}"
    with manifest.open(file_name) as file:
        content = _read_chunk(file, number)
        # Also read the last entry of the previous chunk, because the starts must ascend across it.
        previous = b""
        if is_starts and begin:
            file.seek(begin - _START_BYTES)
            previous = file.read(_START_BYTES)

    if digest_of(content) != manifest.files[file_name].digests[number]:
        raise DataError(
            f"{path} is damaged {place}: its digest there is not the one in {MANIFEST}; {AGAIN}"
        )
    if shard is not None and is_starts:
        is_last = begin + len(content) == manifest.files[file_name].bytes
        _check_starts(shard, path, previous + content, is_first=begin == 0, is_last=is_last)
    elif shard is not None and file_name == shard.mask_file:
        if np.frombuffer(content, dtype=np.uint8).max() > 1:
            raise DataError(
                f"{path} holds a byte above 1 {place}, where 1 means learned and 0 means not; "
                f"{AGAIN}"
            )
    elif shard is not None:
        _check_tokens(manifest, shard, path, place, content, begin)


def _check_tokens(
    manifest: TokenManifest, shard: Shard, path: Path, place: str, content: bytes, begin: int
) -> None:
    """Raise DataError if a token is not in the vocabulary, or an end of document is misplaced.

    Training finds the documents by their end-of-document token. So this token must stand before
    each start in the shard's file of documents, and nowhere else.

    Args:
        manifest: the manifest of the folder.
        shard: the shard of the tokens.
        path: its file of tokens.
        place: the place of ``content`` in the file, for messages.
        content: one chunk of the file.
        begin: the offset of ``content`` in the file, in bytes.
    """
    tokens = np.frombuffer(content, dtype=_dtype(manifest))
    first_token = begin // tokens.itemsize
    largest = 0
    stops = []  # the index after each end of document
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[first : first + _BLOCK_TOKENS]
        largest = max(largest, int(block.max()))
        is_end = block == manifest.end_of_document
        stops.append(np.flatnonzero(is_end) + (first_token + first + 1))
    if largest >= manifest.vocab:
        raise DataError(
            f"{path} holds token {largest} {place}, but {MANIFEST} says a vocabulary of "
            f"{manifest.vocab}; {AGAIN}"
        )

    with manifest.open(shard.documents_file) as file:
        starts = np.memmap(file, dtype="<i8", mode="r")
    # The chunks of that file are checked by themselves. If it is not in order, this finds a
    # difference, or nothing.
    bounds = np.searchsorted(starts, [first_token, first_token + len(tokens)], side="right")
    if not np.array_equal(np.concatenate(stops), starts[bounds[0] : bounds[1]]):
        raise DataError(
            f"{path} holds the end of a document (token {manifest.end_of_document}) {place} at "
            f"other places than {shard.documents_file} says; {AGAIN}"
        )


def _check_starts(
    shard: Shard, path: Path, content: bytes, *, is_first: bool, is_last: bool
) -> None:
    """Raise DataError if the starts do not begin at 0, ascend, and end at the number of tokens.

    ``is_first`` and ``is_last`` tell whether ``content`` is from the first or the last chunk.
    """
    starts = np.frombuffer(content, dtype="<i8")
    begins_at_0 = not is_first or starts[0] == 0
    ends_with_tokens = not is_last or starts[-1] == shard.tokens
    if not (begins_at_0 and ends_with_tokens and (starts[1:] > starts[:-1]).all()):
        raise DataError(
            f"{path} does not cut {shard.tokens} tokens into {shard.documents} documents in "
            f"order; {AGAIN}"
        )
