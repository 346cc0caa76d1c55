"""Finding out who is missing when a collective fails: on gloo's word alone, it is always the neighbour that is left.

Every rank has a thread that looks for an alarm in the job's store. A rank whose collective failed raises it; every
rank that runs then says where it is. Who says nothing is dead or stopped; who says that it is not in a collective hangs
there. Nothing is written to the store before that.
"""

import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from composer3d.spec.errors import LostPeersError, UserError

LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|is closed)|timed out|time-?out|"
    r"connectFullMesh|failed to (connect|recv|send)|unexpected (eof|close)|remote process|not reach|ncclRemoteError",
    re.IGNORECASE,
)
# Other errors can speak of a time-out too: a kernel's, or a compiler's.
_COLLECTIVE = re.compile("gloo|nccl|c10d|(tcp|file|hash|prefix)store", re.IGNORECASE)
GRACE_S = 5.0  # how long a rank that runs may take to answer an alarm
# Functions in which a rank waits for others, though the wait itself is a copy from a GPU, or in a thread.
_WAITING = frozenset({"sum_over_world", "max_over_world", "result"})
_PACKAGE = str(Path(__file__).parent)


def lost_peers(error: BaseException) -> bool:
    """Whether ``error`` says that a collective, or the store, waited in vain or lost a connection."""
    current: BaseException | None = error
    while current is not None:
        text = str(current)
        is_theirs = isinstance(current, dist.DistError) or _COLLECTIVE.search(text)
        if isinstance(current, RuntimeError) and is_theirs and LOST.search(text):
            return True
        current = current.__cause__ or current.__context__
    return False


class Peers:
    """This rank's watch over the job's store. ``store`` must be a client of its own: its thread uses it."""

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, name: Callable[[int], str]
    ) -> None:
        self._store, self._rank, self._size, self._name = store, rank, size, name
        self._main = threading.current_thread().ident
        self._lock, self._over = threading.Lock(), threading.Event()
        # Thousands of ranks must not keep the store busy with looking.
        self._every_s = max(1.0, size / 500)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peers")
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        with suppress(Exception):  # the store is gone: so is the job
            while not self._over.wait(self._every_s):
                with self._lock:
                    if self._store.check(["alarm"]):
                        self._store.set(f"here/{self._rank}", self._place())
                        return

    def _place(self) -> str:
        """Where the main thread is: a line of composer3d, or "" where it is in a collective."""
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        inner = [entry for entry in stack if entry.filename.startswith(_PACKAGE)]
        waits = any(
            "torch/distributed" in entry.filename or entry.name in _WAITING for entry in stack
        )
        if not inner or waits:
            return ""
        return f"{Path(inner[-1].filename).relative_to(_PACKAGE)}:{inner[-1].lineno}"

    def explain(self, error: BaseException, *, way_out: str) -> LostPeersError:
        """Find out who is missing. One rank gets a line that names them; the others get an error without lines.

        torchrun sends SIGTERM to the ranks that are left, and waits before it kills them: that must not end this.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._over.set()
        found: list[LostPeersError] = []
        asking = threading.Thread(
            target=lambda: found.append(self._find_out(error, way_out)), daemon=True
        )
        asking.start()
        # A store whose host is gone may never answer, nor fail.
        asking.join(2 * self._every_s + 4 * GRACE_S)
        if found:
            return found[0]
        return self._no_answer(way_out)

    def _no_answer(self, way_out: str) -> LostPeersError:
        line = f"the launcher's store does not answer: the agent of its node has ended; {way_out}"
        return LostPeersError(line if self._rank == 0 else [])

    def _find_out(self, error: BaseException, way_out: str) -> LostPeersError:
        try:
            with self._lock:
                self._store.set(f"here/{self._rank}", "")
                self._store.set("alarm", "1")
                speaks = self._store.add("speaker", 1) == 1
            if not speaks:
                self._wait_for_the_speaker()
                return LostPeersError([])
            absent, elsewhere = self._ask()
            with self._lock:
                self._store.set("spoken", "1")
        except Exception:
            return self._no_answer(way_out)
        (said,) = traceback.format_exception_only(error)[-1:]
        said = said.strip().splitlines()[0]
        if absent:
            verb = (
                "does not answer: it has died, or is stopped"
                if len(absent) == 1
                else ("do not answer: they have died, or are stopped")
            )
            return LostPeersError(f"{self._names(absent)} {verb}; {way_out}")
        if elsewhere:
            where = "; ".join(
                f"{self._name(rank)} at {line}" for rank, line in list(elsewhere.items())[:8]
            )
            return LostPeersError(
                f"a collective waited in vain: {where} did not come to it ({said}); {way_out}"
            )
        return LostPeersError(f"all ranks run, but a collective failed ({said}); {way_out}")

    def _wait_for_the_speaker(self) -> None:
        """A launcher ends the others soon after the first rank that ends: the one that asks must not be among them."""
        until = time.monotonic() + self._every_s + 2 * GRACE_S
        while time.monotonic() < until and not self._store.check(["spoken"]):
            time.sleep(0.2)

    def _ask(self) -> tuple[list[int], dict[int, str]]:
        """Ranks that do not answer, and the places of those that are elsewhere than in a collective."""
        until, waiting = time.monotonic() + self._every_s + GRACE_S, set(range(self._size))
        while waiting and time.monotonic() < until:
            time.sleep(0.1)
            with self._lock:
                waiting = {rank for rank in waiting if not self._store.check([f"here/{rank}"])}
        with self._lock:
            answers = {
                rank: self._store.get(f"here/{rank}").decode()
                for rank in range(self._size)
                if rank not in waiting
            }
        return sorted(waiting), {rank: place for rank, place in answers.items() if place}

    def _names(self, ranks: list[int]) -> str:
        shown = ", ".join(map(self._name, ranks[:8]))
        return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


@contextmanager
def watched(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    name: Callable[[int], str],
    way_out: Callable[[], str],
) -> Iterator[None]:
    """Turn the failure of a collective into a LostPeersError that names who is missing.

    ``way_out`` ends its line: what a user does next.
    """
    if size == 1:
        yield
        return
    peers = Peers(store, rank=rank, size=size, name=name)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not lost_peers(error):
            raise
        raise peers.explain(error, way_out=way_out()) from error
    finally:
        peers.close()
