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

from composer3d.data.documents import (
    END_OF_DOCUMENT,
    Document,
    documents_of,
    files_of,
    refuse_end_of_document,
)
from composer3d.data.tokens import Corpus, open_tokens
from composer3d.spec.errors import DataError
from composer3d.spec.token_manifest import digest_of

# Of the standard library's folders: what is installed beside it, and tests, whose fixtures are no ordinary source.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
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
        files = files_of(root, ".py", skip=_NOT_LIBRARY)
        held_out = split == "validation"
        files = [
            file for file in files if _is_held_out(file.relative_to(root).as_posix()) == held_out
        ]
        return _gather(documents_of(files, None), f"python ({split})", root, len(files))
    chosen = path if split == "train" else held_out_path
    assert chosen is not None  # a rule of recipes
    root, name = Path(chosen), f"{chosen} ({split})"
    if source == "tokens":
        return open_tokens(root, name=name)
    files = files_of(root, ".jsonl" if source == "jsonl" else "")
    return _gather(
        documents_of(files, field if source == "jsonl" else None), name, root, len(files)
    )


def _is_held_out(name: str) -> bool:
    """By the name alone, so that a file stays on its side when others come and go."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _gather(documents: Iterable[Document], name: str, root: Path, n_files: int) -> Corpus:
    """The documents as bytes in memory. ``root`` and ``n_files`` say where they were sought."""
    buffer = bytearray()
    for document in documents:
        refuse_end_of_document(document)
        buffer += document.text + bytes([END_OF_DOCUMENT])
    if not buffer:
        what = f"all {n_files} files are empty" if n_files else "no files found"
        raise DataError(f"{root}: no text for corpus {name}: {what}; give a path that holds text")
    tokens = np.frombuffer(memoryview(buffer).toreadonly(), dtype=np.uint8)
    return Corpus(tokens, END_OF_DOCUMENT, digest_of(buffer), buffer.count(END_OF_DOCUMENT), name)
