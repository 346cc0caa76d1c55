"""Token files: a folder that ``prepare`` writes once and that training maps into memory.

``tokens.bin``: the tokens of all documents, each followed by an end-of-document token, little-endian uint16 or uint32.
``documents.bin``: little-endian int64, where each document starts in tokens, and after them the number of tokens.
``tokenizer.json``: a copy of the tokenizer; absent where the tokens are bytes.
``tokens.json``: what they hold, with the size and the digests of each file and a digest of itself; written last.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.errors import DataError

MANIFEST = "tokens.json"
_VERSION = 1
_CHUNK_BYTES = 64 << 20  # a digest for each, so that the ranks of a node can share a check; part of the version
_AGAIN = "make the folder again with composer3d prepare"


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split; each document is followed by one end-of-document token, which stands nowhere else."""

    tokens: np.ndarray  # 1-D, read-only: uint8 in memory, or little-endian uint16 or uint32 in a memory-mapped file
    end_of_document: int
    digest: str  # hexadecimal, of the tokens; two corpora with one digest hold the same tokens
    n_documents: int
    name: str  # says in messages which corpus this is


def digest_of(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Adds ``tokens.json`` to a folder that is complete, and syncs all of it to disk.

    ``facts``: dtype ("uint16" or "uint32"), vocab, tokens, documents, end_of_document (a token), tokenizer.
    """
    files: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.iterdir()):
        sync(file)
        size = file.stat().st_size
        digests = [_digest_of_chunk(file, number) for number in range(-(-size // _CHUNK_BYTES))]
        files[file.name] = {"bytes": size, "digests": digests}
    manifest = {"format": "composer3d tokens", "version": _VERSION, **facts, "files": files}
    manifest["digest"] = _digest_of_manifest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    sync(folder / MANIFEST)
    sync(folder)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _digest_of_manifest(manifest: dict[str, Any]) -> str:
    return digest_of(json.dumps(manifest, sort_keys=True).encode())


def _digest_of_chunk(file: Path, number: int) -> str:
    with open(file, "rb") as stream:
        stream.seek(number * _CHUNK_BYTES)
        return digest_of(stream.read(_CHUNK_BYTES))


def open_tokens(folder: Path, *, name: str) -> Corpus:
    """Maps a folder of token files, and verifies it first: every size here, the digests in turns with the node's ranks.

    With LOCAL_WORLD_SIZE ranks on a node, this one reads only its share of the bytes: all of them must call it, and
    heed the error of any (``dist.on_all``). A lone process reads all of them.

    Raises DataError, naming the file, where one is missing or not what ``prepare`` wrote.
    """
    manifest = _read_manifest(folder)
    files: dict[str, dict[str, Any]] = manifest["files"]
    chunks: list[tuple[Path, int, str]] = []
    for file, entry in files.items():
        path = folder / file
        found, wanted = f"has {path.stat().st_size} bytes" if path.is_file() else "is missing", entry["bytes"]
        if found != f"has {wanted} bytes":
            raise DataError(f"{path} {found}, but {MANIFEST} says {wanted} bytes; {_AGAIN}")
        chunks += [(path, number, digest) for number, digest in enumerate(entry["digests"])]
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for path, number, digest in chunks[int(os.environ.get("LOCAL_RANK", "0")) % ranks :: ranks]:
        if _digest_of_chunk(path, number) != digest:
            place = f"between bytes {number * _CHUNK_BYTES} and {(number + 1) * _CHUNK_BYTES}"
            raise DataError(f"{path} is damaged {place}: their digest is not that of {MANIFEST}; {_AGAIN}")
    tokens = np.memmap(folder / "tokens.bin", dtype=np.dtype(manifest["dtype"]).newbyteorder("<"), mode="r")
    digest = digest_of("".join(files["tokens.bin"]["digests"]).encode())
    return Corpus(tokens, manifest["end_of_document"], digest, manifest["documents"], name)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        if manifest["version"] != _VERSION:
            raise ValueError(f"it has version {manifest['version']}, this composer3d reads {_VERSION}")
        if manifest.pop("digest") != _digest_of_manifest(manifest):
            raise ValueError("it does not have its own digest")
        return manifest
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder} has no {MANIFEST}; give a folder that composer3d prepare made") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be used ({type(error).__name__}: {error}); {_AGAIN}") from None
