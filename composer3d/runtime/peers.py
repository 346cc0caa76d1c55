"""Find the missing rank when a collective fails.

The error of gloo names only a neighbour. That neighbour may have ended because of a third rank.

Every rank has a thread that looks for an alarm in the job's store. A rank whose collective failed
raises the alarm. Every running rank then reports which line its main thread runs. A rank that does
not report is dead or stopped. A rank that reports a line outside of a collective hangs there.
Nothing is written to the store before the alarm.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from composer3d.spec.errors import LostPeersError, UserError

GRACE_S = 5.0  # how long a running rank may take to answer an alarm

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|is closed)|"
    r"timed out|time-?out|connectFullMesh|failed to (connect|recv|send)|unexpected (eof|close)|"
    r"remote process|not reach|ncclRemoteError",
    re.IGNORECASE,
)

# The error of a kernel or a compiler can mention a time-out too. These words identify the error of
# a collective.
_COLLECTIVE = re.compile("gloo|nccl|c10d|(tcp|file|hash|prefix)store", re.IGNORECASE)

# Functions in which a rank waits for other ranks, but without a frame of torch.distributed: the
# wait is a copy from a GPU, or the collective runs in another thread.
_WAITING = frozenset({"sum_over_world", "await_values", "result"})

_PACKAGE = str(Path(__file__).parents[1])

# An error names at most this many ranks.
_NAMED_RANKS = 8


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective or the store timed out or lost a connection.

    The causes and contexts of ``error`` are searched too.
    """
    current: BaseException | None = error
    while current is not None:
        text = str(current)
        is_collective = isinstance(current, dist.DistError) or _COLLECTIVE.search(text)
        if isinstance(current, RuntimeError) and is_collective and _LOST_CONNECTION.search(text):
            return True
        current = current.__cause__ or current.__context__
    return False


