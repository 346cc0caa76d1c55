"""Writing files whole or not at all, and never through a link that someone else has placed.

Every function raises OSError, whose ``strerror`` is a sentence for people.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from composer3d.spec.files import open_descriptor, require_plain


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], content: bytes | str | Iterable[bytes]) -> None:
    """Replace ``path`` by a plain file with ``content``, in one piece or in several, whole or not at all.

    The content goes to a new file beside ``path``, which is synced and renamed over it. A link at ``path`` is replaced;
    nothing is ever written through it.

    Raises OSError where the folder cannot be written; ``path`` is as it was then.
    """
    target = Path(path)
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    descriptor = open_descriptor(
        staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    )
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
    descriptor = open_descriptor(path, flags)
    try:
        require_plain(descriptor, path)
        return os.fdopen(descriptor, "a+b" if append else "r+b")
    except BaseException:
        os.close(descriptor)
        raise
