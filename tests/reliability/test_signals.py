"""Signals that stop a run: collected, and insistent ones obeyed at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from composer3d.facts.interrupts import INSIST_S
from composer3d.reliability.signals import stop_signals

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    previous = [signal.getsignal(number) for number in NUMBERS]
    yield
    for number, handler in zip(NUMBERS, previous, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_signals_are_collected_and_handlers_come_back(is_stopped: bool) -> None:
    numbers = NUMBERS
    previous = [signal.getsignal(number) for number in numbers]
    with stop_signals() as signals:
        # Before the first step, a signal ends the process.
        assert [signal.getsignal(number) for number in numbers] == previous
        signals.catch()
        signals.catch()
        assert signals.received == []
        # A terminal's Ctrl-C reaches a rank twice.
        sent = [signal.SIGTERM, signal.SIGINT, signal.SIGINT] if is_stopped else []
        for number in sent:
            os.kill(os.getpid(), number)
        assert signals.received == sent
    assert ([signal.getsignal(number) for number in numbers] == previous) != is_stopped
    if is_stopped:
        # The process is about to end: nothing may change its status.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


INSIST = """
import os, signal
from composer3d.reliability import signals

seconds = iter([100.0, {second_s}])
signals.time.monotonic = lambda: next(seconds)
with signals.stop_signals() as caught:
    caught.catch()
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.{second})
    print(len(caught.received))
"""


@pytest.mark.parametrize(
    ("second", "waits", "ends"),
    [("SIGINT", False, False), ("SIGINT", True, True), ("SIGTERM", True, False)],
)
def test_only_a_later_ctrl_c_ends_the_process(second: str, waits: bool, ends: bool) -> None:
    second_s = 100.0 + INSIST_S + (0.1 if waits else -0.1)
    command = [sys.executable, "-c", INSIST.format(second=second, second_s=second_s)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == (130 if ends else 0), result.stderr
    assert result.stdout == ("" if ends else "2\n")
