"""Documents, one after another: text files, and the lines of JSONL files, in the same order on every machine."""

import json
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from composer3d.recipe.values import one_line
from composer3d.spec.errors import DataError
from composer3d.spec.files import open_plain

LONGEST_TEXT = 4 << 30  # bytes of a file that is one document
_LINE_BYTES = 16 << 20  # of a line of JSONL: what it parses to can take 30 times that in memory
END_OF_DOCUMENT = 0  # of tokens that are bytes; token files name their own


class Document(NamedTuple):
    """``place`` names it in messages: ``a.txt``, ``b.jsonl:7``. ``size``: bytes of the source that were read for it."""

    place: str
    text: bytes
    size: int


def files_of(path: Path, suffix: str = "", skip: Container[str] = ()) -> list[Path]:
    """``path`` itself where it is a file, else the files below it whose names end with ``suffix``, by relative path.

    Hidden files, hidden folders, those that ``skip`` names, links to folders and what is no plain file (pipes, devices)
    are passed over. Raises DataError where a folder cannot be read.
    """
    if not os.path.isdir(path):
        return [path]
    found: list[Path] = []
    left = [str(path)]
    while (
        left
    ):  # not os.walk, which recurses: folders may lie in each other more than a thousand deep
        folder = left.pop()
        try:
            with os.scandir(folder) as entries:
                inner = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            refuse_unreadable(error, Path(folder))
        if not os.access(folder, os.X_OK):  # its files would look like none
            raise DataError(
                f"{_shown(folder)}: may not be entered; allow it, or move the folder away"
            )
        for entry in inner:
            if entry.is_dir(follow_symlinks=False):
                left += [entry.path] if entry.name not in skip else []
            elif entry.name.endswith(suffix) and os.path.isfile(
                entry.path
            ):  # a link to a file is one
                found.append(Path(entry.path))
    return sorted(found, key=Path.as_posix)


def documents_of(
    files: Iterable[Path], field: str | None, *, longest: int = LONGEST_TEXT
) -> Iterator[Document]:
    """Each file is a document; with ``field``, that string of the JSON object in each line is one, in UTF-8.

    Empty texts and blank lines are none. Raises DataError, naming file and line, where a file cannot be read or is no
    plain one, a line is something else, or a file that is one document is larger than ``longest`` bytes.
    """
    for file in files:
        place = _shown(file)
        try:
            with open_plain(file) as content:
                if field is not None:
                    yield from _documents_of_lines(content, field, place)
                    continue
                if (size := os.fstat(content.fileno()).st_size) > longest:
                    refuse_long(place, size, longest)
                if text := content.read(longest + 1):
                    yield Document(place, text, len(text))
        except OSError as error:
            refuse_unreadable(error, file)


def _documents_of_lines(content: BinaryIO, field: str, place: str) -> Iterator[Document]:
    number = 0
    while line := content.readline(_LINE_BYTES + 1):
        number += 1
        if len(line) > _LINE_BYTES:
            raise DataError(
                f"{place}:{number}: the line is longer than {_LINE_BYTES:_} bytes, which is too much for one document; "
                "cut it into several"
            )
        if not line.isspace() and (text := _text_of(line, field, f"{place}:{number}")):
            yield Document(f"{place}:{number}", text, len(line))


def _text_of(line: bytes, field: str, place: str) -> bytes:
    try:
        entry = json.loads(line)  # not strictly: corpora of Python's have NaN beside their text
        if isinstance(entry, dict) and isinstance(entry.get(field), str):
            return entry[field].encode()
        problem = f"got {one_line(line[:800].decode(errors='replace').strip()[:200])}"
    except (
        ValueError,
        RecursionError,
    ) as error:  # also half a surrogate pair, numbers of thousands of digits
        problem = one_line(str(error))[:300]
    form = f'{{"{one_line(field)}": "..."}}'
    raise DataError(
        f"{place}: must be a JSON object such as {form}: {problem}; mend the line, or name the key of the text with "
        "data.field of a recipe, or --field of prepare"
    )


def refuse_end_of_document(document: Document) -> None:
    """Raises DataError where a text that is read as bytes holds the one that ends a document."""
    if (offset := document.text.find(END_OF_DOCUMENT)) >= 0:
        raise DataError(
            f"{document.place}: byte 0 at offset {offset} would end a document there; "
            "remove that byte, or take the document away if it is not text"
        )


def refuse_long(place: str, size: int, longest: int) -> NoReturn:
    """Raises DataError: one document of ``size`` bytes is too long."""
    raise DataError(
        f"{place}: one document of {size:_} bytes, which must fit into memory; use at most {longest:_}, or cut it into "
        "documents, a file or a JSONL line each"
    )


def refuse_unreadable(error: OSError, file: Path) -> NoReturn:
    raise DataError(
        f"{_shown(file)}: cannot be read: {error.strerror}; make it readable or move it away"
    ) from error


def _shown(path: str | Path) -> str:
    """A path on one line: a name may hold line breaks, and bytes that are not UTF-8."""
    return one_line(str(path))
