"""Find the missing rank when a collective fails.

The error of gloo names only a neighbour. That neighbour may have ended because of a third rank.

Every rank has a thread that looks for an alarm in the job's store. A rank whose collective failed
raises the alarm. Every running rank then reports what it does (``situation``). A rank that does
not report is dead or stopped. A rank that reports a line outside of a collective hangs there. One
rank, the speaker, collects the reports in a file. Before the alarm, a rank writes nothing to the
store but its process id, once, if one launcher has started all ranks on this machine.

On GPUs, each of these ranks also keeps what torch's flight recorder knows of its last collectives.
"""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from composer3d.facts.errors import LostPeersError, UserError
from composer3d.facts.interrupts import STOP_SIGNALS
from composer3d.runtime.lost_words import tells_lost_connection, tells_lost_peer
from composer3d.runtime.ranks import MOST_DESCRIBED, describe_several
from composer3d.runtime.situation import Situation, parse, situation_of, situation_of_error

T = TypeVar("T")

GRACE_S = 5.0  # how long a running rank may take to answer an alarm

# Writes the text of a report, and returns the path of its file, or None if it could not be written.
WriteReport = Callable[[str], str | None]

# Writes the last collectives of this rank, and returns the path of their file, or None if there is
# none. The argument is the time of the alarm, for the name: the same on all ranks.
WriteTrace = Callable[[str], str | None]


