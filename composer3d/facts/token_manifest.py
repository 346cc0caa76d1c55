"""Reads ``tokens.json``, the manifest of a folder of token files. No torch or numpy here.

``check`` and training both use this reader. The digest in the manifest protects against
accidents, not against an attacker who computes a new one. So every value is checked: its type,
its range, and whether it agrees with the sizes of the files.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from composer3d.facts.errors import DataError
from composer3d.facts.files import (
    FileTooLargeError,
    NotPlainFileError,
    open_plain,
    parse_json,
    read_plain,
)
from composer3d.facts.remote import Place, RemotePath, place_of, whole_file
from composer3d.facts.text import short_json

MANIFEST = "tokens.json"
TOKENIZER = "tokenizer.json"
FORMAT = "composer3d tokens"

# Version 1 is a folder of one shard, with the files tokens.bin and documents.bin. Version 2 has an
# index of shards, whose files are numbered. Version 3 is version 2 with a mask for each shard.
# Folders of an older composer3d lack ``content``, and only those of conversations have
# ``turn_ends`` and ``chat_template``.
VERSION, SHARDS_VERSION, MASK_VERSION = 1, 2, 3
_OPTIONAL = ("content", "turn_ends", "chat_template")
MOST_SHARDS = 100_000

# Each chunk of a file has a digest, so that the ranks of a node can share the check of a file. The
# size of a chunk cannot change without a new version.
CHUNK_BYTES = 64 << 20

AGAIN = "make the folder again with composer3d prepare"

# What to do about an object store that does not answer, or has lost a file since.
LOOK = "look at the connection, the rights and the folder"
_PART_BYTES = 16 << 20  # of a long range of bytes, which are read on their own

Dtype = Literal["uint16", "uint32"]
_ITEM_BYTES = {"uint16": 2, "uint32": 4}
_START_BYTES = 8  # an entry of documents.bin is an int64

_MOST_MANIFEST_BYTES = 64 << 20  # enough for the digests of 100 TB, or for 100,000 shards
MOST_TOKENIZER_BYTES = 64 << 20
_MOST = 1 << 50  # tokens, documents or bytes
_DIGEST_DIGITS = 32


class File(NamedTuple):
    """One file of the folder.

    Attributes:
        bytes: its size.
        digests: the digest of each chunk of CHUNK_BYTES, in order.
    """

    bytes: int
    digests: tuple[str, ...]


class Shard(NamedTuple):
    """One part of the tokens of a folder. It holds whole documents.

    Attributes:
        tokens: the number of its tokens.
        documents: the number of its documents.
        tokens_file: the name of the file of its tokens.
        documents_file: the name of the file of its documents' starts, counted within the shard.
        mask_file: the name of the file that says which tokens are learned; None: all are.
    """

    tokens: int
    documents: int
    tokens_file: str
    documents_file: str
    mask_file: str | None = None


@dataclass(frozen=True)
class TokenManifest:
    """The facts about a folder that ``prepare`` wrote.

    Attributes:
        folder: the folder, on a disk or in an object store.
        digest: the digest of the manifest, in hexadecimal.
        dtype: the dtype of the tokens.
        vocab: the size of the vocabulary; every token is below it.
        tokens: the number of tokens.
        documents: the number of documents.
        learned: the number of tokens that are learned; None: the folder has no mask, and all are.
        end_of_document: the token after each document, which occurs nowhere else.
        content: the digest of the documents and of their masks, whatever shards they are in. None:
            an older composer3d made the folder, or its files were changed since.
        turn_ends: the tokens that end learned turns of conversations, ascending.
        template_digest: the digest of the chat template that rendered conversations; None: there
            are none, or an older composer3d made the folder.
        tokenizer_name: the name of the tokenizer's file, for people.
        tokenizer_digest: the digest of that file, or None if the tokens are bytes.
        shards: the shards, in the order of their tokens.
        files: the files by name, without the manifest itself.
    """

    folder: Place
    digest: str
    dtype: Dtype
    vocab: int
    tokens: int
    documents: int
    learned: int | None
    end_of_document: int
    content: str | None
    turn_ends: tuple[int, ...]
    template_digest: str | None
    tokenizer_name: str
    tokenizer_digest: str | None
    shards: tuple[Shard, ...]
    files: dict[str, File]

    @property
    def files_digest(self) -> str:
        """The digest of the files of tokens and masks. It depends on the size of shards."""
        names = [shard.tokens_file for shard in self.shards]
        names += [shard.mask_file for shard in self.shards if shard.mask_file is not None]
        return digest_of_files(self.files[name].digests for name in names)

    @cached_property
    def shards_by_file(self) -> dict[str, Shard]:
        """The shard of each file, by the name of the file. The tokenizer belongs to no shard."""
        return {
            name: shard
            for shard in self.shards
            for name in (shard.tokens_file, shard.documents_file, shard.mask_file)
            if name is not None
        }

    @property
    def is_remote(self) -> bool:
        """Whether the folder is in an object store."""
        return isinstance(self.folder, RemotePath)

    def open(self, name: str) -> BinaryIO:
        """Open a file of the folder, and check its size.

        A .bin file may be a link, because large files are often stored elsewhere. The tokenizer
        must be in the folder itself, because exports copy it. Of a file in an object store, this
        is a copy on the disk, which goes when it is neither open nor mapped any more.

        Raises:
            DataError: the file is missing, is not plain, cannot be read or has another size. The
                message names it.
        """
        path = self.folder / name
        expected = self.files[name].bytes
        try:
            if isinstance(path, RemotePath):
                if (size := path.size()) != expected:
                    raise DataError(self._of_another_size(name, size))
                file = whole_file(path, expected)
            else:
                file = open_plain(path, follow_links=name != TOKENIZER)
        except FileNotFoundError:
            raise DataError(self._missing(name)) from None
        except NotPlainFileError as error:
            raise DataError(f"{path} {error.strerror}; put the file itself there") from None
        except OSError as error:
            raise DataError(self._unreadable(name, error)) from None
        size = os.fstat(file.fileno()).st_size
        if size != expected:
            file.close()
            raise DataError(self._of_another_size(name, size))
        return file

    def read(self, name: str, begin: int = 0, size: int | None = None) -> bytes:
        """Return a range of the bytes of a file of the folder, or all of them.

        Args:
            name: the file.
            begin: the first byte.
            size: the number of bytes; None: up to the end of the file.

        Raises:
            DataError: as ``open``, or the file ends within the range. Of a file in an object
                store, the size is not asked for.
        """
        path = self.folder / name
        if size is None:
            size = self.files[name].bytes - begin
        if not isinstance(path, RemotePath):
            with self.open(name) as file:
                file.seek(begin)
                return file.read(size)
        try:
            return b"".join(path.read_ranges(cut_range(begin, size)))
        except FileNotFoundError:
            raise DataError(self._missing(name)) from None
        except OSError as error:
            raise DataError(self._unreadable(name, error)) from None

    def size_problems(self) -> dict[str, str]:
        """Compare the size of every file with the manifest. An object store is asked once.

        Returns:
            What is wrong, by the name of the file. It is empty if all sizes are right.

        Raises:
            DataError: an object store does not list the folder.
        """
        problems = {}
        if not isinstance(self.folder, RemotePath):
            for name in self.files:
                try:
                    self.open(name).close()
                except DataError as error:
                    problems[name] = error.lines[0]
            return problems
        try:
            sizes = self.folder.files()
        except OSError as error:
            raise DataError(f"{self.folder} cannot be listed: {error.strerror}; {LOOK}") from None
        for name, file in self.files.items():
            if name not in sizes:
                problems[name] = self._missing(name)
            elif sizes[name] != file.bytes:
                problems[name] = self._of_another_size(name, sizes[name])
        return problems

    def check_files(self) -> None:
        """Check the size of every file. Raises DataError as ``open``."""
        for problem in self.size_problems().values():
            raise DataError(problem)

    def check_digest(self, name: str, number: int, digest: str) -> None:
        """Raise DataError unless ``digest`` is that of chunk ``number`` of a file."""
        if digest != self.files[name].digests[number]:
            begin = number * CHUNK_BYTES
            raise DataError(
                f"{self.folder / name} is damaged between bytes {begin} and {begin + CHUNK_BYTES}: "
                f"its digest there is not the one in {MANIFEST}; {AGAIN}"
            )

    def _missing(self, name: str) -> str:
        expected = self.files[name].bytes
        return f"{self.folder / name} is missing, but {MANIFEST} says {expected} bytes; {AGAIN}"

    def _of_another_size(self, name: str, size: int) -> str:
        return (
            f"{self.folder / name} has {size} bytes, but {MANIFEST} says "
            f"{self.files[name].bytes} bytes; {AGAIN}"
        )

    def _unreadable(self, name: str, error: OSError) -> str:
        way_out = LOOK if self.is_remote else AGAIN
        return f"{self.folder / name} cannot be read: {error.strerror}; {way_out}"


def cut_range(begin: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut a range of bytes into parts that are read on their own.

    Yields the first byte and the number of bytes of each.
    """
    for first in range(begin, begin + size, _PART_BYTES):
        yield first, min(_PART_BYTES, begin + size - first)


