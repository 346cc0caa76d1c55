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
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer3d.data.staging import NodeCache, NodeCopies
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError, RankDataError
from composer3d.facts.remote import Place, RemotePart, RemotePath, read_parts
from composer3d.facts.token_manifest import (
    AGAIN,
    FORMAT,
    LOOK,
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
_MOST_REMOTE_CHUNKS = 2  # likewise, of a folder in an object store
_MOST_CHUNKS = 16  # that a rank verifies when it opens a folder
_MOST_THREADS = 4  # of a rank that verifies; each holds a chunk in memory
MOST_MAPS = 128  # shards of a folder that are mapped at once; each map holds an open file
# Bytes between two ranges of a file in a store that cost less to read than another request.
_MOST_GAP_BYTES = 64 << 10
_READERS = 16  # threads that read whole small files from a store


class _Map(NamedTuple):
    """A file of a shard, mapped into memory.

    Attributes:
        values: its tokens, or its mask.
        is_copy: whether this is the copy on a disk of the node.
    """

    values: np.ndarray
    is_copy: bool


class _Absent(NamedTuple):
    """Tokens of one shard that must be read from an object store.

    Attributes:
        name: the file.
        at: where they are in the result: int64, 1-D.
        places: where they are in the file: int64, 1-D.
        spans: the tokens of the file that are read: int64, (spans, 2), each from a first token to
            the one after the last. They ascend and do not overlap.
    """

    name: str
    at: np.ndarray
    places: np.ndarray
    spans: np.ndarray


class ShardedTokens:
    """The tokens of several shards, or their masks, as one read-only array without joining them.

    A shard is mapped into memory when one of its tokens is first read. At most ``most_maps`` shards
    are mapped at once; the one that was read longest ago makes room. Of a folder in an object
    store, only copies on the node are mapped. What has no copy is read from the store, in ranges of
    bytes, all that a call asks for at once. Several threads may read.

    What is read in ranges has no digest. So tokens of a store, and of copies, are compared with the
    size of the vocabulary each time.

    Args:
        manifest: the folder.
        most_maps: at least 1.
        masks: whether the masks are read instead of the tokens.
        copies: copies of files on this node; None: there are none.
    """

    def __init__(
        self,
        manifest: TokenManifest,
        most_maps: int,
        *,
        masks: bool = False,
        copies: NodeCopies | None = None,
    ) -> None:
        self._manifest = manifest
        self._most_maps = most_maps
        self._masks = masks
        self._copies = copies
        self._stops = np.cumsum([shard.tokens for shard in manifest.shards])
        self._maps: OrderedDict[int, _Map] = OrderedDict()  # the last one is the newest
        self._lock = threading.Lock()
        self.dtype = np.dtype(np.uint8) if masks else _dtype(manifest)

    def __len__(self) -> int:
        return self._manifest.tokens

    def __getitem__(self, index: np.ndarray | int) -> np.ndarray:
        """Return copies of the tokens at ``index``: integers from 0 to len - 1, in any shape.

        Raises:
            RankDataError: the file of a shard is missing, has another size than before, or is
                damaged; or the store cannot be read.
        """
        (values,) = read_together([(self, np.asarray(index))])
        return values.reshape(np.shape(index))

    def _begin(self, flat: np.ndarray) -> tuple[np.ndarray, list[_Absent]]:
        """Read what is on a disk: all but the places of the second result."""
        if self._copies is not None:
            self._copies.check()
        result = np.empty(flat.shape, self.dtype)
        absent = []
        owners = np.searchsorted(self._stops, flat, side="right")
        for number in np.unique(owners).tolist():
            at = np.flatnonzero(owners == number)
            shard = self._manifest.shards[number]
            places = flat[at] - (self._stops[number] - shard.tokens)
            values = self._map(number)
            if values is None:
                spans = _spans(places, _MOST_GAP_BYTES // self.dtype.itemsize)
                absent.append(_Absent(self._name(number), at, places, spans))
            else:
                result[at] = values[places]
        return result, absent

    def _parts(self, absent: _Absent) -> Iterator[RemotePart]:
        """Yield the ranges of bytes with the spans."""
        folder, size = self._manifest.folder, self.dtype.itemsize
        assert isinstance(folder, RemotePath)  # files on a disk are mapped
        for first, stop in absent.spans.tolist():
            yield RemotePart(folder / absent.name, first * size, (stop - first) * size)

    def _fill(self, result: np.ndarray, absent: _Absent, contents: Iterator[bytes]) -> None:
        """Write the tokens that were read from the store to their places in the result."""
        read = np.concatenate(
            [np.frombuffer(next(contents), dtype=self.dtype) for _ in absent.spans]
        )
        firsts, stops = absent.spans.T
        before = np.cumsum(stops - firsts) - (stops - firsts)  # tokens of the spans before
        owners = np.searchsorted(firsts, absent.places, side="right") - 1
        result[absent.at] = read[before[owners] + absent.places - firsts[owners]]

    def _check(self, values: np.ndarray, flat: np.ndarray) -> None:
        """Raise RankDataError if a value is none that ``prepare`` writes."""
        is_verified = not self._manifest.is_remote and self._copies is None
        limit = 2 if self._masks else self._manifest.vocab
        if is_verified or not values.size or int(values.max()) < limit:
            return
        place = int(flat[values.argmax()])
        number = int(np.searchsorted(self._stops, place, side="right"))
        allowed = "0 or 1 in a mask" if self._masks else f"a vocabulary of {limit}"
        raise RankDataError(
            f"{self._manifest.folder / self._name(number)} is damaged: it holds {values.max()} for "
            f"token {place} of the folder, but {MANIFEST} says {allowed}; {AGAIN}"
        )

    def _name(self, number: int) -> str:
        shard = self._manifest.shards[number]
        return str(shard.mask_file) if self._masks else shard.tokens_file

    def _map(self, number: int) -> np.ndarray | None:
        """Return the tokens or the mask of a shard, mapped into memory; None: it is in a store."""
        name = self._name(number)
        with self._lock:
            found = self._maps.get(number)
            has_copy = self._copies is not None and name in self._copies
            if found is None or (has_copy and not found.is_copy):
                found = self._open(number, name, found)
            if found is None:
                return None
            self._maps[number] = found
            self._maps.move_to_end(number)
            while len(self._maps) > self._most_maps:
                self._maps.popitem(last=False)
            return found.values

    def _open(self, number: int, name: str, earlier: _Map | None) -> _Map | None:
        """Map the copy of a shard, or else the shard itself, if it was not mapped before."""
        copy = None if self._copies is None else self._copies.open(name)
        if copy is not None:
            with copy:
                return _Map(np.memmap(copy, dtype=self.dtype, mode="r"), is_copy=True)
        if earlier is not None or self._manifest.is_remote:
            return earlier
        shard = self._manifest.shards[number]
        map_part = _map_mask if self._masks else _map_shard
        return _Map(map_part(self._manifest, shard), is_copy=False)


def read_together(
    requests: Sequence[tuple[np.ndarray | ShardedTokens, np.ndarray]],
) -> list[np.ndarray]:
    """Read places of several arrays. What is in object stores is requested at once.

    Args:
        requests: each an array, and integers of any shape: the places in it.

    Returns:
        The tokens of each request, 1-D, in the order of its places.

    Raises:
        RankDataError: as ``ShardedTokens`` does.
    """
    results: list[np.ndarray] = []
    begun: list[tuple[ShardedTokens, np.ndarray, list[_Absent]]] = []
    try:
        for array, index in requests:
            flat = index.reshape(-1)
            if isinstance(array, ShardedTokens):
                result, absent = array._begin(flat)
                begun.append((array, result, absent))
                results.append(result)
            else:
                results.append(array[flat])
        parts = [
            part for array, _, absent in begun for each in absent for part in array._parts(each)
        ]
        contents = iter(read_parts(parts) if parts else ())
    except DataError as error:
        # Ranks read other shards, and at other times.
        raise RankDataError(error.lines) from error
    except OSError as error:
        raise RankDataError(f"{error.filename} cannot be read: {error.strerror}; {LOOK}") from error
    for array, result, absent in begun:
        for each in absent:
            array._fill(result, each, contents)
    for (array, index), result in zip(requests, results, strict=True):
        if isinstance(array, ShardedTokens):
            array._check(result, index.reshape(-1))
    return results


def _spans(places: np.ndarray, most_gap: int) -> np.ndarray:
    """Return the spans that hold some places of a file, as ``_Absent`` has them.

    Places with at most ``most_gap`` others between them are in one span.
    """
    # First the runs of places in their order, which are few: sorting all places takes longer.
    ends = np.flatnonzero(np.diff(places) != 1)
    firsts = places[np.concatenate([[0], ends + 1])]
    stops = places[np.concatenate([ends, [len(places) - 1]])] + 1
    order = np.argsort(firsts, kind="stable")
    firsts, stops = firsts[order], np.maximum.accumulate(stops[order])
    begins = np.flatnonzero(firsts[1:] > stops[:-1] + most_gap) + 1
    return np.stack(
        [firsts[np.concatenate([[0], begins])], stops[np.concatenate([begins - 1, [-1]])]], axis=1
    )


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
            have ``content``, ``turn_ends`` and ``chat_template``, as ``token_manifest`` reads them.
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
        size, digests = path.stat().st_size, []
        with open(path, "rb") as file:
            while chunk := file.read(token_manifest.CHUNK_BYTES):
                digests.append(digest_of(chunk))
        files[path.name] = {"bytes": size, "digests": digests}
    return files


def open_tokens(
    folder: Place, *, name: str, most_maps: int = MOST_MAPS, cache: NodeCache | None = None
) -> Corpus:
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

    Of a folder in an object store, the sizes come from one list of it, and each rank verifies 2
    random chunks, of masks if it has masks. With
    ``cache``, the copies that are there already are compared with their digests, in the same parts.
    A copy that is damaged is removed.

    Args:
        folder: a folder that ``composer3d prepare`` made.
        name: the name of the corpus, for messages.
        most_maps: the number of files that may be mapped at once.
        cache: copies on this node, which are read in place of the files; None: there are none.

    Raises:
        DataError: a file is missing, or is not what ``prepare`` wrote. The message names the file.
    """
    manifest = token_manifest.read_manifest(folder)
    manifest.check_files()
    chunks = _chunks_of(manifest, manifest.files)
    if manifest.is_remote and any(shard.mask_file for shard in manifest.shards):
        # A token that is wrong may be seen, and a mask that is wrong changes what is learned.
        chunks = [chunk for chunk in chunks if chunk[0].startswith("mask")]
    hint = f"; composer3d inspect {folder} --full verifies all"
    most = _MOST_REMOTE_CHUNKS if manifest.is_remote else _MOST_CHUNKS
    _verify(chunks, partial(_verify_chunk, manifest), str(folder), hint=hint, most=most)
    copies = None
    if cache is not None:
        copies = cache.add(manifest)
        copied = [file_name for file_name in copies.names if file_name in copies]
        chunks = _chunks_of(manifest, copied)
        _verify(chunks, copies.is_sound, f"the copy of {folder}", most=_MOST_CHUNKS)

    shards = manifest.shards
    has_mask = manifest.learned is not None
    if has_mask:
        most_maps = max(1, most_maps // 2)
    tokens: np.ndarray | ShardedTokens
    mask: np.ndarray | ShardedTokens | None = None
    if len(shards) == 1 and copies is None and not manifest.is_remote:
        tokens = _map_shard(manifest, shards[0])
        mask = _map_mask(manifest, shards[0]) if has_mask else None
    else:
        tokens = ShardedTokens(manifest, most_maps, copies=copies)
        if has_mask:
            mask = ShardedTokens(manifest, most_maps, masks=True, copies=copies)
    digest = manifest.content or manifest.files_digest
    return Corpus(
        tokens, manifest.end_of_document, digest, manifest.documents, name, mask, manifest
    )


def _verify(
    chunks: Sequence[tuple[str, int]],
    verify: Callable[[str, int], object],
    place: str,
    *,
    hint: str = "",
    most: int,
) -> None:
    """Call ``verify`` with this rank's chunks, at most ``most``, in threads.

    ``place`` and ``hint`` are for the line that says that not all are verified.
    """
    ranks = environment.local_world_size(default=1)
    rank = environment.local_rank() % ranks
    own = chunks[rank::ranks]
    if len(own) > most:
        # Other ones at each start, and on each node. No global generator is used.
        own = random.SystemRandom().sample(own, most)
        log.get().info(
            f"{place} has {len(chunks):,} parts of up to {token_manifest.CHUNK_BYTES >> 20} MiB: "
            f"each node verifies {ranks * most} at random{hint}"
        )
    threads = max(1, min(_MOST_THREADS, usable_cores() // ranks))
    with ThreadPoolExecutor(threads) as pool:
        verified = [pool.submit(verify, *chunk) for chunk in own]
        try:
            for chunk in verified:
                chunk.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def document_bounds(corpus: Corpus) -> np.ndarray:
    """Return the first token of each document, and the token after the last document.

    For a folder of token files, the files of documents are read, and no tokens. Those in an object
    store are compared with their digests.

    Returns:
        int64, (documents + 1,), ascending from 0.

    Raises:
        DataError: a file of documents is missing, or is not what ``prepare`` wrote.
    """
    manifest = corpus.manifest
    if manifest is None:
        assert isinstance(corpus.tokens, np.ndarray)
        ends = np.flatnonzero(corpus.tokens == corpus.end_of_document)
        return np.concatenate([[0], ends + 1])

    parts, first_token = [np.zeros(1, dtype=np.int64)], 0
    with ThreadPoolExecutor(_READERS if manifest.is_remote else 1) as pool:
        contents = pool.map(partial(_read_documents, manifest), manifest.shards)
        for shard, content in zip(manifest.shards, contents, strict=True):
            parts.append(np.frombuffer(content, dtype="<i8")[1:] + first_token)
            first_token += shard.tokens
    return np.concatenate(parts)


def _read_documents(manifest: TokenManifest, shard: Shard) -> bytes:
    """Read and check the file of a shard's documents. Raises DataError as ``document_bounds``."""
    name = shard.documents_file
    content = manifest.read(name)
    if manifest.is_remote:
        for number in range(len(manifest.files[name].digests)):
            begin = number * token_manifest.CHUNK_BYTES
            chunk = memoryview(content)[begin : begin + token_manifest.CHUNK_BYTES]
            manifest.check_digest(name, number, digest_of(chunk))
    _check_starts(shard, manifest.folder / name, content, is_first=True, is_last=True)
    return content


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
            _verify_chunk(manifest, *chunk)
        except DataError as error:
            return error.lines[0]
        return None

    try:
        of_size = manifest.size_problems()
    except DataError as error:
        return list(error.lines)
    found = list(of_size.values())
    if full:
        names = [name for name in manifest.files if name not in of_size]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found += filter(None, threads.map(problem_of, _chunks_of(manifest, names)))
        # Tokens are compared with the file of documents: its problem is theirs too.
        found = list(dict.fromkeys(found))
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


def _chunks_of(manifest: TokenManifest, names: Iterable[str]) -> list[tuple[str, int]]:
    """Return the file and the number of each chunk of some files.

    Files of documents come first: tokens are compared with them.
    """
    return [
        (name, number)
        for name in sorted(names)
        for number in range(len(manifest.files[name].digests))
    ]


def _dtype(manifest: TokenManifest) -> np.dtype[Any]:
    return np.dtype(manifest.dtype).newbyteorder("<")


def _verify_chunk(manifest: TokenManifest, file_name: str, number: int) -> None:
    """Compare one chunk with its digest, and its tokens or document starts with the manifest.

    Raises DataError if they differ.
    """
    path = manifest.folder / file_name
    shard = manifest.shards_by_file.get(file_name)
    is_starts = shard is not None and file_name == shard.documents_file
    begin = number * token_manifest.CHUNK_BYTES
    place = f"between bytes {begin} and {begin + token_manifest.CHUNK_BYTES}"
    # Also read the last entry of the previous chunk, because the starts must ascend across it.
    before = _START_BYTES if is_starts and begin else 0
    size = min(token_manifest.CHUNK_BYTES, manifest.files[file_name].bytes - begin)
    content = manifest.read(file_name, begin - before, before + size)
    previous, content = content[:before], content[before:]

    manifest.check_digest(file_name, number, digest_of(content))
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
    manifest: TokenManifest, shard: Shard, path: Place, place: str, content: bytes, begin: int
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
    shard: Shard, path: Place, content: bytes, *, is_first: bool, is_last: bool
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