class _FirstError(NamedTuple):
    """The error with which a collective failed on a rank.

    Attributes:
        time_s: seconds since 1970, by the clock of the rank's machine.
        text: the class and the first line.
    """

    time_s: float
    text: str


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective or the store timed out or lost a connection.

    The causes and contexts of ``error`` are searched too.
    """
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, dist.DistNetworkError | dist.DistStoreError):
            return True
        text = str(current)
        if isinstance(current, dist.DistError) and tells_lost_connection(text):
            return True
        if isinstance(current, RuntimeError) and tells_lost_peer(text):
            return True
        current = current.__cause__ or current.__context__
    return False


class PeerWatch:
    """A context that turns the failure of a collective into an error with the missing ranks.

    A thread answers the alarms of other ranks. Create it in the main thread, whose place it
    reports.

    Args:
        store: a client of the job's store for this object alone, because its thread uses it.
        rank: the rank of this process.
        size: the number of ranks; with one, nothing is done.
        describe: returns the description of a rank for an error.
        advice: returns the end of the error's line: what the user should do next.
        write_report: keeps the report of all ranks; None keeps none.
        store_host: what holds the store, such as "rank 0", for the error of a store that is gone.
        is_first_of_node: whether this rank reports for its node that the store is gone.
        write_trace: keeps the last collectives of this rank; None keeps none. All ranks have it, or
            none has.
        has_launcher: whether one launcher has started all ranks, on this machine. Then nobody waits
            for the answer of a process that has ended, and the launcher tells how it ended.

    Raises:
        LostPeersError: a collective or the store failed inside the context. Which ranks have a line
            is said in ``explain``. Any other error passes unchanged.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        describe: Callable[[int], str],
        advice: Callable[[], str],
        write_report: WriteReport | None = None,
        store_host: str = "the agent of its node",
        is_first_of_node: bool = True,
        write_trace: WriteTrace | None = None,
        has_launcher: bool = False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._describe = describe
        self._advice = advice
        self._write_report = write_report
        self._store_host = store_host
        self._is_first_of_node = is_first_of_node
        self._write_trace = write_trace
        self._has_launcher = has_launcher
        self._main_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        # The polling of thousands of ranks must not keep the store busy.
        self._every_s = max(1.0, size / 500)
        self._thread = threading.Thread(target=self._answer_alarm, daemon=True, name="peers")

    def __enter__(self) -> "PeerWatch":
        if self._size > 1:
            if self._has_launcher:
                self._store.set(f"process/{self._rank}", str(os.getpid()))
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._size == 1:
            return
        try:
            if not isinstance(error, Exception) or isinstance(error, UserError):
                return
            if is_lost_peer(error):
                raise self.explain(error) from error
        finally:
            self._is_over.set()
            self._thread.join(5.0)

    def _answer_alarm(self) -> None:
        with suppress(Exception):  # if the store is gone, so is the job
            while not self._is_over.wait(self._every_s):
                with self._lock:
                    if not self._store.check(["alarm"]):
                        continue
                    situation = situation_of(self._main_thread)
                    self._store.set(f"here/{self._rank}", situation.to_json())
                self._keep_trace()
                return

    def _keep_trace(self) -> None:
        """Write the last collectives of this rank, after the alarm, and tell the speaker where."""
        if self._write_trace is None:
            return
        with suppress(Exception):  # if the store is gone, nobody reads it
            with self._lock:
                moment = self._store.get("alarm").decode()
            path = None
            # The speaker waits for an answer, whatever happens to the file.
            with suppress(Exception):
                path = self._write_trace(moment)
            with self._lock:
                self._store.set(f"trace/{self._rank}", path or "")

    def explain(self, error: BaseException) -> LostPeersError:
        """Raise the alarm after a collective raised ``error``, and find the missing ranks.

        From then on, this process ignores ``STOP_SIGNALS``, and does not answer alarms.

        Returns:
            On one rank, an error with one line. It names the ranks that are missing or hang, and
            ends with the advice. On the other ranks, an error without lines. If the store is gone,
            the ranks cannot choose a speaker: then the first rank of each node has a line. If the
            launcher can name all missing ranks, there is no line.
        """
        advice = self._advice()
        # torchrun sends SIGTERM to the remaining ranks, and kills them some time later. The SIGTERM
        # must not end the search.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

        self._is_over.set()
        # If the host of the store is gone, a call to the store may never return.
        limit_s = 2 * self._every_s + 4 * GRACE_S
        found = _in_time(partial(self._search, error, advice), limit_s)
        return self._store_is_gone(advice) if found is None else found

    def _store_is_gone(self, advice: str) -> LostPeersError:
        line = f"the job's store does not answer: {self._store_host} has ended; {advice}"
        return LostPeersError(line if self._is_first_of_node else [])

    def _search(self, error: BaseException, advice: str) -> LostPeersError:
        try:
            first_error = _FirstError(time.time(), _first_line(error))
            with self._lock:
                self._store.set(f"error/{self._rank}", json.dumps(first_error))
                self._store.set(f"here/{self._rank}", situation_of_error(error).to_json())
                now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
                self._store.compare_set("alarm", "", now)
                is_speaker = self._store.add("speaker", 1) == 1
            # In a thread of its own: no wait for a GPU may delay the report.
            threading.Thread(target=self._keep_trace, daemon=True).start()
            if not is_speaker:
                self._wait_for_speaker()
                return LostPeersError([])
            situations, ended = self._collect_situations()
            finding = self._find(situations, ended, first_error.text)
            # The file system may be what hangs. The line on the console must come all the same.
            report = _in_time(
                partial(self._report, finding, situations, ended, advice), 2 * GRACE_S
            )
            with self._lock:
                self._store.set("spoken", "1")
        except Exception:
            return self._store_is_gone(advice)
        if ended and len(situations) + len(ended) == self._size:
            return LostPeersError([])
        if report is not None:
            finding += f"; what each rank did is in {report}"
        elif self._write_report is not None:
            finding += "; the report of what each rank did could not be written"
        return LostPeersError(f"{finding}; {advice}")

    def _find(self, situations: Mapping[int, Situation], ended: Sequence[int], cause: str) -> str:
        """Name the ranks that do not answer, or those that run outside of a collective."""
        absent = [rank for rank in range(self._size) if rank not in situations]
        if ended and len(ended) == len(absent):
            has = "has" if len(ended) == 1 else "have"
            return f"{describe_several(ended, self._describe)} {has} ended"
        elsewhere = {rank: found.place for rank, found in situations.items() if found.place}
        if len(absent) == 1:
            return f"{self._describe(absent[0])} does not answer: it has died, or is stopped"
        if absent:
            names = describe_several(absent, self._describe)
            return f"{names} do not answer: they have died, or are stopped"
        if elsewhere:
            shown = "; ".join(
                f"{self._describe(rank)} at {place}"
                for rank, place in list(elsewhere.items())[:MOST_DESCRIBED]
            )
            return f"a collective failed: {shown} did not join it ({cause})"
        return f"a collective failed, although all ranks are running ({cause})"

    def _report(
        self,
        finding: str,
        situations: Mapping[int, Situation],
        ended: Sequence[int],
        advice: str,
    ) -> str | None:
        """Write what all ranks did, and return the path of the file, or None."""
        if self._write_report is None:
            return None
        errors = self._collect_errors()
        traces = self._collect_traces(situations) if self._write_trace is not None else {}
        lines = [finding, advice, "", "Errors, by the clocks of the machines:"]
        for rank, error in sorted(errors.items(), key=lambda item: item[1].time_s):
            instant = datetime.fromtimestamp(error.time_s, UTC).isoformat(timespec="milliseconds")
            lines.append(f"  {instant}  {self._describe(rank)}: {error.text}")
        for rank in range(self._size):
            lines.append("")
            if rank in situations:
                lines += self._lines_of(rank, situations[rank], failed=rank in errors)
            else:
                end = "has ended" if rank in ended else "does not answer"
                lines.append(f"{self._describe(rank)} {end}")
            if traces.get(rank):
                lines.append(f"  last collectives of NCCL: {traces[rank]}")
        return self._write_report("\n".join(lines) + "\n")

    def _lines_of(self, rank: int, situation: Situation, *, failed: bool) -> list[str]:
        if failed:
            doing = f"its collective failed: {situation.waits_for}"
        elif situation.waits_for:
            doing = f"waits for {situation.waits_for}"
        else:
            doing = f"runs {situation.place or 'no line of composer3d'}"
        details = f" ({situation.details})" if situation.details else ""
        lines = [f"{self._describe(rank)} on {situation.host}: {doing}{details}"]
        for thread, stack in situation.threads.items():
            lines += [f"  {thread}:", *(f"    {line}" for line in stack)]
        return lines

    def _wait_for_speaker(self) -> None:
        """Wait until the one rank that searches, the speaker, has finished.

        A launcher ends the other ranks soon after the first one ends. So no rank may end before
        the speaker has finished.
        """
        # The speaker collects for every_s + GRACE_S, and writes its report for 2 * GRACE_S.
        deadline_s = time.monotonic() + self._every_s + 4 * GRACE_S
        while time.monotonic() < deadline_s and not self._store.check(["spoken"]):
            time.sleep(0.2)

    def _collect_situations(self) -> tuple[dict[int, Situation], list[int]]:
        """Wait for the answers to the alarm.

        Returns:
            The answers; and the ranks without an answer whose processes have ended.
        """
        deadline_s = time.monotonic() + self._every_s + GRACE_S
        waiting = set(range(self._size))
        ended: set[int] = set()
        while waiting and time.monotonic() < deadline_s:
            time.sleep(0.1)
            # In this order, a rank that answers and then ends has answered.
            ended |= {rank for rank in waiting if self._has_ended(rank)}
            with self._lock:
                answered = {rank for rank in waiting if self._store.check([f"here/{rank}"])}
            ended -= answered
            waiting -= answered | ended
        with self._lock:
            situations = {
                rank: parse(self._store.get(f"here/{rank}").decode())
                for rank in range(self._size)
                if rank not in waiting and rank not in ended
            }
        return situations, sorted(ended)

    def _has_ended(self, rank: int) -> bool:
        """Return whether the process of a rank has ended, as far as this process can know it."""
        if not self._has_launcher:
            return False
        with self._lock:
            if not self._store.check([f"process/{rank}"]):
                return False
            process = int(self._store.get(f"process/{rank}"))
        try:
            os.kill(process, 0)
        except (ProcessLookupError, PermissionError):
            # With PermissionError, another user's process has got the id meanwhile.
            return True
        return False

    def _collect_traces(self, ranks: Iterable[int]) -> dict[int, str]:
        """Wait until ``ranks`` have written their last collectives, and return the paths.

        The path is "" for a rank that could not write them. Ranks that take too long are left out.
        """
        deadline_s = time.monotonic() + GRACE_S
        waiting = set(ranks)
        found = {}
        while waiting and time.monotonic() < deadline_s:
            with self._lock:
                ready = {rank for rank in waiting if self._store.check([f"trace/{rank}"])}
                found.update({rank: self._store.get(f"trace/{rank}").decode() for rank in ready})
            waiting -= ready
            time.sleep(0.1)
        return found

    def _collect_errors(self) -> dict[int, _FirstError]:
        """Return the errors of the ranks whose collectives have failed so far."""
        with self._lock:
            return {
                rank: _FirstError(*json.loads(self._store.get(f"error/{rank}")))
                for rank in range(self._size)
                if self._store.check([f"error/{rank}"])
            }


def _in_time(function: Callable[[], T], limit_s: float) -> T | None:
    """Return the value of ``function``, or None if it fails or takes longer than ``limit_s``."""
    values: list[T] = []

    def call() -> None:
        with suppress(Exception):
            values.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    return values[0] if values else None


def _first_line(error: BaseException) -> str:
    # The error comes first, and then its notes.
    return traceback.format_exception_only(error)[0].strip().splitlines()[0]
