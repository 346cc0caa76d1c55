"""Signals that stop a run: collected, and insistent ones obeyed at once."""

import os
import signal
import subprocess
import sys

import pytest

from composer3d.reliability import signals
from composer3d.reliability.signals import stop_signals


def test_signals_are_collected_and_handlers_come_back() -> None:
    previous = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with stop_signals() as received:
        assert received == []
        os.kill(os.getpid(), signal.SIGTERM)
        # A terminal's Ctrl-C reaches a rank twice.
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == previous


INSIST = """
import os, signal
from composer3d.reliability import signals

seconds = iter([100.0, {second_s}])
signals.time.monotonic = lambda: next(seconds)
with signals.stop_signals() as received:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print(len(received))
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_later_signal_ends_the_process(waits: bool) -> None:
    second_s = 100.0 + signals._INSIST_S + (0.1 if waits else -0.1)
    command = [sys.executable, "-c", INSIST.format(second_s=second_s)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == (-signal.SIGTERM if waits else 0), result.stderr
    assert result.stdout == ("" if waits else "2\n")
