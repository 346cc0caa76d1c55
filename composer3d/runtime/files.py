"""Write files whole or not at all, and never through a link that somebody else has placed.

Every function raises OSError. Its ``strerror`` states the reason in words that a user can read.
"""

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from composer3d.facts.files import open_descriptor, require_plain

# Stands in the first bytes of each picture and page, of SVG or HTML. By it ``replace_own`` knows an
# earlier one from a file of the user.
OWN_MARK = "<!-- made by composer3d -->"
_FIRST_BYTES = 100


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(staging: Path, final: Path) -> None:
    """Give a finished file or folder its final name, and wait until that name is on the disk.

    Args:
        staging: a file or folder beside ``final``. Its content must already be synced. Otherwise a
            power failure could leave something incomplete under the final name.
        final: the new path. A file replaces an existing file; a folder needs a path that does not
            exist yet.
    """
    staging.rename(final)
    sync(final.parent)


def write_atomic(path: str | os.PathLike[str], content: bytes | str | Iterable[bytes]) -> None:
    """Replace ``path`` by a plain file with ``content``, whole or not at all.

    The content goes to a new file beside ``path``. That file is synced, then renamed to ``path``.
    If ``path`` is a link, the link itself is replaced; nothing is ever written through it. The
    folder is not synced: after a power failure, ``path`` has the old or the new content. Call
    ``sync`` on the folder if the new content must survive.

    Args:
        path: the file to replace or create.
        content: the whole content, or an iterable of its pieces. Text is encoded as UTF-8.

    Raises:
        OSError: the new file cannot be written. ``path`` is unchanged, also if the iterable raises.
    """
    if isinstance(content, str):
        content = content.encode()
    staging, descriptor = _create_staging(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def _create_staging(path: str | os.PathLike[str]) -> tuple[Path, int]:
    """Create a file beside ``path``, and return its path and its open descriptor."""
    target = Path(path)
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return staging, open_descriptor(staging, flags)


def replace_own(path: str | os.PathLike[str], text: str) -> None:
    """Write a file whole or not at all, in place of none but an empty one or one of ours.

    Args:
        path: the file.
        text: its content, with ``OWN_MARK`` in the first bytes.

    Raises:
        OSError: the file cannot be written, or another one of the name is there.
    """
    assert OWN_MARK in text[:_FIRST_BYTES]
    _require_own(path)
    write_atomic(path, text)


def require_replaceable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if ``replace_own`` would do so now. A file beside ``path`` comes and goes."""
    _require_own(path)
    staging, descriptor = _create_staging(path)
    os.close(descriptor)
    staging.unlink()


def _require_own(path: str | os.PathLike[str]) -> None:
    """Raise OSError if something else is there than an empty file or one with ``OWN_MARK``."""
    if not os.path.lexists(path):
        return
    if os.path.isfile(path):
        with open(path, "rb") as file:
            beginning = file.read(_FIRST_BYTES)
        if not beginning or OWN_MARK.encode() in beginning:
            return
    raise OSError(errno.EEXIST, "another file of this name is there")


def open_own(path: str | os.PathLike[str], *, append: bool = False) -> BinaryIO:
    """Open a plain file for reading and writing, and create it if it is missing.

    Args:
        path: the file. A link is refused, not followed.
        append: whether every write goes to the end of the file.

    Returns:
        The open binary file, at its beginning, or at its end with ``append``.

    Raises:
        NotPlainFileError: ``path`` is a link, folder, pipe or device.
        OSError: ``path`` cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    if append:
        flags |= os.O_APPEND
    descriptor = open_descriptor(path, flags)
    try:
        require_plain(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    # fdopen closes the descriptor itself if it fails or is interrupted. A second close would fail,
    # and its OSError would hide the KeyboardInterrupt.
    return os.fdopen(descriptor, "a+b" if append else "r+b")


def append_whole(
    path: str | os.PathLike[str], content: bytes, *, begins_line: bool = False
) -> None:
    """Add ``content`` to the end of a file, whole or not at all; a missing file is created.

    Args:
        path: the file.
        content: the bytes to add.
        begins_line: whether ``content`` must begin a line. A line break is added before it if the
            last line of the file was cut off.

    Raises OSError, for example on a full disk.
    """
    with open_own(path, append=True) as file:
        descriptor = file.fileno()
        end = os.fstat(descriptor).st_size
        if begins_line and end and os.pread(descriptor, 1, end - 1) != b"\n":
            content = b"\n" + content
        # Bypass the file's buffer: closing the file would write the rest of a cut line.
        if os.write(descriptor, content) < len(content):
            os.ftruncate(descriptor, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class LineFile:
    """A file that gets lines while a job runs. A disk that is full for a while does not end it.

    Several threads may add lines.

    Lines that cannot be written are lost. Two messages say so: one at the first lost line, and one
    with their number as soon as a line can be written again.

    Args:
        path: the file; a missing one is created. A link is not followed.
        tell: is called with each message.
        may_write: returns whether the file still belongs to this process. If not, nothing is done.
            An OSError of it counts as one of the file.
    """

    def __init__(
        self, path: Path, tell: Callable[[str], None], may_write: Callable[[], bool]
    ) -> None:
        self._path = path
        self._tell = tell
        self._may_write = may_write
        self._lost_lines = 0
        # A signal's handler adds a line while its thread may be adding another one.
        self._lock = threading.RLock()

    def append(self, lines: bytes) -> bool:
        """Add whole lines to the file, and return whether they were written."""
        n_lines = lines.count(b"\n")
        lost_before = self._lost_lines
        try:
            if not self._may_write():
                return False
            with self._lock:
                append_whole(self._path, lines, begins_line=True)
        except OSError as error:
            # First, because ``tell`` may write to this file.
            self._lost_lines += n_lines
            if not lost_before:
                reason = error.strerror or error
                self._tell(f"{self._path} cannot be written: {reason}; lines are lost until it can")
            return False
        self._lost_lines = 0
        if lost_before:
            self._tell(f"{self._path} can be written again; lines lost before this: {lost_before}")
        return True
