"""Documents, one after another: text files, and the lines of JSONL files, in the same order on every machine."""

import json
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from composer3d.errors import DataError

END_OF_DOCUMENT = 0  # of tokens that are bytes; token files name their own


class Document(NamedTuple):
    """``place`` names it in messages: ``a.txt``, ``b.jsonl:7``. ``size``: bytes of the source that were read for it."""

    place: str
    text: bytes
    size: int


def files_of(path: Path, suffix: str = "", skip: Container[str] = ()) -> list[Path]:
    """``path`` itself where it is a file, else the files below it whose names end with ``suffix``, by relative path.

    Hidden files, hidden folders, those that ``skip`` names and links to folders are passed over. Raises DataError where
    a folder cannot be read.
    """
    if not path.is_dir():
        return [path]
    found = []
    for folder, subfolders, names in os.walk(path, onerror=refuse_unreadable):
        if not os.access(folder, os.X_OK):  # its files would look like none
            raise DataError(f"{folder}: may not be entered; allow it, or move the folder away")
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        files = [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
        found += [file for file in files if os.path.isfile(file)]
    return sorted(found, key=Path.as_posix)


def documents_of(files: Iterable[Path], field: str | None) -> Iterator[Document]:
    """Each file is a document; with ``field``, that string of the JSON object in each line is one, in UTF-8.

    Empty texts and blank lines are none. Raises DataError, naming file and line, where a file cannot be read or a line
    is something else.
    """
    for file in files:
        try:
            if field is None:
                if text := file.read_bytes():
                    yield Document(str(file), text, len(text))
                continue
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    if not line.isspace() and (text := _text_of(line, field, f"{file}:{number}")):
                        yield Document(f"{file}:{number}", text, len(line))
        except OSError as error:
            refuse_unreadable(error, file)


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get(field), str):
            return entry[field].encode()
        problem = f"got {line.decode().strip()[:200]}"
    except (ValueError, RecursionError) as error:  # also half a surrogate pair, numbers of thousands of digits
        problem = str(error)
    raise DataError(
        f'{place}: must be a JSON object such as {{"{field}": "..."}}: {problem}; mend the line, or name the key of '
        "the text with data.field of a recipe, or --field of prepare"
    )


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
