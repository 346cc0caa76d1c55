"""Documents, one after another: text files, and the lines of JSONL files.

They come in the order of their relative paths, so that every process, on every machine that holds the same files, reads
the same ones.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from composer3d.data.corpus import END_OF_DOCUMENT
from composer3d.errors import DataError


class Document(NamedTuple):
    """``place`` names it in messages: ``a.txt``, ``b.jsonl:7``. ``size``: bytes of the source that were read for it."""

    place: str
    text: bytes
    size: int


def files_below(root: Path, enter: Callable[[str], bool] = lambda folder: True) -> list[str]:
    """Relative POSIX paths of the regular files below ``root``, sorted. ``enter`` takes a folder's name.

    Hidden files, hidden folders and links to folders are passed over. Raises DataError where a folder cannot be read.
    """

    def walk() -> Iterator[str]:
        for folder, subfolders, files in os.walk(root, onerror=refuse_unreadable):
            if not os.access(folder, os.X_OK):  # its files would look like none
                raise DataError(f"{folder}: may not be entered; allow it, or move the folder away")
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and enter(name)]
            for name in files:
                full = os.path.join(folder, name)
                if not name.startswith(".") and os.path.isfile(full):
                    yield Path(os.path.relpath(full, root)).as_posix()

    return sorted(walk())


def files_of(path: Path, suffix: str = "") -> list[Path]:
    """``path`` itself where it is a file, else the files below it whose names end with ``suffix``, in order."""
    if not path.is_dir():
        return [path]
    return [path / name for name in files_below(path) if name.endswith(suffix)]


def text_documents(files: Iterable[Path]) -> Iterator[Document]:
    """Each file is a document; empty files are none. Raises DataError where one cannot be read."""
    for file in files:
        try:
            text = file.read_bytes()
        except OSError as error:
            refuse_unreadable(error, file)
        if text:
            yield Document(str(file), text, len(text))


def jsonl_documents(files: Iterable[Path], field: str) -> Iterator[Document]:
    """Each line is an object whose string ``field`` is a document, in UTF-8; empty texts and blank lines are none.

    Raises DataError, naming file and line, where a file cannot be read or a line is something else.
    """
    for file in files:
        try:
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace() and (text := _text_of(line, field, f"{file}:{number}")):
                        yield Document(f"{file}:{number}", text, len(line))
        except OSError as error:
            refuse_unreadable(error, file)


def _text_of(line: bytes, field: str, place: str) -> bytes:
    form, way = f'an object such as {{"{field}": "..."}}', "data.field of a recipe, or --field of prepare"
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, numbers of thousands of digits, endless brackets
        raise DataError(f"{place}: not JSON: {error}; each line must be {form}") from None
    if not isinstance(entry, dict):
        raise DataError(f"{place}: must be {form}, got {_cut(json.dumps(entry))}")
    if field not in entry:
        keys = _cut(", ".join(map(json.dumps, entry)), 200) or "none"
        raise DataError(
            f'{place}: the object has no "{field}", its keys are {keys}; name the key of the text with {way}'
        )
    if not isinstance(entry[field], str):
        got = f'"{field}" must be a string, got {_cut(json.dumps(entry[field]))}'
        raise DataError(f"{place}: {got}; mend the line, or name another key with {way}")
    try:
        return str(entry[field]).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f'{place}: "{field}" holds half a surrogate pair at character {error.start}, which UTF-8 cannot hold; '
            "mend the line or remove it"
        ) from None


def _cut(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def refuse_end_of_document(document: Document) -> None:
    """Raises DataError where a text that is read as bytes holds the one that ends a document."""
    if (offset := document.text.find(END_OF_DOCUMENT)) >= 0:
        raise DataError(
            f"{document.place}: byte 0 at offset {offset} would end a document there; "
            "remove that byte, or take the document away if it is not text"
        )


def refuse_unreadable(error: OSError, file: Path | None = None) -> NoReturn:
    place = error.filename or file  # a read that fails halfway names none
    raise DataError(f"{place}: cannot be read: {error.strerror}; make it readable or move it away") from error
