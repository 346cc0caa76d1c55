"""Token files: a folder that ``composer3d prepare`` writes once and training maps into memory.

The folder holds

- ``tokens.bin``: the tokens of all documents, each document followed by an end-of-document token;
  little-endian uint16 or uint32;
- ``documents.bin``: the index of each document's first token, and at the end the number of tokens;
  little-endian int64;
- ``tokenizer.json``: a copy of the tokenizer; absent if the tokens are bytes;
- ``tokens.json``: the manifest, with the size and the digests of each file and a digest of itself;
  written last.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from composer3d.runtime import log
from composer3d.runtime.files import sync, write_atomic
from composer3d.spec import token_manifest
from composer3d.spec.errors import DataError
from composer3d.spec.token_manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    VERSION,
    TokenManifest,
    digest_of,
    digest_of_manifest,
)

_BLOCK_TOKENS = 1 << 18  # tokens that are compared at a time, so that they fit into a cache
_START_BYTES = 8  # in an entry of documents.bin
_MOST_CHUNKS = 16  # that a rank verifies when it opens a folder


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split.

    Attributes:
        tokens: 1-D and read-only: uint8 in memory, or little-endian uint16 or uint32 in a
            memory-mapped file. Each document is followed by one end-of-document token, which
            appears nowhere else.
        end_of_document: the end-of-document token.
        digest: the digest of the tokens, in hexadecimal. Equal digests mean equal tokens.
        n_documents: the number of documents.
        name: the name of the corpus, for messages.
    """

    tokens: np.ndarray
    end_of_document: int
    digest: str
    n_documents: int
    name: str


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Add ``tokens.json`` to a folder that is complete otherwise, and sync all files to disk.

    Args:
        folder: the folder of token files.
        facts: ``dtype`` ("uint16" or "uint32"); ``vocab``, the size of the vocabulary; the numbers
            of ``tokens`` and ``documents``; ``end_of_document``, a token; and ``tokenizer``, a dict
            with its ``name`` and its ``digest`` (None for bytes).

    Raises:
        OSError: a file cannot be read or written.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        size = path.stat().st_size
        n_chunks = -(-size // token_manifest.CHUNK_BYTES)
        with open(path, "rb") as file:
            digests = [digest_of(_read_chunk(file, number)) for number in range(n_chunks)]
        files[path.name] = {"bytes": size, "digests": digests}
    manifest = {"format": FORMAT, "version": VERSION, **facts, "files": files}
    manifest["digest"] = digest_of_manifest(manifest)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(folder)


def open_tokens(folder: Path, *, name: str) -> Corpus:
    """Verify a folder of token files and map its tokens into memory.

    Every rank verifies the sizes of all files. The content is verified in chunks: each chunk must
    have its digest, every token must be in the vocabulary, and documents must be in order.

    The LOCAL_WORLD_SIZE ranks of a node share the chunks: each verifies its part, or 16 random
    chunks of it (1 GiB) if it has more. ``find_damage`` verifies all chunks. So all ranks must call
    this function, and all must stop if one of them fails (see ``process_group.on_all``). This
    function runs no collective. A process without LOCAL_WORLD_SIZE has all chunks as its part.

    Args:
        folder: a folder that ``composer3d prepare`` made.
        name: the name of the corpus, for messages.

    Raises:
        DataError: a file is missing, or is not what ``prepare`` wrote. The message names the file.
    """
    manifest = token_manifest.read_manifest(folder)
    manifest.check_files()

    chunks = _chunks_of(manifest)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ.get("LOCAL_RANK", "0")) % ranks
    own = chunks[rank::ranks]
    if len(own) > _MOST_CHUNKS:
        # Other ones at each start, and on each node. No global generator is used.
        own = random.SystemRandom().sample(own, _MOST_CHUNKS)
        log.get().info(
            f"{folder} has {len(chunks):,} parts of {token_manifest.CHUNK_BYTES >> 20} MiB: "
            f"each node verifies {ranks * _MOST_CHUNKS} at random; "
            f"composer3d inspect {folder} verifies all"
        )
    for file_name, number in own:
        _verify_chunk(manifest, file_name, number)

    with manifest.open("tokens.bin") as file:
        tokens = np.memmap(file, dtype=_dtype(manifest), mode="r")
    digest = digest_of("".join(manifest.files["tokens.bin"].digests).encode())
    return Corpus(tokens, manifest.end_of_document, digest, manifest.documents, name)


def find_damage(manifest: TokenManifest) -> list[str]:
    """Verify the sizes and all chunks of a folder, in as many threads as there are cores.

    Returns one line for each problem. The list is empty if the files are what ``prepare`` wrote.
    """

    def problem_of(chunk: tuple[str, int]) -> str | None:
        try:
            _verify_chunk(manifest, *chunk)
        except DataError as error:
            return error.lines[0]
        return None

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        problems = threads.map(problem_of, _chunks_of(manifest))
        # A file that is missing or cut has the same line for each of its chunks.
        return list(dict.fromkeys(filter(None, problems)))


def _chunks_of(manifest: TokenManifest) -> list[tuple[str, int]]:
    """Return the file and the number of each chunk."""
    return [
        (file_name, number)
        for file_name, entry in manifest.files.items()
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
    begin = number * token_manifest.CHUNK_BYTES
    place = f"between bytes {begin} and {begin + token_manifest.CHUNK_BYTES}"
    with manifest.open(file_name) as file:
        content = _read_chunk(file, number)
        # Also read the last entry of the previous chunk, because the starts must ascend across it.
        previous = b""
        if file_name == "documents.bin" and begin:
            file.seek(begin - _START_BYTES)
            previous = file.read(_START_BYTES)

    if digest_of(content) != manifest.files[file_name].digests[number]:
        raise DataError(
            f"{path} is damaged {place}: its digest there is not the one in {MANIFEST}; {AGAIN}"
        )
    if file_name == "tokens.bin":
        _check_tokens(manifest, path, place, content)
    elif file_name == "documents.bin":
        is_last = begin + len(content) == manifest.files[file_name].bytes
        _check_starts(manifest, path, previous + content, is_first=begin == 0, is_last=is_last)


def _check_tokens(manifest: TokenManifest, path: Path, place: str, content: bytes) -> None:
    """Raise DataError if a token is not in the vocabulary."""
    tokens = np.frombuffer(content, dtype=_dtype(manifest))
    largest = max(
        int(tokens[first : first + _BLOCK_TOKENS].max())
        for first in range(0, len(tokens), _BLOCK_TOKENS)
    )
    if largest >= manifest.vocab:
        raise DataError(
            f"{path} holds token {largest} {place}, but {MANIFEST} says a vocabulary of "
            f"{manifest.vocab}; {AGAIN}"
        )


def _check_starts(
    manifest: TokenManifest, path: Path, content: bytes, *, is_first: bool, is_last: bool
) -> None:
    """Raise DataError if the starts do not begin at 0, ascend, and end at the number of tokens.

    ``is_first`` and ``is_last`` tell whether ``content`` is from the first or the last chunk.
    """
    starts = np.frombuffer(content, dtype="<i8")
    begins_at_0 = not is_first or starts[0] == 0
    ends_with_tokens = not is_last or starts[-1] == manifest.tokens
    if not (begins_at_0 and ends_with_tokens and (starts[1:] > starts[:-1]).all()):
        raise DataError(
            f"{path} does not cut {manifest.tokens} tokens into {manifest.documents} documents in "
            f"order; {AGAIN}"
        )
