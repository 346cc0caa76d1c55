"""Open text that may be compressed with gzip or zstd, without holding the text in memory.

A compressed file is untrusted: a few kilobytes can hold gigabytes. It is decompressed piece by
piece, and readers must limit what they read of it.
"""

import gzip
import io
import zlib
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

from composer3d.facts.errors import DataError
from composer3d.facts.files import COMPRESSED_SUFFIXES

# zstd writes at most 128 KiB for each 3 bytes that it reads, so a piece becomes at most 42 MiB.
_ZSTD_PIECE = 1 << 10
_ZSTD_WINDOW = 1 << 27  # bytes of history that a file may need; zstd's own limit


def text_suffix(path: PurePath) -> str:
    """Return the suffix of a file without the one of its compression, in small letters."""
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix.lower()


def is_compressed(path: PurePath) -> bool:
    """Return whether the name of a file ends in that of a compression, in any case."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES


def decompress(content: BinaryIO, path: Path) -> BinaryIO:
    """Return a stream of the text in an open file, which is ``content`` if it is not compressed.

    Reading the stream raises one of ``DAMAGE`` if the file is damaged or cut.

    Raises:
        DataError: the file needs a package that is not installed.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=content))
    if suffix == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdReader(content, _import_zstandard(path))))
    return content


def skip(stream: BinaryIO, content: BinaryIO, count: int) -> None:
    """Pass over ``count`` bytes of ``stream``, the text of ``content``, which is open at its start.

    Raises EOFError if a compressed file holds fewer bytes.
    """
    if stream is content:
        content.seek(count)
        return
    while count > 0:
        piece = stream.read(min(count, 1 << 20))
        if not piece:
            raise EOFError("it is shorter than before")
        count -= len(piece)


class _ZstdError(Exception):
    """A file is not zstd, or is damaged."""


DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, _ZstdError)


def _import_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: reading .zst needs the package zstandard; install it with "
            "pip install 'composer3d[data]', or decompress the file"
        ) from None
    return zstandard


class _ZstdReader(io.RawIOBase):
    """The text of a zstd file, which may have several frames.

    ``zstandard.stream_reader`` would take a file that is cut for a whole one.
    """

    def __init__(self, content: BinaryIO, zstandard: Any) -> None:
        self._content = content
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._frame: Any = None  # the frame that is being read; None between frames
        self._compressed = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _advance(self) -> bool:
        """Decompress the next piece. Return False at the end of the file."""
        if not self._compressed:
            self._compressed = self._content.read(_ZSTD_PIECE)
        if not self._compressed:
            if self._frame is not None:
                raise EOFError("it ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._text = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise _ZstdError(f"it is not zstd, or damaged: {error}") from None
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = None
        return True
