"""Read documents one after another: text files, lines of JSONL files, and rows of tables.

The order of the documents is the same on every machine.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, NoReturn

from composer3d.data.compressed import DAMAGE, decompress, is_compressed, skip
from composer3d.data.example_lines import hint_of
from composer3d.data.tables import TableKind, identify_dataset, read_rows
from composer3d.facts.errors import DataError
from composer3d.facts.files import open_plain
from composer3d.facts.text import one_line

LONGEST_TEXT = 4 << 30  # bytes in a file that is one document
_LONGEST_COMPRESSED_TEXT = 256 << 20  # the same, of a file that is compressed
_LINE_BYTES = 16 << 20  # in a line of JSONL; a parsed line can take 30 times its size in memory
# The most text that a compressed file or a table may hold, in bytes for each byte of the file, and
# how much text is always allowed. Text takes 3 to 30 times its size in gzip, zstd or Parquet. The
# run lengths of a Parquet file of 2 MB can stand for 32 TB.
MAX_EXPANSION = 100
_FREE_TEXT = 64 << 20
_ROW_BYTES = 8  # that each row of a table and each line counts besides its text
END_OF_DOCUMENT = 0  # the token that ends a document of bytes; token files have their own
_SHOWN_CHARACTERS = 200  # characters of a line in a message


class Position(NamedTuple):
    """A place in a list of files, between two documents.

    Attributes:
        file: the index of the file.
        offset: bytes of its text before the place; of the decompressed text if it is compressed.
            In a table, rows before the place.
        line: lines of its text, or rows of the table, before the place.
    """

    file: int = 0
    offset: int = 0
    line: int = 0


BEGINNING = Position()


class SourceFile(NamedTuple):
    """A file and what tells whether it has changed.

    Attributes:
        path: the file, or the folder of a dataset.
        size: its size in bytes; of a dataset, that of all its files.
        modified_ns: when it was modified; of a dataset, when the newest of its files was.
        kind: what it holds: text or lines, or a table.
    """

    path: Path
    size: int
    modified_ns: int
    kind: Literal["text"] | TableKind = "text"


class Document(NamedTuple):
    """One document.

    Attributes:
        place: how messages name the document, such as ``a.txt`` or ``b.jsonl:7``.
        text: the bytes of the text.
        size: the number of bytes of the file or the JSONL line that holds the document. If the
            file is compressed, the compressed bytes that were read since the document before. Each
            row of a table has an equal part of its file.
        end: where reading goes on after the document.
    """

    place: str
    text: bytes
    size: int
    end: Position = BEGINNING


# Returns the text of a document from a line of JSONL and its place, or raises DataError.
LineParser = Callable[[bytes, str], bytes]


def list_files(
    path: Path, suffix: str | tuple[str, ...] = "", skip: Container[str] = ()
) -> list[Path]:
    """Return the files below the folder ``path``, in the order of their relative paths.

    Hidden files and hidden folders are skipped, as are links to folders, and anything that is not a
    plain file, such as a pipe or a device. A link to a file counts as a file.

    Args:
        path: a folder. If it is not a folder, it is the only file returned.
        suffix: only files whose names end with it, or with one of them, are returned, in capitals
            or not.
        skip: names of folders that are skipped.

    Raises:
        DataError: a folder cannot be read, or a link leads to no file.
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
            _refuse_unreadable(error, Path(folder))
        # Without this check, a folder that may be listed but not entered would seem to be empty.
        if not os.access(folder, os.X_OK):
            raise DataError(
                f"{one_line(folder)}: may not be entered; allow it, or move the folder away"
            )
        for entry in visible:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in skip:
                    pending.append(entry.path)
            elif entry.name.lower().endswith(suffix):
                if os.path.isfile(entry.path):
                    files.append(Path(entry.path))
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    raise DataError(
                        f"{one_line(entry.path)}: is a link that leads nowhere; restore the file "
                        "that it names, or remove the link"
                    )
    return sorted(files, key=Path.as_posix)


