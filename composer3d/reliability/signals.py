"""Let a stop signal end the training loop after the current step or the next."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.facts.flags import StepFlags
from composer3d.facts.interrupts import INSIST_S, signals_to_catch
from composer3d.runtime import log, process_group


class StopSignals:
    """The stop signals that this process has received since ``catch``.

    Attributes:
        received: their numbers, in the order of their arrival.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first_s = 0.0
        self._previous_handlers: dict[int, Any] = {}

    @property
    def first(self) -> int:
        """The number of the first signal; 0 for none."""
        return self.received[0] if self.received else 0

    def agree(self) -> int:
        """Return the signal that asks to stop, the same on all ranks; 0 for none.

        Collective over all ranks: one all-reduce in host memory.
        """
        own = StepFlags(self.first).pack()
        return StepFlags.unpack(process_group.max_over_ranks(own)).stop_signal

    def catch(self) -> None:
        """Collect stop signals from now on. A second call does nothing.

        Call it in the main thread, because no other thread can set handlers.
        """
        if not self._previous_handlers:
            self._previous_handlers = {
                number: signal.signal(number, self._receive) for number in signals_to_catch()
            }

    def release(self) -> None:
        """Restore the handlers that were there before ``catch``, unless a signal has come.

        Then this process is about to end. A further signal must not change how.
        """
        if self.received:
            return
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _receive(self, number: int, frame: Any) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self._first_s = time.monotonic()
            log.say_from_handler(
                f"signal {number}: ending after this step or the next; Ctrl-C in "
                f"{INSIST_S:.0f} s or later ends at once"
            )
        elif number == signal.SIGINT and time.monotonic() - self._first_s > INSIST_S:
            os._exit(128 + number)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Yield the ``StopSignals`` of a training loop. The handlers are released on exit.

    The loop calls ``catch`` after its first step: before that, there is nothing to save, and a
    signal ends the process at once, even while a block is compiled. Then the loop reads
    ``received`` at the end of each step.

    Schedulers send several signals: SIGUSR1, then SIGTERM, then SIGKILL. So a second SIGTERM or
    SIGUSR1 changes nothing, and a save that the first one caused goes on. A user who wants to wait
    no longer presses Ctrl-C again: a SIGINT more than 5 s after the first signal ends the process
    at once. A save that is cut off by it leaves the checkpoints before it whole.
    """
    signals = StopSignals()
    try:
        yield signals
    finally:
        signals.release()
