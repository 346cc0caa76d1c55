"""Token files: a folder that ``prepare`` writes once and that training maps into memory.

``tokens.bin``: the tokens of all documents, each followed by an end-of-document token, little-endian uint16 or uint32.
``documents.bin``: little-endian int64, where each document starts in tokens, and after them the number of tokens.
``tokenizer.json``: a copy of the tokenizer; absent where the tokens are bytes.
``tokens.json``: what they hold, with the size and the digests of each file and a digest of itself; written last.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

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

_BLOCK = 1 << 18  # tokens that are looked at together: what fits into a cache


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split; each document is followed by one end-of-document token, which stands nowhere else."""

    tokens: (
        np.ndarray
    )  # 1-D, read-only: uint8 in memory, or little-endian uint16 or uint32 in a memory-mapped file
    end_of_document: int
    digest: str  # hexadecimal, of the tokens; two corpora with one digest hold the same tokens
    n_documents: int
    name: str  # says in messages which corpus this is


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Adds ``tokens.json`` to a folder that is complete, and syncs all of it to disk.

    ``facts``: dtype ("uint16" or "uint32"), vocab, tokens, documents, end_of_document (a token), tokenizer.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        size = path.stat().st_size
        with open(path, "rb") as file:
            chunks = range(-(-size // token_manifest.CHUNK_BYTES))
            digests = [digest_of(_chunk(file, number)) for number in chunks]
        files[path.name] = {"bytes": size, "digests": digests}
    manifest = {"format": FORMAT, "version": VERSION, **facts, "files": files}
    manifest["digest"] = digest_of_manifest(manifest)
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sync(folder)


def open_tokens(folder: Path, *, name: str) -> Corpus:
    """Maps a folder of token files, and verifies it first: every size here, the content in turns with the node's ranks.

    The content: the digest of each chunk, that every token is below the vocabulary, and that documents are in order.

    With LOCAL_WORLD_SIZE ranks on a node, this one reads only its share of the bytes: all of them must call it, and
    heed the error of any (``dist.on_all``). A lone process reads all of them.

    Raises DataError, naming the file, where one is missing or not what ``prepare`` wrote.
    """
    manifest = token_manifest.read_manifest(folder)
    manifest.check_files()
    chunks = [
        (file, number)
        for file, entry in manifest.files.items()
        for number in range(len(entry.digests))
    ]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for file, number in chunks[int(os.environ.get("LOCAL_RANK", "0")) % ranks :: ranks]:
        _verify_chunk(manifest, file, number)
    with manifest.open("tokens.bin") as stream:
        tokens = np.memmap(stream, dtype=np.dtype(manifest.dtype).newbyteorder("<"), mode="r")
    digest = digest_of("".join(manifest.files["tokens.bin"].digests).encode())
    return Corpus(tokens, manifest.end_of_document, digest, manifest.documents, name)


def _chunk(file: BinaryIO, number: int) -> bytes:
    file.seek(number * token_manifest.CHUNK_BYTES)
    return file.read(token_manifest.CHUNK_BYTES)


def _verify_chunk(manifest: TokenManifest, name: str, number: int) -> None:
    """Hold the bytes of one chunk against their digest, and what they say against the manifest. Raises DataError."""
    path, begin = manifest.folder / name, number * token_manifest.CHUNK_BYTES
    before = b""
    with manifest.open(name) as file:
        if name == "documents.bin" and begin:
            file.seek(begin - 8)
            before = file.read(8)  # the last entry of the chunk before, which this one goes on from
        content = _chunk(file, number)
    place = f"between bytes {begin} and {begin + token_manifest.CHUNK_BYTES}"
    if digest_of(content) != manifest.files[name].digests[number]:
        raise DataError(
            f"{path} is damaged {place}: their digest is not that of {MANIFEST}; {AGAIN}"
        )
    if name == "tokens.bin":
        tokens = np.frombuffer(content, dtype=np.dtype(manifest.dtype).newbyteorder("<"))
        largest = max(
            int(tokens[first : first + _BLOCK].max()) for first in range(0, len(tokens), _BLOCK)
        )
        if largest >= manifest.vocab:
            raise DataError(
                f"{path} holds token {largest} {place}, but {MANIFEST} says a vocabulary of {manifest.vocab}; {AGAIN}"
            )
    elif name == "documents.bin":
        starts = np.frombuffer(before + content, dtype="<i8")
        last = begin + len(content) == manifest.files[name].bytes
        whole = (begin > 0 or starts[0] == 0) and (not last or starts[-1] == manifest.tokens)
        if not whole or not (starts[1:] > starts[:-1]).all():
            raise DataError(
                f"{path} does not cut {manifest.tokens} tokens into {manifest.documents} documents in order; {AGAIN}"
            )
