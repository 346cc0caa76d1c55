"""Read documents one after another: text files, and the lines of JSONL files.

The order of the documents is the same on every machine.
"""

import json
import os
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from composer3d.recipe.values import one_line
from composer3d.spec.errors import DataError
from composer3d.spec.files import open_plain

LONGEST_TEXT = 4 << 30  # bytes in a file that is one document
_LINE_BYTES = 16 << 20  # in a line of JSONL; a parsed line can take 30 times its size in memory
END_OF_DOCUMENT = 0  # the token that ends a document of bytes; token files have their own
_SHOWN_CHARACTERS = 200  # characters of a line in a message


class Document(NamedTuple):
    """One document.

    Attributes:
        place: how messages name the document, such as ``a.txt`` or ``b.jsonl:7``.
        text: the bytes of the text.
        size: the number of bytes of the file or the JSONL line that holds the document.
    """

    place: str
    text: bytes
    size: int


def list_files(path: Path, suffix: str = "", skip: Container[str] = ()) -> list[Path]:
    """Return the files below the folder ``path``, in the order of their relative paths.

    Hidden files and hidden folders are skipped, as are links to folders, and anything that is not a
    plain file, such as a pipe or a device. A link to a file counts as a file.

    Args:
        path: a folder. If it is not a folder, it is the only file returned.
        suffix: only files whose names end with it are returned, in capitals or not.
        skip: names of folders that are skipped.

    Raises:
        DataError: a folder cannot be read.
    """
    if not os.path.isdir(path):
        return [path]
    files: list[Path] = []
    # os.walk would recurse, and folders may be nested more than a thousand deep.
    pending = [str(path)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
        except OSError as error:
            refuse_unreadable(error, Path(folder))
        # Without this check, a folder that may be listed but not entered would seem to be empty.
        if not os.access(folder, os.X_OK):
            raise DataError(
                f"{_shown(folder)}: may not be entered; allow it, or move the folder away"
            )
        for entry in visible:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in skip:
                    pending.append(entry.path)
            elif entry.name.lower().endswith(suffix) and os.path.isfile(entry.path):
                files.append(Path(entry.path))
    return sorted(files, key=Path.as_posix)


def read_documents(
    files: Iterable[Path], field: str | None, *, longest: int = LONGEST_TEXT
) -> Iterator[Document]:
    """Yield the documents in ``files``, in order. Empty texts and blank lines are skipped.

    Args:
        files: text files, or JSONL files if ``field`` is given.
        field: the key of the text in the JSON object on each line; the text becomes UTF-8. None:
            each file is a document, whose bytes are not changed.
        longest: the largest size, in bytes, of a file that is one document.

    Raises:
        DataError: a file cannot be read, is not a plain file or is too large; or a line is too
            long, or is not a JSON object with a text at ``field``. The message names the file and
            the line.
    """
    for file in files:
        place = _shown(file)
        try:
            with open_plain(file) as content:
                if field is not None:
                    yield from _read_lines(content, field, place)
                    continue
                size = os.fstat(content.fileno()).st_size
                if size > longest:
                    refuse_long(place, size, longest)
                text = content.read(longest + 1)
                if text:
                    yield Document(place, text, len(text))
        except OSError as error:
            refuse_unreadable(error, file)


def _read_lines(content: BinaryIO, field: str, path: str) -> Iterator[Document]:
    number = 0
    while line := content.readline(_LINE_BYTES + 1):
        number += 1
        place = f"{path}:{number}"
        if len(line) > _LINE_BYTES:
            raise DataError(
                f"{place}: the line is longer than {_LINE_BYTES:_} bytes, which is too much for "
                "one document; cut it into several"
            )
        if line.isspace():
            continue
        text = _parse_line(line, field, place)
        if text:
            yield Document(place, text, len(line))


def _parse_line(line: bytes, field: str, place: str) -> bytes:
    """Return the text in a line of JSONL. Raises DataError if there is none."""
    try:
        # The strict parser of spec.files would refuse NaN, which a corpus that Python wrote may
        # have beside the text.
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get(field), str):
            return entry[field].encode()
        # The line may be long, so it is cut before it is decoded.
        shown = line[: 4 * _SHOWN_CHARACTERS].decode(errors="replace").strip()
        problem = f"got {one_line(shown[:_SHOWN_CHARACTERS])}"
    except (ValueError, RecursionError) as error:
        # ValueError is also raised for a lone surrogate and for a number with thousands of digits.
        problem = one_line(str(error))[:300]
    example = f'{{"{one_line(field)}": "..."}}'
    raise DataError(
        f"{place}: must be a JSON object such as {example}: {problem}; correct the line, or name "
        "the key of the text with data.field of a recipe, or --field of prepare"
    )


def refuse_end_of_document(document: Document) -> None:
    """Raise DataError if a text that is read as bytes contains byte 0, which ends a document."""
    offset = document.text.find(END_OF_DOCUMENT)
    if offset >= 0:
        raise DataError(
            f"{document.place}: byte 0 at offset {offset} would end a document there; "
            "remove that byte, or remove the document if it is not text"
        )


def refuse_long(place: str, size: int, longest: int) -> NoReturn:
    """Raise DataError: one document of ``size`` bytes is longer than ``longest`` bytes."""
    raise DataError(
        f"{place}: one document has {size:_} bytes, but at most {longest:_} are read into memory; "
        "cut it into several documents, each in a file or JSONL line of its own"
    )


def refuse_unreadable(error: OSError, file: Path) -> NoReturn:
    """Raise DataError: ``file`` cannot be read, for the reason in ``error``."""
    raise DataError(
        f"{_shown(file)}: cannot be read: {error.strerror}; make it readable or move it away"
    ) from error


def _shown(path: str | Path) -> str:
    """Return a path on one line. A name may contain line breaks, and bytes that are not UTF-8."""
    return one_line(str(path))
