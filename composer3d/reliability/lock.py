"""The claim of one job on its run's folder.

Two locks hold it. The lock on the folder itself survives whatever is removed inside. The lock on the file ``lock``,
which says who holds it, serves file systems that lock no folders.
"""

import fcntl
import os
import platform
import time
import uuid
from pathlib import Path
from typing import BinaryIO

from composer3d.runtime import log
from composer3d.runtime.files import open_own
from composer3d.spec.errors import TrainingError, UserError
from composer3d.spec.files import read_plain

FILE = "lock"
_PATIENCE_S = 1.0
_LONGEST = 4096  # bytes of a note: anything longer is not ours


class Claim:
    """The claim on ``folder``, which is made where it is missing. It lasts until ``close``, or the process's end.

    Raises:
        UserError: another job has the folder.
        OSError: the folder or its lock cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._note: BinaryIO | None = None
        try:
            locked = self._lock(self._directory)
            self._note = open_own(folder / FILE)
            locked = self._lock(self._note.fileno()) or locked
            if not locked:
                log.get().warning(
                    f"{folder} is on a file system without locks: see to it that no second job uses it"
                )
            self._note.truncate(0)
            self._note.write(
                f"process {os.getpid()} on {platform.node()} (job {uuid.uuid4().hex})".encode()
            )
            self._note.flush()
            os.fsync(self._note.fileno())  # for the ranks of other nodes
            if self._replaced():
                raise UserError(
                    f"{folder} was removed or replaced while it was locked; start again"
                )
        except BaseException:
            self.close()
            raise

    def _lock(self, descriptor: int) -> bool:
        """Whether the lock was taken; False where the file system has none for this kind of file."""
        try:
            self._try(descriptor)
        except BlockingIOError:
            try:
                holder = read_note(self.folder) or "another job"
            except OSError:
                holder = "another job"
            way_out = "wait for its end, or give this run another run.name"
            raise UserError(f"{self.folder} is in use by {holder}; {way_out}") from None
        except OSError:
            return False
        return True

    def _try(self, descriptor: int) -> None:
        """Lock ``descriptor``, and try again for a moment.

        ``composer3d check`` looks at the lock by taking it, and a process that is killed keeps it until it is gone.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def is_held(self) -> bool:
        """Whether the folder is still the one that was claimed."""
        return self._directory >= 0 and not self._replaced()

    def _replaced(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._directory), os.stat(self.folder))
        except FileNotFoundError:
            return True

    def check(self) -> None:
        """Raise TrainingError where the folder is no longer the one that was claimed: another job may own it now."""
        if self._replaced():
            raise TrainingError(
                f"{self.folder} was removed or replaced while this job ran: nothing more is written there; "
                "start again, under another run.name if another job has it now"
            )

    def close(self) -> None:
        """Give the folder free."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
        if self._note is not None:
            self._note.close()


def read_note(folder: Path) -> str:
    """Who holds the folder, or held it last. Raises OSError where there is no note that can be read."""
    return read_plain(folder / FILE, limit=_LONGEST, follow_links=False).decode(errors="replace")
