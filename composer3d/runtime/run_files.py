"""The files of a run besides its checkpoints, sent to an object store and fetched. No torch.

They stand in the run's folder, and in a few folders within it. In the store, they have the same
names in the folder that also has the run's checkpoints. What ranks print (``logs``) stays on the
disks of their nodes.
"""

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from composer3d.facts import files
from composer3d.facts.remote import RemotePath
from composer3d.recipe.schema import TRACKERS

# The disk's own: the lock of its folder, and the jobs that have written into the store from there.
_LOCK = "lock"
WRITERS = "store-writers"
# The store's own: the job that writes there.
WRITER = "writer"

# Profiles are large, and no later start reads them: they are sent, but not fetched.
_PROFILES = "profile"
_FETCHED = ("by_tokens", "timeline", *TRACKERS)

_NAME = re.compile(r"[\w=+,~-][\w.=+,~-]*", re.ASCII)
# What is fetched of a run's folder itself. A stranger may have put other files into the store.
_WANTED = re.compile(
    r"recipe(-\d{8})?\.toml|(metrics|events|bad_steps)\.jsonl|log\.txt|lost-ranks-.*\.txt"
    r"|events\.out\.tfevents\..*"
)
_LIMIT = 1 << 30  # bytes of a file that is fetched

# A folder of this name and a number keeps the files that others from the store have replaced.
_FORMER = "before-fetch"

_PIECE_BYTES = 1 << 20


class Version(NamedTuple):
    """What tells a version of a file on the disk from another."""

    size: int
    changed_ns: int


def of_disk(folder: Path) -> dict[str, Version]:
    """Return the version of each file of a run, by its path in the run's folder.

    Links are left out, and so are files that are being written. Raises OSError.
    """
    found = {}
    for within in ("", *_FETCHED, _PROFILES):
        for name in _names(folder / within):
            path = folder / within / name
            try:
                entry = path.lstat()
            except FileNotFoundError:
                continue  # removed meanwhile
            if stat.S_ISREG(entry.st_mode):
                found[path.relative_to(folder).as_posix()] = _version(entry)
    return found


def _names(folder: Path) -> list[str]:
    if folder.is_symlink() or not folder.is_dir():
        return []
    return [name for name in os.listdir(folder) if _is_sent(name)]


def _is_sent(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name not in (_LOCK, WRITERS, WRITER)


def of_store(place: RemotePath) -> dict[str, int]:
    """Return the size of each file of a run that a start needs, by its path in the run's folder.

    Raises:
        OSError: the store cannot be asked.
    """
    found = {}
    for within in ("", *_FETCHED):
        folder = place / within if within else place
        for name, size in folder.own_files().items():
            if _is_sent(name) and (within or _WANTED.fullmatch(name)):
                found[f"{within}/{name}" if within else name] = size
    return found


def send(path: Path, target: RemotePath) -> Version | None:
    """Copy one file to the store, and return the version that was sent.

    What is appended meanwhile is left for the next time. None: there is no such file any more.

    Raises:
        OSError: it cannot be read, has become shorter, or the store does not take it.
    """
    try:
        opened = files.open_plain(path, follow_links=False)
    except FileNotFoundError:
        return None
    with opened as file:
        version = _version(os.fstat(file.fileno()))
        with target.create() as upload:
            left = version.size
            while left:
                piece = file.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise OSError(errno.EIO, "became shorter while it was sent", str(path))
                upload.write(piece)
                left -= len(piece)
    return version


def _version(entry: os.stat_result) -> Version:
    return Version(entry.st_size, entry.st_mtime_ns)


def fetch(place: RemotePath, folder: Path) -> list[str]:
    """Copy the files of a run from the store into a folder on the disk.

    A file that is there already, and that is not the beginning of the new one, is kept in a new
    folder ``before-fetch-N``. If the new one is a beginning of it, nothing changes.

    Returns:
        The paths of the files that were replaced, in the folders where they are kept.

    Raises:
        FileTooLargeError: a file has more than 1 GiB.
        OSError: the store cannot be asked, or a file cannot be written.
    """
    kept = []
    former: Path | None = None
    for name, size in of_store(place).items():
        if size > _LIMIT:
            reason = f"is larger than {_LIMIT:,} bytes, the limit for a file of a run"
            raise files.FileTooLargeError(errno.EFBIG, reason, str(place / name))
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        files.refuse_foreign_link(target.parent)
        fetched = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(fetched, "xb") as file:
                file.writelines((place / name).pieces(size))
            is_there = os.path.lexists(target)
            if is_there and _begins_with(target, fetched):
                fetched.unlink()
                continue
            if is_there and not _begins_with(fetched, target):
                former = former or _new_folder(folder)
                (former / name).parent.mkdir(exist_ok=True)
                target.rename(former / name)
                kept.append(str(former / name))
            fetched.replace(target)
        except BaseException:
            fetched.unlink(missing_ok=True)
            raise
    return kept


def _begins_with(path: Path, beginning: Path) -> bool:
    """Return whether the content of one file begins with that of another.

    A link or a folder has no content, and is kept.
    """
    with ExitStack() as opened:
        try:
            file, other = (
                opened.enter_context(files.open_plain(each, follow_links=False))
                for each in (path, beginning)
            )
        except files.RefusedFileError:
            return False
        else:
            pieces: Iterator[bytes] = iter(lambda: other.read(_PIECE_BYTES), b"")
            return all(file.read(len(piece)) == piece for piece in pieces)


def _new_folder(folder: Path) -> Path:
    number = 1
    while os.path.lexists(folder / f"{_FORMER}-{number}"):
        number += 1
    new = folder / f"{_FORMER}-{number}"
    new.mkdir()
    return new
