"""Signals that stop a run: collected, and insistent ones obeyed at once."""

import os
import signal
import subprocess
import sys

import pytest

from composer3d.reliability import signals
from composer3d.reliability.signals import stop_signals


def test_signals_are_collected_and_handlers_come_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    previous = [signal.getsignal(number) for number in numbers]
    with stop_signals() as signals:
        # Before the first step, a signal ends the process.
        assert [signal.getsignal(number) for number in numbers] == previous
        signals.catch()
        signals.catch()
        assert signals.received == []
        os.kill(os.getpid(), signal.SIGTERM)
        # A terminal's Ctrl-C reaches a rank twice.
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    assert [signal.getsignal(number) for number in numbers] == previous


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
    second_s = 100.0 + signals._INSIST_S + (0.1 if waits else -0.1)
    command = [sys.executable, "-c", INSIST.format(second=second, second_s=second_s)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == (-signal.SIGINT if ends else 0), result.stderr
    assert result.stdout == ("" if ends else "2\n")