def shard_files(number: int | None) -> tuple[str, str]:
    """Return the names of the files of a shard: its tokens, and the starts of its documents.

    ``number`` counts shards from 0. None: the only shard of a folder of version 1.
    """
    ending = ".bin" if number is None else f"-{number:05}.bin"
    return f"tokens{ending}", f"documents{ending}"


def mask_file(number: int) -> str:
    """Return the name of the file of a shard's mask: a byte for each token, 1 if it is learned."""
    return f"mask-{number:05}.bin"


def new_digest(data: bytes | bytearray | memoryview = b"") -> "hashlib.blake2b":
    """Begin the digest of a chunk: BLAKE2b of 16 bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_DIGITS // 2)


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of a chunk in 32 hexadecimal digits."""
    return new_digest(data).hexdigest()


class ContentDigest:
    """The digest of documents in their order, whatever shards they are in.

    The digest of each document is a number d. The documents have the sum of d x base^n, where n
    counts the documents behind it, modulo a prime. So the digest of two shards follows from those
    of each. It protects against accidents, as the other digests do.

    Attributes:
        value: the sum.
        documents: the number of documents.
    """

    _PRIME = (1 << 127) - 1
    _BASE = int.from_bytes(hashlib.blake2b(b"composer3d", digest_size=15).digest(), "big")

    def __init__(self, value: int = 0, documents: int = 0) -> None:
        self.value = value
        self.documents = documents

    def add(self, *parts: bytes | bytearray | memoryview) -> None:
        """Add the next document: its tokens, and its mask if it has one."""
        digest = new_digest()
        for part in parts:
            digest.update(part)
        number = int.from_bytes(digest.digest(), "big")
        self.value = (self.value * self._BASE + number) % self._PRIME
        self.documents += 1

    def join(self, other: "ContentDigest") -> None:
        """Add the documents of another shard, which come next."""
        shift = pow(self._BASE, other.documents, self._PRIME)
        self.value = (self.value * shift + other.value) % self._PRIME
        self.documents += other.documents

    def hexdigest(self) -> str:
        """Return the digest in 32 hexadecimal digits."""
        return digest_of(f"{self.documents} {self.value:x}".encode())


