"""Reading files that someone else may have made or placed. No torch here.

Every function raises OSError or ValueError, so that a caller can turn it into an error of its own
kind, with the place and what to change. The ``strerror`` of an OSError is text for people.
"""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO

from composer3d.facts.bounds import MOST_DEPTH, check_values
from composer3d.facts.text import in_quotes, shorten

MIB = 1 << 20
# Suffixes of text that may be compressed, with gzip and zstd, and of the JSONL in a folder.
COMPRESSED_SUFFIXES = (".gz", ".zst")
JSONL_SUFFIXES = (".jsonl", *(f".jsonl{suffix}" for suffix in COMPRESSED_SUFFIXES))
_MOST_DIGITS = 38  # of an integer in JSON; ``bounds`` allows no more bits
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RefusedFileError(OSError):
    """A file is refused because of its type or size. ``str()`` gives its path and the reason."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class NotPlainFileError(RefusedFileError):
    """The path is a folder, a named pipe, a socket, a device or a link that may not be followed."""


class FileTooLargeError(RefusedFileError):
    """The file is larger than anything of its kind should be."""


def is_jsonl_name(path: str | os.PathLike[str]) -> bool:
    """Return whether the name of a file is that of JSONL, compressed or not, in any case."""
    return os.fspath(path).lower().endswith(JSONL_SUFFIXES)


def open_plain(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Open a plain file for reading in binary mode, without blocking.

    Opening a named pipe in the usual way would block until somebody writes to it.

    Args:
        path: the file.
        follow_links: whether the last component of ``path`` may be a symbolic link.

    Raises:
        NotPlainFileError: ``path`` is not a plain file.
        OSError: the file is missing or cannot be read.
        ValueError: ``path`` contains a NUL byte or a lone surrogate.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = open_descriptor(path, flags)
    try:
        require_plain(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    # fdopen closes the descriptor itself if it fails or is interrupted. A second close would fail,
    # and its OSError would hide the KeyboardInterrupt.
    return os.fdopen(descriptor, "rb")


def read_plain(path: str | os.PathLike[str], *, limit: int, follow_links: bool = True) -> bytes:
    """Read a whole plain file of at most ``limit`` bytes.

    Raises:
        FileTooLargeError: the file is larger than ``limit``. At most ``limit`` + 1 bytes of it have
            been read.
        OSError: as ``open_plain``.
        ValueError: as ``open_plain``.
    """
    with open_plain(path, follow_links=follow_links) as file:
        content = b""
        is_too_large = os.fstat(file.fileno()).st_size > limit
        if not is_too_large:
            # Read one byte more: the file may have grown, and files in /proc have size 0.
            content = file.read(limit + 1)
            is_too_large = len(content) > limit
        if is_too_large:
            raise FileTooLargeError(
                errno.EFBIG,
                f"is larger than {limit:,} bytes, the limit for such a file",
                os.fspath(path),
            )
        return content


def read_json(path: str | os.PathLike[str], *, limit: int = MIB, follow_links: bool = True) -> Any:
    """Read and parse a JSON file of at most ``limit`` bytes.

    Raises:
        ValueError: as ``parse_json`` or ``open_plain``.
        OSError: as ``read_plain``.
    """
    return parse_json(read_plain(path, limit=limit, follow_links=follow_links))


def parse_json(
    text: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Parse JSON strictly. Every JSON text from outside is read here, but for those of a corpus.

    Args:
        text: the text. Bytes may be UTF-8, UTF-16 or UTF-32.
        object_pairs_hook: makes the value of an object from its keys and values. It may return a
            list of them. None: a dict, and no two keys may be equal.

    Raises:
        ValueError: the text is not JSON or not UTF-8, nests deeper than 100 levels, has an object
            with two equal keys, or contains NaN, Infinity, a number beyond the range of a float, an
            integer of more than 128 bits or half of a surrogate pair.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
            object_pairs_hook=object_pairs_hook or _unique,
        )
    except RecursionError:
        raise ValueError("it nests too deep") from None
    # Few texts have so many brackets or such an escape, and need a second pass.
    if text.count("[") + text.count("{") > MOST_DEPTH or _SURROGATE.search(text):
        check_values(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Of two equal keys, one reader takes the first value and another the last.

    So a file that has been checked here could mean something else to whoever reads it next.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {in_quotes(key, 80)} twice")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which JSON does not have")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"it holds {shorten(text, 40)}, which is beyond the range of a float")
    return value


def _bounded(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it holds an integer of {len(text):,} digits")
    return int(text)


def refuse_foreign_link(path: str | os.PathLike[str]) -> None:
    """Refuse a symbolic link unless root or this user owns it, as Linux does in /tmp.

    The owner of a link decides where files below it are written. A path that does not exist, or is
    not a link, is accepted.

    Raises:
        NotPlainFileError: ``path`` is a link of another user.
        OSError: ``path`` cannot be examined.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise NotPlainFileError(
            errno.ELOOP,
            f"is a symbolic link of another user (uid {status.st_uid}), which is not followed; "
            "remove it",
            os.fspath(path),
        )


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file descriptor. If the path is not a file, the error names its type.

    A file that ``flags`` create gets the mode 0o666, less the umask.

    Raises:
        NotPlainFileError: ``path`` is a link and ``flags`` has O_NOFOLLOW, or it is a named pipe
            or a socket that cannot be opened.
        OSError: any other failure.
    """
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW and os.path.islink(path):
            raise NotPlainFileError(
                errno.ELOOP, "is a symbolic link, which is not followed here", os.fspath(path)
            ) from None
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads, or a socket
            raise NotPlainFileError(
                errno.ENXIO, "is a named pipe or a socket, not a plain file", os.fspath(path)
            ) from None
        raise


def require_plain(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raise NotPlainFileError, which names ``path``, if the descriptor is not a plain file."""
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotPlainFileError(errno.EINVAL, f"is {kind}, not a plain file", os.fspath(path))
