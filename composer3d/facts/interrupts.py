"""The signals that stop a command. Ctrl-C ends it quietly, however often it comes. No torch."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The signals that ask a command to stop. Schedulers announce the end of a job by SIGTERM or
# SIGUSR1. A terminal that is closed sends SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# The exit status after SIGINT, as shells count it.
INTERRUPTED = 128 + signal.SIGINT

# A further Ctrl-C ends the process at once if it comes more than this many seconds after the first
# signal. A terminal's Ctrl-C reaches a process twice, directly and through its launcher.
INSIST_S = 5.0


def signals_to_catch() -> tuple[signal.Signals, ...]:
    """Return the stop signals that a job catches: after ``nohup``, SIGHUP stays ignored."""
    has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not has_nohup)


class Interrupts:
    """Raises KeyboardInterrupt at the first SIGINT of this process, and at no later one.

    So the clean-up that the first one begins is not interrupted. A Ctrl-C that comes more than
    ``INSIST_S`` after the first one ends the process at once.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._is_leaving = False

    def catch(self) -> None:
        """Handle SIGINT from now on, unless it is ignored, as in a job in a shell's background."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._receive)

    def leave(self) -> None:
        """Raise nothing from now on: the command is done, and the process ends soon."""
        self._is_leaving = True

    def _receive(self, number: int, frame: Any) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            if not self._is_leaving:
                raise KeyboardInterrupt
        elif now_s - self._first_s > INSIST_S:
            os._exit(INTERRUPTED)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGINT end this process at once within the context, unless it is ignored.

    It is for commands that leave nothing to clean up: a KeyboardInterrupt in the middle of an
    import, a callback or a destructor may be shown with a traceback, or be lost.
    """

    def end(number: int, frame: Any) -> None:
        os._exit(INTERRUPTED)

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        # A stop signal of the training has set its own handler, which stays.
        if signal.getsignal(signal.SIGINT) is end:
            signal.signal(signal.SIGINT, previous)
