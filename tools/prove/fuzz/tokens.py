"""Damaged folders of token files: each is refused, or the tokens that are read are the same.

Two kinds of change are told apart. Damage leaves the digests as they are: it must be found, by
training or, in parts that training does not read at its start, by ``composer3d inspect``. A forger
computes the digests again: what is then accepted must at least agree with itself.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from composer3d.data import tokens as token_files
from composer3d.spec import token_manifest
from composer3d.spec.errors import DataError
from tools.prove.fuzz.child import Case, WrongError, command
from tools.prove.fuzz.mutate import change_json, flip, odd_like, replace_file, written

# Each folder has a name, a dtype, and the bytes of a chunk. Of many small chunks, training checks
# only some at its start, as it does with a corpus above 1 GiB.
_LARGE = token_manifest.CHUNK_BYTES
_FOLDERS = {
    "bytes": ("uint16", 256, _LARGE),
    "wide": ("uint32", 70_000, _LARGE),
    "chunks": ("uint16", 300, 256),
    "many-chunks": ("uint16", 300, 64),
}
_MANIFEST = token_manifest.MANIFEST
_END = 7  # the token that ends a document


def make_base(base: Path) -> None:
    """Write the sound folders."""
    for name, (dtype, vocab, chunk_bytes) in _FOLDERS.items():
        generator = np.random.default_rng(len(name))
        lengths = generator.integers(1, 60, size=40)
        stops = np.cumsum(lengths)
        tokens = generator.integers(8, vocab, size=stops[-1])
        tokens[stops - 1] = _END
        folder = base / f"tokens-{name}"
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(
            tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        )
        (folder / "documents.bin").write_bytes(np.array([0, *stops], dtype="<i8").tobytes())
        (folder / "tokenizer.json").write_text('{"model": {}}')
        digest = token_manifest.digest_of((folder / "tokenizer.json").read_bytes())
        token_manifest.CHUNK_BYTES = chunk_bytes
        token_files.write_manifest(
            folder,
            {
                "dtype": dtype,
                "vocab": vocab,
                "tokens": int(stops[-1]),
                "documents": len(lengths),
                "end_of_document": _END,
                "tokenizer": {"name": "tokenizer.json", "digest": digest},
            },
        )
        token_manifest.CHUNK_BYTES = _LARGE


def make(base: Path, draw: random.Random) -> Case:
    """Change one of the folders, and open it in all ways."""
    name = draw.choice(list(_FOLDERS))
    sound, evil = base / f"tokens-{name}", Path("evil")
    shutil.copytree(sound, evil)
    token_manifest.CHUNK_BYTES = _FOLDERS[name][2]
    ways = (_flip_file, _flip_file, _flip_file, _replace, _manifest, _manifest, _values, _values)
    changes = [draw.choice(ways)(evil, base, draw)]
    if draw.random() < 0.15:
        changes.append(draw.choice(ways)(evil, base, draw))
    is_forged = draw.random() < 0.45 and _seal(evil)
    if is_forged:
        changes.append("digests computed again")
    return Case(f"{name}: {'; '.join(changes)}", lambda: _act(evil, sound, is_forged=is_forged))


def _flip_file(evil: Path, base: Path, draw: random.Random) -> str:
    """Change bytes of a file, which an earlier change may have replaced."""
    name = draw.choice(("tokens.bin", "tokens.bin", "documents.bin", "tokenizer.json", _MANIFEST))
    path = evil / name
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
        return f"{name} left alone"
    path.write_bytes(flip(path.read_bytes(), draw))
    return f"bytes of {name}"


def _replace(evil: Path, base: Path, draw: random.Random) -> str:
    name = draw.choice(("tokens.bin", "documents.bin", "tokenizer.json", _MANIFEST))
    return f"{name}: {replace_file(evil / name, base.parent / 'outside', draw)}"


def _read_manifest(evil: Path) -> Any:
    try:
        if (evil / _MANIFEST).is_symlink() or (evil / _MANIFEST).stat().st_size > 1 << 20:
            return None
        return json.loads((evil / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


def _manifest(evil: Path, base: Path, draw: random.Random) -> str:
    """Change the manifest in any place, or one of its numbers a little."""
    document = _read_manifest(evil)
    if not isinstance(document, dict):
        return "the manifest left alone"
    if draw.random() < 0.5:
        key = draw.choice(("dtype", "vocab", "tokens", "documents", "end_of_document"))
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
    way = draw.choice(("token beyond", "end inside", "no end", "order", "ends", "negative", "last"))
    is_of_tokens = way in ("token beyond", "end inside", "no end")
    path = evil / ("tokens.bin" if is_of_tokens else "documents.bin")
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
        return "values left alone"
    document = _read_manifest(evil)
    is_wide = isinstance(document, dict) and document.get("dtype") == "uint32"
    dtype = np.dtype(("<u4" if is_wide else "<u2") if is_of_tokens else "<i8")
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
    elif way == "negative":
        values[at] = draw.choice((-1, -(2**63), 2**62))
    else:
        values[-1] += draw.choice((-1, 1, 1000))
    path.write_bytes(values.tobytes())
    return f"values: {way}"


def _seal(evil: Path) -> bool:
    """Compute all digests again, as a forger does. Return whether the manifest allowed it."""
    document = _read_manifest(evil)
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
        if name == "tokenizer.json" and isinstance(document.get("tokenizer"), dict):
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
        *("--set", "data.path=evil", "--set", "model.vocab=80000"),
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
    is_same = (
        np.array_equal(corpus.tokens, expected.tokens)
        and corpus.tokens.dtype == expected.tokens.dtype
        and corpus.end_of_document == expected.end_of_document
        and corpus.n_documents == expected.n_documents
    )
    if is_same and inspected.status == 0:
        return "the same tokens"
    if is_forged and inspected.status == 0:
        _require_agreement(evil, corpus)
        return "forged, and in agreement with itself"
    if inspected.status == 1 and len(expected.tokens) * 2 > 16 * token_manifest.CHUNK_BYTES:
        return "in a part that a start does not read; inspect finds it"
    raise WrongError("damage was accepted, and inspect does not find it")


def _require_agreement(evil: Path, corpus: token_files.Corpus) -> None:
    """Compare the files with each other, without code of the package."""
    document = json.loads((evil / _MANIFEST).read_bytes())
    itemsize = {"uint16": 2, "uint32": 4}[document["dtype"]]
    tokens = np.frombuffer((evil / "tokens.bin").read_bytes(), f"<u{itemsize}")
    starts = np.frombuffer((evil / "documents.bin").read_bytes(), "<i8")
    must = {
        "the tokens are those of the file": np.array_equal(tokens, corpus.tokens),
        "all tokens are in the vocabulary": int(tokens.max()) < document["vocab"],
        "the numbers of the manifest are right": len(tokens) == document["tokens"]
        and len(starts) == document["documents"] + 1,
        "documents ascend": starts[0] == 0
        and starts[-1] == len(tokens)
        and bool((np.diff(starts) > 0).all()),
    }
    for rule, holds in must.items():
        if not holds:
            raise WrongError(f"a forged folder was accepted, although not: {rule}")
    ends = np.flatnonzero(tokens == document["end_of_document"]) + 1
    if not np.array_equal(ends, starts[1:]):
        raise WrongError(
            "a forged folder was accepted, although its end of document is elsewhere in the tokens "
            "than documents.bin says"
        )
