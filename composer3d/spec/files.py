"""Reading and writing files that someone else may have made or placed.

Every function raises OSError (its ``strerror`` is a sentence for people) or ValueError, so that a caller turns it into
an error of its own kind with the place and the way out. No torch here.
"""

import errno
import json
import os
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
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
    descriptor = _open(path, flags)
    try:
        _require_plain(descriptor, path)
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


def write_atomic(path: str | os.PathLike[str], content: bytes | str | Iterable[bytes]) -> None:
    """Replace ``path`` by a plain file with ``content``, in one piece or in several, whole or not at all.

    The content goes to a new file beside ``path``, which is synced and renamed over it. A link at ``path`` is replaced;
    nothing is ever written through it.

    Raises OSError where the folder cannot be written; ``path`` is as it was then.
    """
    target = Path(path)
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    descriptor = _open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb") as file:
            content = content.encode() if isinstance(content, str) else content
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, target)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def open_own(path: str | os.PathLike[str], *, append: bool = False) -> BinaryIO:
    """Open a plain file for reading and writing, and create it where it is missing. Links are refused, not followed.

    ``append``: every write goes to the end.

    Raises NotPlainFileError where ``path`` is a link, folder, pipe or device, and OSError where it cannot be written.
    """
    flags = (
        os.O_RDWR
        | os.O_CREAT
        | os.O_NONBLOCK
        | os.O_NOFOLLOW
        | os.O_CLOEXEC
        | (os.O_APPEND if append else 0)
    )
    descriptor = _open(path, flags)
    try:
        _require_plain(descriptor, path)
        return os.fdopen(descriptor, "a+b" if append else "r+b")
    except BaseException:
        os.close(descriptor)
        raise


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


def _open(path: str | os.PathLike[str], flags: int) -> int:
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


def _require_plain(descriptor: int, path: str | os.PathLike[str]) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotPlainFileError(errno.EINVAL, f"is {kind}, not a plain file", os.fspath(path))


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which JSON does not have")
