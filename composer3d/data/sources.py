"""Where training text comes from: documents read as bytes and joined into one array, or token files made before.

Read as bytes, the vocabulary is the 256 of them. Byte 0 ends a document and appears nowhere else.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from composer3d.data.corpus import END_OF_DOCUMENT, Corpus
from composer3d.data.documents import (
    Document,
    files_below,
    files_of,
    jsonl_documents,
    refuse_end_of_document,
    text_documents,
)
from composer3d.data.tokens import open_tokens
from composer3d.errors import DataError
from composer3d.recipe.rules import PATHS

# Of the standard library's folders: what is installed beside it, and tests, whose fixtures are no ordinary source.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_HELD_OUT_ONE_IN = 20


def open_corpus(
    source: Literal["python", "text", "jsonl", "tokens"],
    path: str | os.PathLike[str] | None,
    *,
    split: Literal["train", "validation"],
    held_out_path: str | os.PathLike[str] | None = None,
    field: str = "text",
) -> Corpus:
    """Opens one split of a source.

    "python" reads the standard library of the running interpreter, reads no path, and holds out one file in 20 by the
    hash of its name. The others read ``path`` to train and ``held_out_path`` to validate. "text": a file, or a folder
    with all below it. "jsonl": a file, or a folder with all ``*.jsonl`` below it; ``field`` of each line is a document.
    Hidden files, hidden folders and links to folders are passed over; empty texts are no documents. "tokens": see
    ``tokens.open_tokens``.

    Raises DataError, naming the path, where there is nothing to read, a file cannot be read or is damaged, or a text
    that is read as bytes holds byte 0.
    """
    if source == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [root / name for name in _python_files(root, split)]
        return _gather(text_documents(files), f"python ({split})", root, len(files))
    key, chosen = ("data.path", path) if split == "train" else ("validation.path", held_out_path)
    if chosen is None:
        purpose = "train on" if split == "train" else "validate on"
        raise DataError(f'{key} is absent: data.source = "{source}" needs {PATHS[source]} to {purpose}')
    root, name = Path(chosen), f"{chosen} ({split})"
    if not root.exists():
        raise DataError(f'{key} = "{root}" does not exist; give {PATHS[source]}')
    if source == "tokens":
        return open_tokens(root, name=name)
    files = files_of(root, ".jsonl" if source == "jsonl" else "")
    documents = jsonl_documents(files, field) if source == "jsonl" else text_documents(files)
    return _gather(documents, name, root, len(files))


def _python_files(root: Path, split: str) -> list[str]:
    files = files_below(root, lambda folder: folder not in _NOT_LIBRARY)
    return [name for name in files if name.endswith(".py") and _is_held_out(name) == (split == "validation")]


def _is_held_out(name: str) -> bool:
    """By the name alone, so that a file stays on its side when others come and go."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _gather(documents: Iterable[Document], name: str, root: Path, n_files: int) -> Corpus:
    """The documents as bytes in memory. ``root`` and ``n_files`` say where they were sought."""
    buffer = bytearray()
    n_documents = 0
    for document in documents:
        refuse_end_of_document(document)
        buffer += document.text
        buffer.append(END_OF_DOCUMENT)
        n_documents += 1
    if not n_documents:
        what = f"all {n_files} files are empty" if n_files else "no files found"
        raise DataError(f"{root}: no text for corpus {name}: {what}; give a path that holds text")
    tokens = np.frombuffer(buffer, dtype=np.uint8)
    tokens.flags.writeable = False
    digest = hashlib.blake2b(buffer, digest_size=16).hexdigest()
    return Corpus(tokens=tokens, end_of_document=END_OF_DOCUMENT, digest=digest, n_documents=n_documents, name=name)