def read_documents(
    files: Iterable[Path | SourceFile],
    field: str | LineParser | None,
    *,
    longest: int = LONGEST_TEXT,
    start: Position = BEGINNING,
    max_expansion: int = MAX_EXPANSION,
) -> Generator[Document, None, None]:
    """Yield the documents in ``files``, in order. Empty texts and blank lines are skipped.

    Close the generator to end the process that reads a table.

    A file whose name ends with .gz or .zst is decompressed while it is read.

    Args:
        files: text files, or JSONL files and tables if ``field`` is given. A ``SourceFile`` must
            not have changed.
        field: the key of the text in the JSON object on each line, or the column of the text in a
            table; the text becomes UTF-8. Or a function that reads such a line. None: each file is
            a document, whose bytes are not changed.
        longest: the largest size, in bytes, of a file that is one document.
        start: where to begin: the ``end`` of an earlier document of the same files.
        max_expansion: the most bytes of text for each byte of a compressed file or a table that
            holds more than 64 MiB of text.

    Raises:
        DataError: a file cannot be read, expands too much, is damaged, is not a plain file, has
            changed or is too large; or a line is too long, or is not a JSON object with a text at
            ``field``. The message names the file and the line.
    """
    for number, file in enumerate(files):
        if number < start.file:
            continue
        path = file.path if isinstance(file, SourceFile) else file
        begin = start if number == start.file else Position(number)
        try:
            if isinstance(file, SourceFile) and file.kind != "text":
                assert isinstance(field, str)
                yield from _read_table(file, file.kind, field, begin, max_expansion)
                continue
            with open_plain(path) as content:
                if isinstance(file, SourceFile):
                    _require_unchanged(file, content)
                text = decompress(content, path)
                if field is not None:
                    limit = max_expansion if text is not content else None
                    yield from _read_lines(content, text, field, one_line(path), begin, limit)
                elif document := _read_text(content, text, path, longest, begin):
                    yield document
                if isinstance(file, SourceFile):
                    _require_unchanged(file, content)
        except DAMAGE as error:
            raise DataError(
                f"{one_line(path)}: cannot be decompressed: {error}; copy it again, or move it away"
            ) from None
        except OSError as error:
            _refuse_unreadable(error, path)


def _require_unchanged(file: SourceFile, content: BinaryIO | None) -> None:
    """Raise DataError if a file, which is open as ``content``, or a dataset has changed."""
    if content is None:
        identity = identify_dataset(file.path)
    else:
        status = os.fstat(content.fileno())
        identity = status.st_size, status.st_mtime_ns
    if identity != (file.size, file.modified_ns):
        raise DataError(
            f"{one_line(file.path)}: has changed since prepare began; run the same command again"
        )


def _read_text(
    content: BinaryIO, stream: BinaryIO, path: Path, longest: int, begin: Position
) -> Document | None:
    """Return the document that a text file is, or None if it is empty."""
    size = os.fstat(content.fileno()).st_size
    if is_compressed(path):
        longest = min(longest, _LONGEST_COMPRESSED_TEXT)
    elif size > longest:
        refuse_long(one_line(path), size, longest)
    text = stream.read(longest + 1)
    if len(text) > longest and is_compressed(path):
        raise DataError(
            f"{one_line(path)}: one document has more than {longest:_} bytes, but at most that "
            "many are read into memory; cut it into several documents"
        )
    if not text:
        return None
    return Document(one_line(path), text, size or len(text), Position(begin.file + 1))