class PeerWatch:
    """Answers the alarms of other ranks in a thread, and raises an alarm in ``explain``.

    Create it in the main thread, whose place it reports.

    Args:
        store: a client of the job's store for this object alone, because its thread uses it.
        rank: the rank of this process.
        size: the number of ranks.
        describe: returns the description of a rank for an error.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, describe: Callable[[int], str]
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._describe = describe
        self._main_thread = threading.current_thread().ident
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        # The polling of thousands of ranks must not keep the store busy.
        self._every_s = max(1.0, size / 500)
        self._thread = threading.Thread(target=self._answer_alarm, daemon=True, name="peers")
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait for it for at most 5 s."""
        self._is_over.set()
        self._thread.join(5.0)

    def _answer_alarm(self) -> None:
        with suppress(Exception):  # if the store is gone, so is the job
            while not self._is_over.wait(self._every_s):
                with self._lock:
                    if self._store.check(["alarm"]):
                        self._store.set(f"here/{self._rank}", self._main_thread_place())
                        return

    def _main_thread_place(self) -> str:
        """Return the line of composer3d that the main thread runs; "" inside of a collective."""
        frame = sys._current_frames().get(self._main_thread or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        own_lines = [entry for entry in stack if entry.filename.startswith(_PACKAGE + os.sep)]
        is_waiting = any(
            "torch/distributed" in entry.filename or entry.name in _WAITING for entry in stack
        )
        if is_waiting or not own_lines:
            return ""
        innermost = own_lines[-1]
        return f"{Path(innermost.filename).relative_to(_PACKAGE)}:{innermost.lineno}"

    def explain(self, error: BaseException, *, advice: str) -> LostPeersError:
        """Raise the alarm after a collective raised ``error``, and find the missing ranks.

        From then on, this process ignores SIGTERM, SIGINT and SIGUSR1, and does not answer alarms.

        Returns:
            On one rank, an error with one line. It names the ranks that are missing or hang, and
            ends with ``advice``. On the other ranks, an error without lines.
        """
        # torchrun sends SIGTERM to the remaining ranks, and kills them some time later. The SIGTERM
        # must not end the search.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

        self._is_over.set()
        explanations: list[LostPeersError] = []

        def search() -> None:
            explanations.append(self._search(error, advice))

        # If the host of the store is gone, a call to the store may never return. So the search has
        # a thread of its own.
        thread = threading.Thread(target=search, daemon=True)
        thread.start()
        thread.join(2 * self._every_s + 4 * GRACE_S)
        return explanations[0] if explanations else self._store_is_gone(advice)

    def _store_is_gone(self, advice: str) -> LostPeersError:
        line = f"the launcher's store does not answer: the agent of its node has ended; {advice}"
        return LostPeersError(line if self._rank == 0 else [])

    def _search(self, error: BaseException, advice: str) -> LostPeersError:
        try:
            with self._lock:
                self._store.set(f"here/{self._rank}", "")
                self._store.set("alarm", "1")
                is_speaker = self._store.add("speaker", 1) == 1
            if not is_speaker:
                self._wait_for_speaker()
                return LostPeersError([])
            places = self._collect_places()
            with self._lock:
                self._store.set("spoken", "1")
        except Exception:
            return self._store_is_gone(advice)
        absent = [rank for rank in range(self._size) if rank not in places]
        elsewhere = {rank: place for rank, place in places.items() if place}

        # The error comes first, and then its notes.
        cause = traceback.format_exception_only(error)[0].strip().splitlines()[0]
        if len(absent) == 1:
            line = f"{self._describe(absent[0])} does not answer: it has died, or is stopped"
        elif absent:
            line = f"{self._describe_all(absent)} do not answer: they have died, or are stopped"
        elif elsewhere:
            shown = "; ".join(
                f"{self._describe(rank)} at {place}"
                for rank, place in list(elsewhere.items())[:_NAMED_RANKS]
            )
            line = f"a collective failed: {shown} did not join it ({cause})"
        else:
            line = f"a collective failed, although all ranks are running ({cause})"
        return LostPeersError(f"{line}; {advice}")

    def _wait_for_speaker(self) -> None:
        """Wait until the one rank that searches, the speaker, has finished.

        A launcher ends the other ranks soon after the first one ends. So no rank may end before
        the speaker has finished.
        """
        deadline_s = time.monotonic() + self._every_s + 2 * GRACE_S
        while time.monotonic() < deadline_s and not self._store.check(["spoken"]):
            time.sleep(0.2)

    def _collect_places(self) -> dict[int, str]:
        """Wait for the answers to the alarm, and return the place that each rank reported.

        A place is "" in a collective. Ranks that do not answer are left out.
        """
        deadline_s = time.monotonic() + self._every_s + GRACE_S
        waiting = set(range(self._size))
        while waiting and time.monotonic() < deadline_s:
            time.sleep(0.1)
            with self._lock:
                waiting = {rank for rank in waiting if not self._store.check([f"here/{rank}"])}
        with self._lock:
            return {
                rank: self._store.get(f"here/{rank}").decode()
                for rank in range(self._size)
                if rank not in waiting
            }

    def _describe_all(self, ranks: Sequence[int]) -> str:
        shown = ", ".join(self._describe(rank) for rank in ranks[:_NAMED_RANKS])
        hidden = len(ranks) - _NAMED_RANKS
        return f"{shown} and {hidden} more" if hidden > 0 else shown


@contextmanager
def explain_lost_peers(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    describe: Callable[[int], str],
    advice: Callable[[], str],
) -> Iterator[None]:
    """Turn the failure of a collective into a LostPeersError that names the missing ranks.

    Args:
        store: a client of the job's store for this context alone, because a thread uses it.
        rank: the rank of this process.
        size: the number of ranks; with one, nothing is done.
        describe: returns the description of a rank.
        advice: returns the end of the error's line: what the user should do next.

    Raises:
        LostPeersError: a collective or the store failed inside the context. The error has a line
            on one rank only. Any other error passes unchanged.
    """
    if size == 1:
        yield
        return
    watch = PeerWatch(store, rank=rank, size=size, describe=describe)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_lost_peer(error):
            raise
        raise watch.explain(error, advice=advice()) from error
    finally:
        watch.close()
