"""Reading files that someone else may have made or placed. No torch here.

Every function raises OSError or ValueError, so that a caller can turn it into an error of its own
kind, with the place and what to change. The ``strerror`` of an OSError is text for people.
"""

import errno
import json
import os
import stat
from typing import Any, BinaryIO

MIB = 1 << 20
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


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: the names NaN and Infinity are refused.

    Bytes may be UTF-8, UTF-16 or UTF-32. A number beyond the range of a float, such as 1e999,
    becomes infinity.

    Raises:
        ValueError: the text is not JSON, nests too deep, or contains NaN, Infinity or an integer
            with thousands of digits.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deep") from None


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


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which JSON does not have")
