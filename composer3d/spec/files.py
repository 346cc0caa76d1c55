"""Reading files that someone else may have made or placed. No torch here.

Every function raises OSError (its ``strerror`` is a sentence for people) or ValueError, so that a caller
can turn it into an error of its own kind, with the place and the way out.
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
    """A file that is not read or written, because of what it is. As text: its path, and what it is."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class NotPlainFileError(RefusedFileError):
    """The path is a folder, named pipe, socket, device or (where links are refused) a link."""


class FileTooLargeError(RefusedFileError):
    """The file is larger than anything of its kind should be."""


def open_plain(path: str | os.PathLike[str], *, follow_links: bool = True) -> BinaryIO:
    """Open a plain file for reading. Never waits: opening a named pipe would block until somebody writes.

    Args:
        path: the file. A NUL byte or a lone surrogate in it raises ValueError.
        follow_links: whether the last component of ``path`` may be a symbolic link.

    Raises:
        NotPlainFileError: ``path`` is something else than a plain file.
        OSError: it is missing or cannot be read.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = open_descriptor(path, flags)
    try:
        require_plain(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str], *, limit: int, follow_links: bool = True) -> bytes:
    """Read a whole plain file of at most ``limit`` bytes.

    Raises:
        FileTooLargeError: the file is larger. Nothing of it is read then.
        OSError: as ``open_plain``.
    """
    with open_plain(path, follow_links=follow_links) as file:
        content = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
        if content is None or len(content) > limit:  # a file can grow, and those of /proc say 0
            raise FileTooLargeError(
                errno.EFBIG,
                f"is larger than {limit:,} bytes, the limit for such a file",
                os.fspath(path),
            )
        return content


def read_json(path: str | os.PathLike[str], *, limit: int = MIB, follow_links: bool = True) -> Any:
    """Parse a whole JSON file of at most ``limit`` bytes.

    Raises:
        ValueError: it is not JSON in UTF-8, nests too deep, or holds NaN, Infinity or numbers of thousands of digits.
        OSError: as ``read_plain``.
    """
    return parse_json(read_plain(path, limit=limit, follow_links=follow_links))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: ValueError where it nests too deep, or holds what JSON does not (NaN, Infinity)."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def refuse_foreign_link(path: str | os.PathLike[str]) -> None:
    """Accept a symbolic link only where root or the user of this process made it, as Linux does in /tmp.

    Raises NotPlainFileError where ``path`` is a link of another user: what is written below it would go elsewhere.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        problem = f"is a symbolic link of another user (uid {found.st_uid}), which is not followed; remove it"
        raise NotPlainFileError(errno.ELOOP, problem, os.fspath(path))


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW and os.path.islink(path):
            problem = "is a symbolic link, which is not followed here"
            raise NotPlainFileError(errno.ELOOP, problem, os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a named pipe nobody reads, or a socket
            raise NotPlainFileError(
                errno.ENXIO, "is a named pipe or a socket, not a plain file", os.fspath(path)
            ) from None
        raise


def require_plain(descriptor: int, path: str | os.PathLike[str]) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotPlainFileError(errno.EINVAL, f"is {kind}, not a plain file", os.fspath(path))


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which JSON does not have")
