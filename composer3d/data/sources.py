"""Open the training or validation text of a recipe as one array of tokens.

Text is either read as bytes and joined in memory, or read from token files that ``prepare`` made.
Text that is read as bytes has a vocabulary of 256: each byte is a token. Byte 0 ends a document
and appears nowhere else.
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
    list_files,
    read_documents,
    refuse_end_of_document,
)
from composer3d.data.staging import NodeCache
from composer3d.data.tokens import MOST_MAPS, Corpus, open_tokens
from composer3d.facts.errors import DataError
from composer3d.facts.files import JSONL_SUFFIXES, is_jsonl_name
from composer3d.facts.remote import Place, place_of
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import digest_of
from composer3d.recipe.machine import JSONL_AS_TEXT

# Folders of the standard library that are skipped: installed packages, and tests, whose fixtures
# are not ordinary source code.
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
    most_maps: int = MOST_MAPS,
    cache: NodeCache | None = None,
) -> Corpus:
    """Open the training or the validation split of a source as a corpus.

    The sources are

    - ``python``: the standard library of the running interpreter. It reads no path. One file in 20
      is held out for validation, chosen by the hash of its name.
    - ``text``: a file, or a folder with all files below it. Each file is a document, and none may
      be JSONL.
    - ``jsonl``: a file, or a folder with all ``*.jsonl`` below it. Each line is a document.
    - ``tokens``: a folder of token files, or the URL of one; see ``tokens.open_tokens``.

    In folders of text and JSONL, hidden files, hidden folders and links to folders are skipped.
    Files may be compressed, as in ``read_documents``; ``*.jsonl.gz`` and ``*.jsonl.zst`` are JSONL.
    Empty texts do not count as documents.

    For ``tokens``, all ranks of a node must call this function: they share the verification.

    Args:
        source: one of the sources above.
        path: the file or folder of the split "train". It is not read for ``python``.
        split: the split to open.
        held_out_path: the file or folder of the split "validation". It is not read for ``python``.
        field: the key of the text in a line of JSONL.
        most_maps: shards of token files that may be mapped at once.
        cache: copies of token files on this node; None: there are none.

    Raises:
        DataError: there is nothing to read, a file cannot be read or is damaged, or a text that is
            read as bytes contains byte 0. The message names the path.
    """
    if source == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        is_validation = split == "validation"
        files = [
            file
            for file in list_files(root, ".py", skip=_NOT_LIBRARY)
            if _is_held_out(file.relative_to(root).as_posix()) == is_validation
        ]
        return _join(read_documents(files, None), f"python ({split})", root, len(files))

    chosen = path if split == "train" else held_out_path
    assert chosen is not None  # a rule of recipes
    name = f"{chosen} ({split})"
    if source == "tokens":
        folder = _folder_of(os.fspath(chosen))
        return open_tokens(folder, name=name, most_maps=most_maps, cache=cache)
    root = Path(chosen)
    is_jsonl = source == "jsonl"
    files = list_files(root, JSONL_SUFFIXES if is_jsonl else "")
    lines = [] if is_jsonl else [file for file in files if is_jsonl_name(file)]
    if lines:
        raise DataError(f"{one_line(lines[0])}: {JSONL_AS_TEXT}")
    documents = read_documents(files, field if is_jsonl else None)
    return _join(documents, name, root, len(files))


def _folder_of(text: str) -> Place:
    try:
        return place_of(text)
    except ValueError as error:
        raise DataError(f"{text} {error}") from None


def _is_held_out(name: str) -> bool:
    """Return whether a file of the standard library is held out for validation.

    The name alone decides, so that a file keeps its split when others are added or removed.
    """
    digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0


def _join(documents: Iterable[Document], name: str, root: Path, n_files: int) -> Corpus:
    """Join documents as bytes in memory, each followed by byte 0.

    Args:
        documents: the documents, in order.
        name: the name of the corpus, for messages.
        root: the file or folder of the documents, for messages.
        n_files: the number of files, for messages.

    Raises:
        DataError: there is no text, or a document contains byte 0.
    """
    content = bytearray()
    for document in documents:
        refuse_end_of_document(document)
        content += document.text + bytes([END_OF_DOCUMENT])
    if not content:
        reason = f"all {n_files} files are empty" if n_files else "no files found"
        raise DataError(f"{root}: no text for corpus {name}: {reason}; give a path that holds text")
    tokens = np.frombuffer(memoryview(content).toreadonly(), dtype=np.uint8)
    n_documents = content.count(END_OF_DOCUMENT)
    return Corpus(tokens, END_OF_DOCUMENT, digest_of(content), n_documents, name)
