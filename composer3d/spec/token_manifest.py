"""``tokens.json``: what a folder of token files says of itself, read with suspicion. No torch or numpy here.

``check`` and training read it through this one reader. The digest of the manifest guards against accidents, not against
somebody who writes a new one: every value is held against its type, its range and the sizes of the files.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from composer3d.spec.errors import DataError
from composer3d.spec.files import NotPlainFileError, open_plain, read_json

MANIFEST = "tokens.json"
TOKENIZER = "tokenizer.json"
FORMAT, VERSION = "composer3d tokens", 1
CHUNK_BYTES = (
    64 << 20
)  # a digest for each, so that the ranks of a node can share a check; part of the version
AGAIN = "make the folder again with composer3d prepare"

Dtype = Literal["uint16", "uint32"]
ITEM_BYTES = {"uint16": 2, "uint32": 4}
_START_BYTES = 8  # of an entry of documents.bin, an int64

_MANIFEST_BYTES = 8 << 20  # digests of 13 TB
_TOKENIZER_BYTES = 64 << 20
_MOST = 1 << 50  # tokens, documents or bytes
_DIGITS = 32  # of a digest
_BRIEF = 100  # characters of a value in a message


@dataclass(frozen=True)
class File:
    """``digests``: of each chunk of CHUNK_BYTES, in order."""

    bytes: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class TokenManifest:
    """What ``prepare`` wrote.

    ``end_of_document``: the token after each document, which stands nowhere else. ``tokenizer_digest``: None where the
    tokens are bytes. ``files``: by name, all but the manifest itself.
    """

    folder: Path
    dtype: Dtype
    vocab: int  # above every token
    tokens: int
    documents: int
    end_of_document: int
    tokenizer_name: str
    tokenizer_digest: str | None
    files: dict[str, File]

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder, held against its size.

        A .bin may be a link: large files often lie elsewhere. The tokenizer must lie in the folder itself, because
        exports carry it along.

        Raises DataError, naming the file, where it is missing, not plain or of another size.
        """
        path, wanted = self.folder / name, self.files[name].bytes
        try:
            file = open_plain(path, follow_links=name != TOKENIZER)
        except FileNotFoundError:
            raise DataError(
                f"{path} is missing, but {MANIFEST} says {wanted} bytes; {AGAIN}"
            ) from None
        except NotPlainFileError as error:
            raise DataError(f"{path} {error.strerror}; put the file itself there") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; {AGAIN}") from None
        found = os.fstat(file.fileno()).st_size
        if found != wanted:
            file.close()
            raise DataError(
                f"{path} has {found} bytes, but {MANIFEST} says {wanted} bytes; {AGAIN}"
            )
        return file

    def check_files(self) -> None:
        """Hold the size of every file against the manifest. Raises DataError as ``open``."""
        for name in self.files:
            self.open(name).close()


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def digest_of_manifest(manifest: dict[str, Any]) -> str:
    """Of all of it but its own ``digest``."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return digest_of(json.dumps(rest, sort_keys=True).encode())


def read_manifest(folder: str | os.PathLike[str]) -> TokenManifest:
    """Read the manifest of a folder of token files. Raises DataError, with one line, where it cannot be used."""
    path = Path(folder) / MANIFEST
    try:
        found = read_json(path, limit=_MANIFEST_BYTES)
        return _checked(Path(folder), found)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} has no {MANIFEST}; give a folder that composer3d prepare made"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be used ({error.strerror}); {AGAIN}") from None
    except ValueError as error:
        raise DataError(f"{path} cannot be used ({error}); {AGAIN}") from None


def _checked(folder: Path, found: Any) -> TokenManifest:
    """The manifest that a JSON value is. Raises ValueError, which says what is wrong with it."""
    facts = _object(found, "it", ("version",))
    if type(facts["version"]) is not int or facts["version"] != VERSION:
        raise ValueError(
            f"it has version {_brief(facts['version'])}, this composer3d reads {VERSION}"
        )
    names = (
        "format",
        "version",
        "dtype",
        "vocab",
        "tokens",
        "documents",
        "end_of_document",
        "tokenizer",
        "files",
    )
    _object(found, "it", (*names, "digest"), exact=True)
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {_brief(facts['format'])}, not {_brief(FORMAT)}")
    dtype = facts["dtype"]
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype is {_brief(dtype)}, not uint16 or uint32")
    vocab = _whole(facts, "vocab", 1, 1 << 8 * ITEM_BYTES[dtype])
    tokens = _whole(facts, "tokens", 1, _MOST)
    documents = _whole(facts, "documents", 1, tokens)
    end = _whole(facts, "end_of_document", 0, vocab - 1)
    tokenizer = _object(facts["tokenizer"], "tokenizer", ("name", "digest"), exact=True)
    if type(tokenizer["name"]) is not str:
        raise ValueError(f"tokenizer.name is {_brief(tokenizer['name'])}, not a text")
    if tokenizer["digest"] is not None:
        _digest(tokenizer["digest"], "tokenizer.digest")
    sizes = {
        "tokens.bin": tokens * ITEM_BYTES[dtype],
        "documents.bin": (documents + 1) * _START_BYTES,
    }
    files = _files(facts["files"], sizes, has_tokenizer=tokenizer["digest"] is not None)
    # Last: a manifest that is not of this form could nest too deep to be written again.
    if _digest(facts["digest"], "digest") != digest_of_manifest(facts):
        raise ValueError("it does not have its own digest")
    if tokenizer["digest"] is not None and files[TOKENIZER].digests != (tokenizer["digest"],):
        raise ValueError(f"tokenizer.digest is not that of {TOKENIZER}")
    return TokenManifest(
        folder, dtype, vocab, tokens, documents, end, tokenizer["name"], tokenizer["digest"], files
    )


def _files(found: Any, sizes: dict[str, int], *, has_tokenizer: bool) -> dict[str, File]:
    """Exactly the files that belong there, each with its size and a digest for every chunk of it."""
    names = (*sizes, TOKENIZER) if has_tokenizer else tuple(sizes)
    entries = _object(found, "files", names, exact=True)
    files = {}
    for name in names:
        place = f"files.{name}"
        entry = _object(entries[name], place, ("bytes", "digests"), exact=True)
        size = _whole(
            entry, "bytes", 1, _TOKENIZER_BYTES if name == TOKENIZER else _MOST * 8, place=place
        )
        if name in sizes and size != sizes[name]:
            raise ValueError(
                f"{place}.bytes is {size}, but its tokens and documents make {sizes[name]}"
            )
        digests, count = entry["digests"], -(-size // CHUNK_BYTES)
        if type(digests) is not list or len(digests) != count:
            raise ValueError(
                f"{place}.digests must be a list of {count}, one for each {CHUNK_BYTES} bytes"
            )
        files[name] = File(size, tuple(_digest(each, f"{place}.digests") for each in digests))
    return files


def _object(
    found: Any, place: str, keys: tuple[str, ...], *, exact: bool = False
) -> dict[str, Any]:
    if type(found) is not dict:
        raise ValueError(f"{place} must be an object, not {_brief(found)}")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{place} lacks {missing[0]}")
    if exact and (unknown := [key for key in found if key not in keys]):
        raise ValueError(f"{place} has {_brief(unknown[0])}, which does not belong there")
    return found


def _whole(facts: dict[str, Any], key: str, least: int, most: int, *, place: str = "") -> int:
    value = facts[key]
    if type(value) is not int or not least <= value <= most:
        name = f"{place}.{key}" if place else key
        raise ValueError(f"{name} is {_brief(value)}, not a whole number from {least} to {most}")
    return value


def _digest(value: Any, place: str) -> str:
    if type(value) is not str or len(value) != _DIGITS or not set(value) <= set("0123456789abcdef"):
        raise ValueError(
            f"{place} holds {_brief(value)}, not a digest of {_DIGITS} hexadecimal digits"
        )
    return value


def _brief(value: Any) -> str:
    """A value on one line, of a long one its beginning; what is nested is not written out."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:_BRIEF] if isinstance(value, str) else value)
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}..."
