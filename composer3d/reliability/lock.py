"""Claim a run's folder for one job, with two locks.

The lock on the folder itself remains if files in the folder are removed. The lock on the file
``lock`` in the folder is for file systems that cannot lock folders. This file contains a note that
says which job has the folder.
"""

import fcntl
import json
import os
import platform
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from composer3d.facts.errors import TrainingError, UserError
from composer3d.facts.files import read_plain
from composer3d.runtime import log
from composer3d.runtime.files import open_own

FILE = "lock"

# Seconds for which a lock is tried again, before the folder counts as in use.
_PATIENCE_S = 1.0

# Bytes. composer3d does not write a longer note.
_NOTE_LIMIT = 4096


class Claim:
    """The claim of this process on the folder of a run.

    The constructor makes the folder if it is missing, and locks it. The claim lasts until
    ``close``, or until the process ends. Only rank 0 claims the folder of a job.

    Raises:
        UserError: another job has the folder, or the folder was replaced while it was locked.
        OSError: the folder or the file ``lock`` cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._note: BinaryIO | None = None
        try:
            folder_is_locked = self._lock(self._folder_descriptor)
            self._note = open_own(folder / FILE)
            file_is_locked = self._lock(self._note.fileno())
            if not (folder_is_locked or file_is_locked):
                log.get().warning(
                    f"{folder} is on a file system without locks: "
                    "make sure that no second job uses it"
                )
            self._write_note(self._note)
            if self._is_replaced():
                raise UserError(
                    f"{folder} was removed or replaced while it was locked; start again"
                )
        except BaseException:
            self.close()
            raise

    def _lock(self, descriptor: int) -> bool:
        """Lock ``descriptor``.

        Returns:
            False if the file system cannot lock this kind of file.

        Raises:
            UserError: another job has locked it.
        """
        try:
            _lock_patiently(descriptor)
        except BlockingIOError:
            note = ""
            with suppress(OSError):
                note = read_note(self.folder)
            # Another user may have written the note. Control characters could change the terminal.
            holder = note if note and note.isprintable() else "another job"
            raise UserError(
                f"{self.folder} is in use by {holder}; "
                "wait for its end, or give this run another run.name"
            ) from None
        except OSError:
            return False
        return True

    def _write_note(self, file: BinaryIO) -> None:
        note = f"process {os.getpid()} on {platform.node()} (job {uuid.uuid4().hex})"
        file.truncate(0)
        file.write(note.encode())
        file.flush()
        # Ranks on other nodes read the note as well.
        os.fsync(file.fileno())

    def is_held(self) -> bool:
        """Return whether the claim is open, and the folder is still the one that was claimed."""
        return self._folder_descriptor >= 0 and not self._is_replaced()

    def _is_replaced(self) -> bool:
        try:
            current = os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not os.path.samestat(os.fstat(self._folder_descriptor), current)

    def require_held(self) -> None:
        """Check that the folder is still the one that was claimed.

        Raises:
            TrainingError: it was removed or replaced, so another job may own the new folder.
        """
        if self._is_replaced():
            raise TrainingError(
                f"{self.folder} was removed or replaced while this job ran: "
                "nothing more is written there; "
                "start again, under another run.name if another job has it now"
            )

    def tell(self, path: Path) -> None:
        """Write into ``path`` which folder is claimed, for ``describe_loss``. Raises OSError."""
        found = os.fstat(self._folder_descriptor)
        told = {"folder": [found.st_dev, found.st_ino], "note": read_note(self.folder)}
        path.write_text(json.dumps(told))

    def close(self) -> None:
        """Release the folder. A second call does nothing."""
        if self._folder_descriptor >= 0:
            os.close(self._folder_descriptor)
            self._folder_descriptor = -1
        if self._note is not None:
            self._note.close()


def describe_loss(told: Path, folder: Path) -> str | None:
    """Return a line if ``folder`` is no longer the one that ``Claim.tell`` wrote into ``told``.

    None: it still is, or nothing was claimed. The number of a folder that is removed can be given
    to a new one, so the note must be the same as well.
    """
    text = told.read_text()
    if not text:
        return None
    content = json.loads(text)
    problem = "was removed, renamed or replaced while this job ran"
    try:
        current = os.stat(folder)
        if [current.st_dev, current.st_ino] == content["folder"]:
            if read_note(folder) == content["note"]:
                return None
            problem = "was taken by another job, or its file lock was removed, while this job ran"
    except OSError:
        pass
    return (
        f"{folder} {problem}: the ranks are not started again, because they would begin anew; "
        "put the folder back and start the same command, or start another run.name"
    )


def _lock_patiently(descriptor: int) -> None:
    """Lock ``descriptor``. If it is locked, try again for ``_PATIENCE_S`` seconds.

    ``composer3d check`` takes the lock for an instant to test it, and a killed process keeps its
    lock until the kernel has removed the process.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def read_note(folder: Path) -> str:
    """Read the note of the job that has the folder, or had it last.

    Raises:
        OSError: there is no readable note.
    """
    content = read_plain(folder / FILE, limit=_NOTE_LIMIT, follow_links=False)
    return content.decode(errors="replace")
