"""Where training text comes from: documents read as bytes and joined into one array of tokens.

The vocabulary is the 256 bytes. Byte 0 ends a document and appears nowhere else. Documents are in the order of their
relative paths, so that every process, on every machine that holds the same files, reads the same tokens.
"""

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from composer3d.errors import DataError

END_OF_DOCUMENT = 0
VOCAB_SIZE = 256

# Of the standard library's folders: what is installed beside it, and tests, whose fixtures are no ordinary source.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens of one split, in memory.

    ``tokens``: uint8, 1-D, read-only; each document is followed by one ``END_OF_DOCUMENT``.
    ``digest``: hexadecimal, of the tokens; two corpora with one digest hold the same tokens.
    ``name``: says in messages which corpus this is.
    """

    tokens: np.ndarray
    digest: str
    n_documents: int
    name: str


def open_corpus(
    source: Literal["python", "text"],
    path: str | os.PathLike[str] | None,
    *,
    split: Literal["train", "validation"],
    held_out_path: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Reads one split of a source.

    "python" reads the standard library of the running interpreter, reads no path, and holds out one file in 20 by the
    hash of its name. "text" reads ``path`` to train and ``held_out_path`` to validate: a file, or a folder with all
    below it. Hidden files, hidden folders and links to folders are passed over; empty files are no documents.

    Raises DataError, naming the path, where there is nothing to read, a file cannot be read, or a text holds byte 0.
    """
    if source == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        return _read(root, _python_files(root, split), name=f"python ({split})")
    key, chosen = ("data.path", path) if split == "train" else ("validation.path", held_out_path)
    if chosen is None:
        raise DataError(
            f'{key} is absent: data.source = "text" needs a text file or a folder of them to {_purpose(split)}'
        )
    root = Path(chosen)
    if not root.exists():
        raise DataError(f'{key} = "{root}" does not exist; give a text file or a folder of them')
    if root.is_dir():
        return _read(root, _files_below(root, lambda folder: True), name=f"{root} ({split})")
    return _read(root.parent, [root.name], name=f"{root} ({split})", found_at=root)


def _purpose(split: str) -> str:
    return "train on" if split == "train" else "validate on"


def _python_files(root: Path, split: str) -> list[str]:
    files = _files_below(root, lambda folder: folder not in _NOT_LIBRARY)
    return [name for name in files if name.endswith(".py") and _is_held_out(name) == (split == "validation")]


def _is_held_out(name: str) -> bool:
    """By the name alone, so that a file stays on its side when others come and go."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _files_below(root: Path, enter: Callable[[str], bool]) -> list[str]:
    """Relative POSIX paths of the regular files below ``root``, sorted. ``enter`` takes a folder's name."""

    def walk() -> Iterator[str]:
        for folder, subfolders, files in os.walk(root, onerror=_refuse):
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and enter(name)]
            for name in files:
                full = os.path.join(folder, name)
                if not name.startswith(".") and os.path.isfile(full):
                    yield Path(os.path.relpath(full, root)).as_posix()

    return sorted(walk())


def _read(root: Path, names: list[str], *, name: str, found_at: Path | None = None) -> Corpus:
    buffer = bytearray()
    n_documents = 0
    for file in names:
        text = _bytes_of(root / file)
        if not text:
            continue
        if (offset := text.find(END_OF_DOCUMENT)) >= 0:
            raise DataError(
                f"{root / file}: byte 0 at offset {offset} would end a document there; "
                "remove that byte, or move the file away if it is not text"
            )
        buffer += text
        buffer.append(END_OF_DOCUMENT)
        n_documents += 1
    if not n_documents:
        what = f"all {len(names)} files are empty" if names else "no files found"
        raise DataError(f"{found_at or root}: no text for corpus {name}: {what}; give a path that holds text")
    tokens = np.frombuffer(buffer, dtype=np.uint8)
    tokens.flags.writeable = False
    digest = hashlib.blake2b(buffer, digest_size=16).hexdigest()
    return Corpus(tokens=tokens, digest=digest, n_documents=n_documents, name=name)


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}; make it readable or move it away") from error
