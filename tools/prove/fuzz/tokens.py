"""Damaged folders of token files: each is refused, or the tokens that are read are the same.

Two kinds of change are told apart. Damage leaves the digests as they are: it must be found, by
training or, in parts that training does not read at its start, by ``composer3d inspect``. A forger
computes the digests again: what is then accepted must at least agree with itself.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from composer3d.data import tokens as token_files
from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError
from tools.prove.fuzz.child import Case, WrongError, command
from tools.prove.fuzz.mutate import (
    change_json,
    flip,
    is_plain,
    odd_like,
    read_json,
    replace_file,
    written,
)
from tools.prove.proof import overrides


class _Kind(NamedTuple):
    """What a sound folder is like.

    Attributes:
        dtype: of the tokens.
        vocab: the size of the vocabulary.
        chunk_bytes: the bytes of a chunk. Of many small chunks, training checks only some at its
            start, as it does with a corpus above 1 GiB.
        documents: the number of documents in each shard.
        has_masks: whether only some tokens are learned.
    """

    dtype: str
    vocab: int
    chunk_bytes: int = token_manifest.CHUNK_BYTES
    documents: tuple[int, ...] = (40,)
    has_masks: bool = False

    @property
    def is_numbered(self) -> bool:
        """Whether the names of the files have the number of their shard."""
        return len(self.documents) > 1 or self.has_masks


_FOLDERS = {
    "bytes": _Kind("uint16", 256),
    "wide": _Kind("uint32", 70_000),
    "chunks": _Kind("uint16", 300, 256),
    "many-chunks": _Kind("uint16", 300, 64),
    "shards": _Kind("uint16", 300, 256, documents=(25, 1, 14)),
    "masks": _Kind("uint16", 300, 256, has_masks=True),
    "masks-and-shards": _Kind("uint32", 300, documents=(20, 20), has_masks=True),
}
_MANIFEST = token_manifest.MANIFEST
_TOKENIZER = token_manifest.TOKENIZER
_END = 7  # the token that ends a document
# Of a folder with more, training reads as many at its start, chosen at random.
_CHUNKS_OF_A_START = 16


def make_base(base: Path) -> None:
    """Write the sound folders."""
    for name, kind in _FOLDERS.items():
        generator = np.random.default_rng(len(name))
        folder = base / f"tokens-{name}"
        folder.mkdir()
        shards, learned = [], 0
        for number, documents in enumerate(kind.documents):
            stops = np.cumsum(generator.integers(1, 60, size=documents))
            tokens = generator.integers(8, kind.vocab, size=stops[-1])
            tokens[stops - 1] = _END
            tokens_name, documents_name = token_manifest.shard_files(
                number if kind.is_numbered else None
            )
            (folder / tokens_name).write_bytes(tokens.astype(_little(kind.dtype)).tobytes())
            (folder / documents_name).write_bytes(np.array([0, *stops], dtype="<i8").tobytes())
            if kind.has_masks:
                mask = generator.integers(0, 2, size=len(tokens), dtype=np.uint8)
                (folder / token_manifest.mask_file(number)).write_bytes(mask.tobytes())
                learned += int(mask.sum())
            shards.append({"tokens": len(tokens), "documents": documents})

        (folder / _TOKENIZER).write_text('{"model": {}}')
        digest = token_manifest.digest_of((folder / _TOKENIZER).read_bytes())
        facts = {
            "dtype": kind.dtype,
            "vocab": kind.vocab,
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(kind.documents),
            "end_of_document": _END,
            "tokenizer": {"name": _TOKENIZER, "digest": digest},
        }
        if kind.is_numbered:
            facts["shards"] = shards
        if kind.has_masks:
            facts["learned"] = learned
        with _chunks_of(kind.chunk_bytes):
            token_files.write_manifest(folder, facts)


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


@contextlib.contextmanager
def _chunks_of(size: int) -> Iterator[None]:
    usual, token_manifest.CHUNK_BYTES = token_manifest.CHUNK_BYTES, size
    try:
        yield
    finally:
        token_manifest.CHUNK_BYTES = usual


def make(base: Path, draw: random.Random) -> Case:
    """Change one of the folders, and open it in all ways."""
    name = draw.choice(list(_FOLDERS))
    sound, evil = base / f"tokens-{name}", Path("evil")
    shutil.copytree(sound, evil)
    token_manifest.CHUNK_BYTES = _FOLDERS[name].chunk_bytes
    ways = (_flip_file, _flip_file, _flip_file, _replace, _manifest, _manifest, _values, _values)
    changes = [draw.choice(ways)(evil, base, draw)]
    if draw.random() < 0.15:
        changes.append(draw.choice(ways)(evil, base, draw))
    is_forged = draw.random() < 0.45 and _seal(evil)
    if is_forged:
        changes.append("digests computed again")
    return Case(f"{name}: {'; '.join(changes)}", lambda: _act(evil, sound, is_forged=is_forged))


def _draw_file(evil: Path, draw: random.Random, *kinds: str) -> str:
    """The name of a file of the folder, of one of these kinds: "tokens", "mask", ..."""
    kinds = kinds or ("tokens", "tokens", "mask", "mask", "documents", "tokenizer", "manifest")
    names = sorted(path.name for path in evil.iterdir())
    while True:
        kind = draw.choice(kinds)
        if kind in ("tokenizer", "manifest"):
            return _TOKENIZER if kind == "tokenizer" else _MANIFEST
        found = [name for name in names if name.startswith(kind) and name.endswith(".bin")]
        if found:
            return draw.choice(found)
        # Not every folder has a mask, and an earlier change may have removed a file.
        kinds = tuple(other for other in kinds if other != kind) or ("manifest",)


def _flip_file(evil: Path, base: Path, draw: random.Random) -> str:
    """Change bytes of a file, which an earlier change may have replaced."""
    name = _draw_file(evil, draw)
    path = evil / name
    if not is_plain(path):
        return f"{name} left alone"
    path.write_bytes(flip(path.read_bytes(), draw))
    return f"bytes of {name}"


def _replace(evil: Path, base: Path, draw: random.Random) -> str:
    name = _draw_file(evil, draw)
    return f"{name}: {replace_file(evil / name, base.parent / 'outside', draw)}"


def _manifest(evil: Path, base: Path, draw: random.Random) -> str:
    """Change the manifest in any place, or one of its numbers a little."""
    document = read_json(evil / _MANIFEST)
    if not isinstance(document, dict):
        return "the manifest left alone"
    if draw.random() < 0.5:
        keys = ("dtype", "vocab", "tokens", "documents", "end_of_document", "learned", "version")
        key = draw.choice([key for key in keys if key in document] or ["tokens"])
        document[key] = odd_like(document.get(key), draw)
        shown = f"{key} to {str(document[key])[:40]!r}"
        if key == "dtype" and draw.random() < 0.7:
            document[key] = shown = draw.choice(("uint16", "uint32", "uint8", "int16", "uint64"))
    else:
        document, shown = change_json(document, draw)
    (evil / _MANIFEST).write_bytes(written(document, draw))
    return f"manifest: {shown}"


def _values(evil: Path, base: Path, draw: random.Random) -> str:
    """Write tokens or ends of documents that cannot be."""
    ways = {
        "tokens": ("token beyond", "end inside", "no end"),
        "documents": ("order", "ends", "negative", "last"),
        "mask": ("learned or not", "neither"),
    }
    name = _draw_file(evil, draw, *ways)
    kind = next((kind for kind in ways if name.startswith(kind)), None)
    path = evil / name
    if kind is None or not is_plain(path):
        return "values left alone"
    document = read_json(evil / _MANIFEST)
    is_wide = isinstance(document, dict) and document.get("dtype") == "uint32"
    dtypes = {"tokens": "<u4" if is_wide else "<u2", "documents": "<i8", "mask": "u1"}
    way, dtype = draw.choice(ways[kind]), np.dtype(dtypes[kind])
    content = path.read_bytes()
    values = np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype).copy()
    if len(values) < 3:
        return "values left alone"
    at = draw.randrange(1, len(values) - 1)
    if way == "token beyond":
        values[at] = draw.choice((300, 65_535, np.iinfo(dtype).max))
    elif way == "end inside":
        values[at] = _END
    elif way == "no end":
        ends = np.flatnonzero(values == _END)
        if len(ends):
            values[draw.choice(list(ends))] = 9
    elif way == "order":
        values[[at, at - 1]] = values[[at - 1, at]]
    elif way == "ends":
        values[at] = values[at - 1]
    elif way == "learned or not":
        values[at] ^= 1
    elif way == "neither":
        values[at] = draw.choice((2, 128, 255))
    elif way == "negative":
        values[at] = draw.choice((-1, -(2**63), 2**62))
    else:
        values[-1] += draw.choice((-1, 1, 1000))
    path.write_bytes(values.tobytes())
    return f"values: {way}"


def _seal(evil: Path) -> bool:
    """Compute all digests again, as a forger does. Return whether the manifest allowed it."""
    document = read_json(evil / _MANIFEST)
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        return False
    for name, entry in document["files"].items():
        path = evil / name if isinstance(name, str) and "\0" not in name else evil / "x"
        try:
            is_small = path.is_file() and path.stat().st_size <= 1 << 20
        except (OSError, ValueError):
            is_small = False
        if not isinstance(entry, dict) or not is_small or path.parent != evil:
            continue
        content = path.read_bytes()
        size = token_manifest.CHUNK_BYTES
        entry["digests"] = [
            token_manifest.digest_of(content[at : at + size]) for at in range(0, len(content), size)
        ]
        if type(entry.get("bytes")) is int and entry["bytes"] > 0:
            entry["bytes"] = len(content)
        if name == _TOKENIZER and isinstance(document.get("tokenizer"), dict):
            document["tokenizer"]["digest"] = entry["digests"][0] if entry["digests"] else None
    try:
        document["digest"] = token_manifest.digest_of_manifest(document)
    except (ValueError, RecursionError, TypeError):
        return False
    (evil / _MANIFEST).write_text(json.dumps(document))
    return True


# The judgement.


def _act(evil: Path, sound: Path, *, is_forged: bool) -> str:
    inspected = command("inspect", "evil", "--full", "--json", statuses=(0, 1, 2))
    check = command(
        "check",
        str(sound.parent / "recipe.toml"),
        *overrides("data.path=evil", "model.vocab=80000"),
    )
    try:
        corpus = token_files.open_tokens(evil, name="evil")
    except DataError as error:
        if len(error.lines) != 1 or not error.lines[0].isprintable():
            raise WrongError(f"an error of {error.lines!r:.300}") from None
        if inspected.status == 0:
            raise WrongError(f"inspect finds nothing, but training refuses: {error}") from None
        return "refused"
    if check.status != 0:
        raise WrongError("check refuses what training opens")

    expected = token_files.open_tokens(sound, name="sound")
    has_same_tokens = (
        np.array_equal(_whole(corpus.tokens), _whole(expected.tokens))
        and corpus.tokens.dtype == expected.tokens.dtype
        and corpus.end_of_document == expected.end_of_document
        and corpus.n_documents == expected.n_documents
    )
    is_same = has_same_tokens and np.array_equal(_mask_of(corpus), _mask_of(expected))
    if is_same and inspected.status == 0:
        return "the same tokens"
    if is_forged and inspected.status == 0:
        _require_agreement(evil, corpus)
        return "forged, and in agreement with itself"
    if is_forged and has_same_tokens and inspected.status == 1:
        # Training does not add up the masks: each rank reads a part of them.
        return "forged masks; inspect finds that their sum is another"
    if inspected.status == 1 and _count_chunks(sound) > _CHUNKS_OF_A_START:
        return "in a part that a start does not read; inspect finds it"
    raise WrongError("damage was accepted, and inspect does not find it")


def _count_chunks(folder: Path) -> int:
    """Return the number of chunks of all files of a sound folder."""
    files = json.loads((folder / _MANIFEST).read_bytes())["files"]
    return sum(len(entry["digests"]) for entry in files.values())


def _mask_of(corpus: token_files.Corpus) -> np.ndarray:
    """Which tokens are learned: uint8, as long as the tokens."""
    if corpus.mask is None:
        return np.ones(len(corpus.tokens), np.uint8)
    return _whole(corpus.mask)


def _whole(values: np.ndarray | token_files.ShardedTokens) -> np.ndarray:
    return values[np.arange(len(values))]


def _require_agreement(evil: Path, corpus: token_files.Corpus) -> None:
    """Compare the files with each other, without code of the package."""
    document = json.loads((evil / _MANIFEST).read_bytes())
    itemsize = {"uint16": 2, "uint32": 4}[document["dtype"]]
    all_tokens, all_masks, n_documents = [], [], 0
    for number, shard in enumerate(document.get("shards", [None])):
        ending = ".bin" if shard is None else f"-{number:05}.bin"
        tokens = np.frombuffer((evil / f"tokens{ending}").read_bytes(), f"<u{itemsize}")
        starts = np.frombuffer((evil / f"documents{ending}").read_bytes(), "<i8")
        must = {
            "documents ascend": starts[0] == 0
            and starts[-1] == len(tokens)
            and bool((np.diff(starts) > 0).all()),
            "documents end where their end of document stands": np.array_equal(
                np.flatnonzero(tokens == document["end_of_document"]) + 1, starts[1:]
            ),
        }
        if shard is not None:
            must["the numbers of the shard are right"] = (
                len(tokens) == shard["tokens"] and len(starts) == shard["documents"] + 1
            )
        _require(must)
        all_tokens.append(tokens)
        n_documents += len(starts) - 1
        if document["version"] == 3:
            all_masks.append(np.frombuffer((evil / f"mask{ending}").read_bytes(), np.uint8))

    tokens = np.concatenate(all_tokens)
    must = {
        "the tokens are those of the files": np.array_equal(tokens, _whole(corpus.tokens)),
        "all tokens are in the vocabulary": int(tokens.max()) < document["vocab"],
        "the numbers of the manifest are right": len(tokens) == document["tokens"]
        and n_documents == document["documents"],
    }
    if all_masks:
        mask = np.concatenate(all_masks)
        must["the masks are those of the files"] = np.array_equal(mask, _mask_of(corpus))
        must["masks are 0 or 1"] = int(mask.max()) <= 1
        must["the number of learned tokens is right"] = int(mask.sum()) == document["learned"]
    else:
        must["there are no masks"] = corpus.mask is None
    _require(must)


def _require(rules: dict[str, bool]) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise WrongError(f"a forged folder was accepted, although not: {rule}")