def _read_lines(
    content: BinaryIO,
    stream: BinaryIO,
    field: str | LineParser,
    path: str,
    begin: Position,
    max_expansion: int | None,
) -> Iterator[Document]:
    """Yield the documents in the lines of ``stream``, the text of the file ``content``.

    ``max_expansion`` is None if the file is not compressed.
    """
    file_bytes = os.fstat(content.fileno()).st_size
    file, offset, number = begin
    skip(stream, content, offset)
    read = content.tell()  # of a compressed file, compressed bytes
    while line := stream.readline(_LINE_BYTES + 1):
        number += 1
        offset += len(line)
        if max_expansion is not None:
            _refuse_expansion(path, file_bytes, offset + _ROW_BYTES * number, max_expansion)
        place = f"{path}:{number}"
        if len(line) > _LINE_BYTES:
            raise DataError(
                f"{place}: the line is longer than {_LINE_BYTES:_} bytes, which is too much for "
                "one document; cut it into several"
            )
        if line.isspace():
            continue
        text = _parse_line(line, field, place) if isinstance(field, str) else field(line, place)
        if text:
            size = len(line)
            if stream is not content:
                size, read = content.tell() - read, content.tell()
            yield Document(place, text, size, Position(file, offset, number))


def _read_table(
    file: SourceFile, kind: TableKind, field: str, begin: Position, max_expansion: int
) -> Iterator[Document]:
    """Yield the documents in the rows of a table."""
    text_bytes = 0
    with contextlib.ExitStack() as stack:
        content = None if kind == "dataset" else stack.enter_context(open_plain(file.path))
        _require_unchanged(file, content)
        rows = read_rows(kind, file.path, content, field, first=begin.offset)
        for row in stack.enter_context(contextlib.closing(rows)):
            text_bytes += _ROW_BYTES + len(row.text)
            _refuse_expansion(one_line(file.path), file.size, text_bytes, max_expansion)
            if row.text:
                # The parts of all rows sum to the size of the file.
                size = file.size * row.number // row.of - file.size * (row.number - 1) // row.of
                end = Position(begin.file, row.number, row.number)
                yield Document(f"{one_line(file.path)} row {row.number}", row.text, size, end)
        _require_unchanged(file, content)


def _refuse_expansion(path: str, file_bytes: int, text_bytes: int, max_expansion: int) -> None:
    """Raise DataError if a file of this size may not hold so much text."""
    if text_bytes > max(_FREE_TEXT, max_expansion * file_bytes):
        raise DataError(
            f"{path}: its {file_bytes:,} bytes hold more than {text_bytes - 1:,} bytes of text, "
            f"over {max_expansion:,} times as many, as in a file that is made to fill the disk; if "
            f"you trust it, raise --max-expansion of prepare (now {max_expansion:,})"
        )


def _parse_line(line: bytes, field: str, place: str) -> bytes:
    """Return the text in a line of JSONL. Raises DataError if there is none."""
    try:
        # The strict parser of facts.files would refuse NaN, which a corpus that Python wrote may
        # have beside the text.
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get(field), str):
            return entry[field].encode()
        shown = line.decode(errors="replace").strip()
        hint = hint_of(entry) if isinstance(entry, dict) else ""
        problem = f"got {one_line(shown, _SHOWN_CHARACTERS)}{hint}"
    except (ValueError, RecursionError) as error:
        # ValueError is also raised for a lone surrogate and for a number with thousands of digits.
        problem = one_line(error, 300)
    example = f'{{"{one_line(field)}": "..."}}'
    raise DataError(
        f"{place}: must be a JSON object such as {example}: {problem}; correct the line, or name "
        "the key of the text with data.field of a recipe, or --field of prepare"
    )


def is_drawn(text: bytes, share: float, purpose: bytes) -> bool:
    """Return whether a document is in a share of all documents: by its text alone."""
    digest = hashlib.blake2b(text, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") < share * 2**64


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


def _refuse_unreadable(error: OSError, file: Path) -> NoReturn:
    """Raise DataError: ``file`` cannot be read, for the reason in ``error``."""
    raise DataError(
        f"{one_line(file)}: cannot be read: {error.strerror}; make it readable or move it away"
    ) from error


def identify(file: Path, kind: Literal["text"] | TableKind) -> SourceFile:
    """Return a file with what tells whether it changes. Raises DataError if it is unreadable."""
    try:
        if kind == "dataset":
            return SourceFile(file, *identify_dataset(file), kind)
        status = file.stat()
    except OSError as error:
        _refuse_unreadable(error, file)
    return SourceFile(file, status.st_size, status.st_mtime_ns, kind)
