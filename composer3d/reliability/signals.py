"""SIGTERM and SIGINT: the loop ends after the current step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from composer3d.runtime import log

# A terminal's Ctrl-C reaches a rank twice, directly and through the launcher. Only a signal this
# long after the first one is a second request.
_INSIST_S = 5.0


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the numbers of the SIGTERM and SIGINT that arrive; the loop looks between two steps.

    A signal 5 s or more after the first one ends the process at once.
    """
    received: list[int] = []
    first_s = 0.0

    def receive(number: int, frame: Any) -> None:
        nonlocal first_s
        received.append(number)
        if len(received) == 1:
            first_s = time.monotonic()
            log.get().info(
                f"signal {number}: ending this step; again in {_INSIST_S:.0f} s or later to end at "
                "once"
            )
        elif time.monotonic() - first_s > _INSIST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
