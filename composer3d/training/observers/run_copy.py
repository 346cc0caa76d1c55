"""Copies the files of a run to the object store that has its checkpoints, while the run goes on.

Files are appended to on the disk, because an object cannot be: a thread sends each one whole when
it has changed. The metrics of a step are there about a minute later.
"""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from composer3d.checkpoint.folders import RemoteFolder, job_note
from composer3d.facts.errors import TrainingError, reason_in_one_line
from composer3d.facts.files import MIB, read_plain
from composer3d.facts.remote import RemotePath
from composer3d.runtime import log, run_files
from composer3d.runtime.files import write_atomic
from composer3d.training.observers.observer import Observer

# Seconds between two rounds, and how much longer a pause is than the round before it.
_PERIOD_S = 60.0
_PAUSE_FOR_ROUND = 20.0

# Seconds that the last round may take: a job that must leave its machine often gets 30.
_END_S = 25.0


class RunCopy(Observer):
    """The copy of a run's folder in an object store. Only rank 0 has one. It runs no collective.

    A failure does not end the run: two messages say when the copy is behind, and when it is not any
    more. If another job has begun to write there, nothing more is sent.

    Args:
        folder: the run's folder on the disk, which this job has claimed.
        place: the folder in the store.
    """

    def __init__(self, folder: Path, place: RemotePath) -> None:
        self._folder, self._place = folder, place
        self._store = RemoteFolder(place)
        self._former: str | None = None  # who wrote into the store before this job
        self._sent: dict[str, run_files.Version] = {}
        self._is_behind = self._is_lost = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-copy", daemon=True)

    def fetch(self) -> None:
        """Bring the files of the run from the store, if a job on another disk wrote them last.

        Call it before anything reads or writes files of the run.

        Raises:
            OSError: the store cannot be asked, or a file cannot be written.
        """
        self._former = self._writer()
        if self._former is None or self._former in self._own_writers():
            return
        kept = run_files.fetch(self._place, self._folder)
        if kept:
            log.get().warning(
                f"{self._place} was written from another disk last: its files of the run replace "
                f"those in {self._folder}; what differed is kept in {Path(kept[0]).parent}"
            )

    def begin(self) -> None:
        """Note on the disk that this job will have written last. Call it before the store's claim.

        A job that is killed between the two is found in the note, and so is the one before it.

        Raises:
            OSError: the note cannot be written, or another job has begun since ``fetch``.
        """
        if self._writer() != self._former:
            reason = "another job has begun to write there since this one began: start again"
            raise OSError(errno.EBUSY, reason, str(self._place))
        writers = [job_note().decode()]
        if self._former is not None:
            writers.append(self._former)
        write_atomic(self._folder / run_files.WRITERS, "\n".join(writers) + "\n")

    def start(self) -> None:
        """Send the files from now on. Call it after the store's claim."""
        self._thread.start()

    def close(self) -> None:
        """Send what has changed last, for at most 25 seconds."""
        if self._thread.ident is None:
            return  # it was never started
        self._ends.set()
        self._thread.join(_END_S)
        if self._thread.is_alive() or self._is_behind:
            log.get().warning(
                f"{self._place} lacks the newest lines of the run: the next start on this disk "
                f"sends them from {self._folder}, unless another job has written there"
            )

    def _writer(self) -> str | None:
        """Return who writes into the store, or None if nobody has. Raises OSError."""
        try:
            return self._store.owner()
        except FileNotFoundError:
            return None

    def _own_writers(self) -> list[str]:
        try:
            content = read_plain(self._folder / run_files.WRITERS, limit=MIB, follow_links=False)
        except OSError:
            return []
        return content.decode(errors="replace").splitlines()

    def _run(self) -> None:
        is_last = False
        pause_s = _PERIOD_S
        while not (is_last or self._is_lost):
            is_last = self._ends.wait(pause_s)
            begin_s = time.monotonic()
            self._send()
            pause_s = max(_PERIOD_S, _PAUSE_FOR_ROUND * (time.monotonic() - begin_s))

    def _send(self) -> None:
        """Send the files that have changed since they were sent, as far as possible."""
        try:
            problems = list(self._send_changed())
        except TrainingError as error:
            self._is_lost = True
            log.get().warning("\n".join(error.lines))
            return
        except Exception as error:
            # Nothing that happens here may end the thread: nobody would see it.
            problems = [reason_in_one_line(error)]
        if bool(problems) == self._is_behind:
            return
        self._is_behind = bool(problems)
        words = "has the files of the run again"
        if problems:
            words = f"does not get all files of the run: {problems[0]}; they are sent when it can"
        log.get().warning(f"{self._place} {words}")

    def _send_changed(self) -> Iterator[str]:
        """Send what has changed, and yield why a file was not sent. Raises TrainingError."""
        self._store.require_own()
        for name, version in run_files.of_disk(self._folder).items():
            if self._sent.get(name) == version:
                continue
            try:
                # Again: a large file takes minutes, and another job may begin meanwhile.
                self._store.require_own()
                sent = run_files.send(self._folder / name, self._place / name)
            except OSError as error:
                yield f"{error.filename or name} {error.strerror or error}"
            else:
                if sent is not None:
                    self._sent[name] = sent
