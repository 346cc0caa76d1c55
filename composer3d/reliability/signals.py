"""Let SIGTERM, SIGINT and SIGUSR1 end the training loop after the current step or the next."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.runtime import log

# The signals that end the loop. If ranks get different ones, the first of these counts. Schedulers
# announce the end of a job by SIGTERM or SIGUSR1.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# A terminal's Ctrl-C reaches a rank twice, directly and through the launcher. So a signal counts as
# a second request only if it arrives more than this many seconds after the first one.
_INSIST_S = 5.0


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Catch ``STOP_SIGNALS``, and collect their numbers in the list that is yielded.

    The training loop reads the list before each step. A signal that arrives more than 5 s after
    the first one ends the process at once. The previous handlers are restored on exit. Enter this
    context in the main thread, because no other thread can set handlers.
    """
    received: list[int] = []
    first_s = 0.0

    def receive(number: int, frame: Any) -> None:
        nonlocal first_s
        received.append(number)
        if len(received) == 1:
            first_s = time.monotonic()
            log.get().info(
                f"signal {number}: ending after this step or the next; again in "
                f"{_INSIST_S:.0f} s or later to end at once"
            )
        elif time.monotonic() - first_s > _INSIST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    previous_handlers = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
