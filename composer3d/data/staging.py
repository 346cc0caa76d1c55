"""Copies of token files on a disk of the node, made by a thread while the run reads elsewhere.

Samples are in random order, so each file is needed as often as any other one. A cache that drops
old files for new ones would always have dropped what comes next. So files are copied in their
order until the bound is reached, and none is dropped. What has no copy is read from its folder.

The copies are in CACHE_DIR/composer3d-UID/DIGEST, where DIGEST is that of the manifest: so no copy
belongs to other tokens. Jobs on one node share them. A copy gets its name when all of it has been
compared with its digests.
"""

import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple

from composer3d.facts import token_manifest
from composer3d.facts.errors import DataError
from composer3d.facts.files import open_plain, refuse_foreign_link
from composer3d.facts.remote import RemotePath
from composer3d.facts.text import one_line
from composer3d.facts.token_manifest import TokenManifest, cut_range, digest_of, new_digest
from composer3d.runtime import log
from composer3d.runtime.files import open_own, write_atomic

_KEY = "data.cache_dir"
_LOCK = ".lock"
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")  # a copy that is not complete
_LOOK_EVERY_S = 2.0
_ASK_EVERY_S = 1.0  # for the lock
_CLOSE_S = 5.0


class NodeCopies:
    """The copies of one folder's files on this node. Threads may use it at the same time.

    Args:
        manifest: the folder.
        folder: the folder of the copies.
    """

    def __init__(self, manifest: TokenManifest, folder: Path) -> None:
        self._manifest, self._folder = manifest, folder
        self._names: frozenset[str] = frozenset()
        self._looked_s: float | None = None
        # What is wrong with the folder itself: found while it was copied.
        self._damage: DataError | None = None

    @property
    def names(self) -> list[str]:
        """The files that may have a copy, shard by shard."""
        shards = self._manifest.shards
        names = [(shard.tokens_file, shard.mask_file) for shard in shards]
        return [name for pair in names for name in pair if name is not None]

    def __contains__(self, name: str) -> bool:
        """Return whether a file has a copy. The disk is looked at now and then."""
        if name in self._names:
            return True
        now_s = time.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            try:
                self._names = frozenset(os.listdir(self._folder)) & self._manifest.files.keys()
            except OSError:
                return False  # somebody has removed the folder
        return name in self._names

    def open(self, name: str) -> BinaryIO | None:
        """Open the copy of a file; None if it has none that can be used."""
        if name not in self:
            return None
        try:
            file = open_plain(self._folder / name, follow_links=False)
        except OSError:
            self._forget(name)
            return None
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.geteuid()
        if not is_own or status.st_size != self._manifest.files[name].bytes:
            file.close()
            self._forget(name)
            return None
        return file

    def is_sound(self, name: str, number: int) -> bool:
        """Return whether a chunk of a copy has its digest. A copy that is damaged is removed."""
        file = self.open(name)
        if file is None:
            return True
        with file:
            file.seek(number * token_manifest.CHUNK_BYTES)
            content = file.read(token_manifest.CHUNK_BYTES)
        if digest_of(content) == self._manifest.files[name].digests[number]:
            return True
        (self._folder / name).unlink(missing_ok=True)
        self._forget(name)
        return False

    def make(self, name: str) -> None:
        """Copy a file. The digest of each chunk is compared before the copy gets its name.

        Raises:
            DataError: the file is damaged, missing or of another size.
            OSError: it cannot be read from its store, or the copy cannot be written.
        """
        write_atomic(self._folder / name, self._verified_parts(name))

    def _verified_parts(self, name: str) -> Iterator[bytes]:
        size, most = self._manifest.files[name].bytes, token_manifest.CHUNK_BYTES
        begins = range(0, size, most)
        chunks = [list(cut_range(begin, min(most, size - begin))) for begin in begins]
        parts = self._read_parts(name, [part for chunk in chunks for part in chunk])
        for number, chunk in enumerate(chunks):
            digest = new_digest()
            for _ in chunk:
                part = next(parts)
                digest.update(part)
                yield part
            self._manifest.check_digest(name, number, digest.hexdigest())

    def _read_parts(self, name: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        path = self._manifest.folder / name
        if isinstance(path, RemotePath):
            yield from path.read_ranges(ranges)
            return
        with self._manifest.open(name) as file:
            for _, size in ranges:
                yield file.read(size)

    def set_damage(self, damage: DataError) -> None:
        """Note what is wrong with the folder itself, for ``check``."""
        self._damage = damage

    def check(self) -> None:
        """Raise the DataError that was found while files of the folder were copied."""
        if self._damage is not None:
            raise self._damage

    def _forget(self, name: str) -> None:
        self._names -= {name}


class _FileToCopy(NamedTuple):
    copies: NodeCopies
    name: str
    bytes: int


class NodeCache:
    """The copies of token files on this node, of a bounded size, for all folders of a run.

    One process of each node makes copies, and all its processes use them.

    Args:
        folder: the folder that the user has named for copies. It is made if it is missing.
        most_bytes: the bound of all copies of this user in ``folder``, whatever job made them.
        makes_copies: whether this process makes copies.

    Raises:
        DataError: the folder cannot be used: it belongs to another user, for example.
    """

    def __init__(self, folder: Path, most_bytes: int, *, makes_copies: bool) -> None:
        self._root = folder / f"composer3d-{os.geteuid()}"
        self._most_bytes = most_bytes
        self._makes_copies = makes_copies
        self._folders: list[list[_FileToCopy]] = []
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        try:
            refuse_foreign_link(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{_KEY}: {one_line(folder)} {_reason(error)}") from None
        mode = folder.stat().st_mode
        if mode & (stat.S_IWOTH | stat.S_IWGRP) and not mode & stat.S_ISVTX:
            raise DataError(
                f"{_KEY}: others may replace files in {one_line(folder)}; take away their right to "
                "write, or set the sticky bit (chmod +t)"
            )
        _make_own_folder(self._root)

    def add(self, manifest: TokenManifest) -> NodeCopies:
        """Return the copies of a folder. ``start`` lets the missing ones be made.

        Raises:
            DataError: the folder of the copies cannot be used.
        """
        folder = self._root / manifest.digest
        _make_own_folder(folder)
        copies = NodeCopies(manifest, folder)
        self._folders.append(
            [_FileToCopy(copies, name, manifest.files[name].bytes) for name in copies.names]
        )
        return copies

    def start(self) -> None:
        """Begin to make copies in a thread, if this process makes them."""
        if self._makes_copies:
            # A daemon, so that it does not keep the process from ending. What it leaves behind is
            # removed by the next one.
            self._thread = threading.Thread(target=self._make_all, name="token files", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no more copies are made. Return False if that takes longer."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Make no further copies. Wait for the thread some seconds at most."""
        self._is_closing.set()
        self.wait(_CLOSE_S)

    def _make_all(self) -> None:
        """Make copies, in turn of each folder. This runs in the thread."""
        for tasks in zip_longest(*self._folders):
            for task in tasks:
                if task is not None and not self._make(task):
                    return

    def _make(self, task: _FileToCopy) -> bool:
        """Make a copy if it is missing. Return whether to go on."""
        try:
            _require_own_folder(self._root)  # somebody may have put another in its place
            with self._locked() as has_lock:
                if self._is_closing.is_set():
                    return False
                file = task.copies.open(task.name)
                if file is not None:
                    file.close()
                    return True
                used = self._used_bytes(may_clean=has_lock)
                if used + task.bytes > self._most_bytes:
                    log.get().info(
                        f"{self._root} has {used / 2**30:,.1f} GiB of token files, near the bound "
                        f"of {self._most_bytes / 2**30:,.1f} GiB (data.cache_gib): the others are "
                        "read where they are"
                    )
                    return False
                _make_twice(task)
        except DataError as error:
            task.copies.set_damage(error)
            return False
        except OSError as error:
            log.get().warning(
                f"{self._root}: no more token files are copied: {_reason(error)}; the others are "
                "read where they are"
            )
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the root: one job at a time copies a file. Yield whether it has one.

        Some file systems have no locks: then two jobs may copy the same file, and the last counts.
        """
        with open_own(self._root / _LOCK) as file:
            has_lock = False
            while not has_lock and not self._is_closing.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    has_lock = True
                except BlockingIOError:
                    self._is_closing.wait(_ASK_EVERY_S)
                except OSError:
                    break
            yield has_lock

    def _used_bytes(self, *, may_clean: bool) -> int:
        """Return the bytes of all copies, of other jobs too.

        What a process has left behind that was killed is removed if ``may_clean``: only who has the
        lock may have begun a copy.
        """
        used = 0
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                if may_clean and _UNFINISHED.fullmatch(name):
                    path.unlink(missing_ok=True)
                    continue
                with suppress(FileNotFoundError):  # another job may remove one that is damaged
                    used += path.lstat().st_size
        return used


def _make_twice(task: _FileToCopy) -> None:
    """Make a copy. A part that was damaged on its way is right the second time."""
    try:
        task.copies.make(task.name)
    except DataError:
        task.copies.make(task.name)


def _make_own_folder(path: Path) -> None:
    """Make a folder that nobody else may write to, or check that it is one.

    Raises DataError.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise DataError(f"{_KEY}: {one_line(path)} {_reason(error)}") from None
    _require_own_folder(path)


def _require_own_folder(path: Path) -> None:
    """Check that nobody else may write to a folder. Raises DataError."""
    try:
        status = path.lstat()
    except OSError as error:
        raise DataError(f"{_KEY}: {one_line(path)} {_reason(error)}") from None
    problem = ""
    if not stat.S_ISDIR(status.st_mode):
        problem = "is no folder, or a link to one"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to another user (uid {status.st_uid})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = "may be written to by others"
    if problem:
        raise DataError(f"{_KEY}: {one_line(path)} {problem}; remove it, or name another folder")


def _reason(error: OSError) -> str:
    words = error.strerror or str(error)
    return "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else words