def digest_of_files(digests: Iterable[Sequence[str]]) -> str:
    """Return the digest of all files of tokens, then all of masks, in the order of the shards.

    ``digests`` has the digests of the chunks of each file.
    """
    return digest_of("".join(digest for file in digests for digest in file).encode())


def digest_of_manifest(manifest: dict[str, Any]) -> str:
    """Return the digest of a manifest without its key ``digest``."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return digest_of(json.dumps(content, sort_keys=True).encode())


def read_manifest(folder: str | os.PathLike[str] | RemotePath) -> TokenManifest:
    """Read and check the manifest of a folder of token files, on a disk or in an object store.

    Raises:
        DataError: the manifest is missing or cannot be used; the error has one line.
    """
    try:
        place = folder if isinstance(folder, RemotePath) else place_of(os.fspath(folder))
    except ValueError as error:
        raise DataError(f"{folder} {error}") from None
    path = place / MANIFEST
    try:
        if isinstance(path, RemotePath):
            content = path.read(_MOST_MANIFEST_BYTES)
        else:
            content = read_plain(path, limit=_MOST_MANIFEST_BYTES)
        return _parse(place, parse_json(content))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} has no {MANIFEST}; give a folder that composer3d prepare made"
        ) from None
    except OSError as error:
        is_answer = isinstance(path, Path) or isinstance(error, FileTooLargeError)
        way_out = AGAIN if is_answer else LOOK
        raise DataError(f"{path} cannot be used ({error.strerror}); {way_out}") from None
    except ValueError as error:
        raise DataError(f"{path} cannot be used ({error}); {AGAIN}") from None


def _parse(folder: Place, document: Any) -> TokenManifest:
    """Check a JSON value, and return the manifest. Raises ValueError, which says what is wrong."""
    # Check the version first, because other versions may have other keys.
    facts = _object(document, "it", ("version",))
    version = facts["version"]
    if type(version) is not int or version not in (VERSION, SHARDS_VERSION, MASK_VERSION):
        raise ValueError(
            f"it has version {short_json(version)}, but this composer3d reads {VERSION}, "
            f"{SHARDS_VERSION} and {MASK_VERSION}"
        )
    has_mask = version == MASK_VERSION
    keys = (
        "format",
        "version",
        "dtype",
        "vocab",
        "tokens",
        "documents",
        "end_of_document",
        "tokenizer",
        "files",
        "digest",
        *(("shards",) if version != VERSION else ()),
        *(("learned",) if has_mask else ()),
    )
    optional = tuple(key for key in _OPTIONAL if key in facts)
    _object(document, "it", (*keys, *optional), exact=True)
    if facts["format"] != FORMAT:
        raise ValueError(f"its format is {short_json(facts['format'])}, not {short_json(FORMAT)}")

    dtype = facts["dtype"]
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype is {short_json(dtype)}, not uint16 or uint32")
    vocab = _whole(facts, "vocab", 1, 1 << 8 * _ITEM_BYTES[dtype])
    tokens = _whole(facts, "tokens", 1, _MOST)
    documents = _whole(facts, "documents", 1, tokens)
    learned = _whole(facts, "learned", 1, tokens) if has_mask else None
    end_of_document = _whole(facts, "end_of_document", 0, vocab - 1)

    content = None
    if "content" in facts:
        content = _object(facts["content"], "content", ("digest", "files"), exact=True)
        for key in ("digest", "files"):
            _digest(content[key], f"content.{key}")
    turn_ends = facts.get("turn_ends", [])
    if type(turn_ends) is not list or not all(
        type(token) is int and 0 <= token < vocab for token in turn_ends
    ):
        raise ValueError("turn_ends must be a list of tokens below vocab")
    if turn_ends != sorted(set(turn_ends)):
        raise ValueError("turn_ends must ascend")
    if "chat_template" in facts:
        _digest(facts["chat_template"], "chat_template")

    tokenizer = _object(facts["tokenizer"], "tokenizer", ("name", "digest"), exact=True)
    if type(tokenizer["name"]) is not str:
        raise ValueError(f"tokenizer.name is {short_json(tokenizer['name'])}, not a text")
    if tokenizer["digest"] is not None:
        _digest(tokenizer["digest"], "tokenizer.digest")

    if version == VERSION:
        shards: tuple[Shard, ...] = (Shard(tokens, documents, *shard_files(None)),)
    else:
        shards = _shards(facts["shards"], tokens, documents, has_mask=has_mask)
    sizes = {}
    for shard in shards:
        sizes[shard.tokens_file] = shard.tokens * _ITEM_BYTES[dtype]
        sizes[shard.documents_file] = (shard.documents + 1) * _START_BYTES
        if shard.mask_file is not None:
            sizes[shard.mask_file] = shard.tokens
    files = _files(facts["files"], sizes, has_tokenizer=tokenizer["digest"] is not None)

    # Check the digest last: an unchecked manifest could nest too deep to be written as JSON.
    if _digest(facts["digest"], "digest") != digest_of_manifest(facts):
        raise ValueError("its digest does not match its content")
    if tokenizer["digest"] is not None and files[TOKENIZER].digests != (tokenizer["digest"],):
        raise ValueError(f"tokenizer.digest differs from the digest of {TOKENIZER}")
    manifest = TokenManifest(
        folder=folder,
        digest=facts["digest"],
        dtype=dtype,
        vocab=vocab,
        tokens=tokens,
        documents=documents,
        learned=learned,
        end_of_document=end_of_document,
        content=None if content is None else content["digest"],
        turn_ends=tuple(turn_ends),
        template_digest=facts.get("chat_template"),
        tokenizer_name=tokenizer["name"],
        tokenizer_digest=tokenizer["digest"],
        shards=shards,
        files=files,
    )
    if content is not None and content["files"] != manifest.files_digest:
        return replace(manifest, content=None)
    return manifest


def _shards(value: Any, tokens: int, documents: int, *, has_mask: bool) -> tuple[Shard, ...]:
    """Check the entry ``shards``: the tokens and documents of each shard, which must add up."""
    if type(value) is not list or not 1 <= len(value) <= MOST_SHARDS:
        raise ValueError(f"shards must be a list of 1 to {MOST_SHARDS} objects")
    shards = []
    for number, item in enumerate(value):
        place = f"shards[{number}]"
        entry = _object(item, place, ("tokens", "documents"), exact=True)
        shard_tokens = _whole(entry, "tokens", 1, tokens, place=place)
        shard_documents = _whole(entry, "documents", 1, shard_tokens, place=place)
        mask = mask_file(number) if has_mask else None
        shards.append(Shard(shard_tokens, shard_documents, *shard_files(number), mask))
    for name, total in (("tokens", tokens), ("documents", documents)):
        found = sum(getattr(shard, name) for shard in shards)
        if found != total:
            raise ValueError(f"{name} is {total}, but its shards have {found}")
    return tuple(shards)


def _files(value: Any, sizes: dict[str, int], *, has_tokenizer: bool) -> dict[str, File]:
    """Check the entry ``files``.

    The entry must have exactly the files in ``sizes``, with these sizes, and the tokenizer if
    ``has_tokenizer``. Each file has one digest for each chunk.
    """
    names = (*sizes, TOKENIZER) if has_tokenizer else tuple(sizes)
    entries = _object(value, "files", names, exact=True)
    files = {}
    for name in names:
        place = f"files.{name}"
        entry = _object(entries[name], place, ("bytes", "digests"), exact=True)
        most_bytes = MOST_TOKENIZER_BYTES if name == TOKENIZER else _MOST * 8
        size = _whole(entry, "bytes", 1, most_bytes, place=place)
        if name in sizes and size != sizes[name]:
            raise ValueError(
                f"{place}.bytes is {size}, but its tokens and documents make {sizes[name]}"
            )
        digests = entry["digests"]
        chunks = -(-size // CHUNK_BYTES)
        if type(digests) is not list or len(digests) != chunks:
            raise ValueError(
                f"{place}.digests must be a list of {chunks}, one for each {CHUNK_BYTES} bytes"
            )
        checked_digests = tuple(_digest(digest, f"{place}.digests") for digest in digests)
        files[name] = File(size, checked_digests)
    return files


def _object(
    value: Any, place: str, keys: tuple[str, ...], *, exact: bool = False
) -> dict[str, Any]:
    """Return ``value`` if it is an object with all ``keys``, and with no others if ``exact``."""
    if type(value) is not dict:
        raise ValueError(f"{place} must be an object, not {short_json(value)}")
    for key in keys:
        if key not in value:
            raise ValueError(f"{place} lacks {key}")
    for key in value:
        if exact and key not in keys:
            raise ValueError(f"{place} has {short_json(key)}, which does not belong there")
    return value


def _whole(facts: dict[str, Any], key: str, least: int, most: int, *, place: str = "") -> int:
    """Return the whole number at ``key``, if it is in its range."""
    value = facts[key]
    # A bool is not accepted as an int.
    if type(value) is not int or not least <= value <= most:
        name = f"{place}.{key}" if place else key
        raise ValueError(
            f"{name} is {short_json(value)}, not a whole number from {least} to {most}"
        )
    return value


def _digest(value: Any, place: str) -> str:
    is_digest = (
        type(value) is str
        and len(value) == _DIGEST_DIGITS
        and set(value) <= set("0123456789abcdef")
    )
    if not is_digest:
        raise ValueError(
            f"{place} has {short_json(value)}, not a digest of {_DIGEST_DIGITS} hexadecimal digits"
        )
    return value
