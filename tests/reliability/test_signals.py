"""Signals that stop a run: collected, and insistent ones obeyed at once."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from composer3d.facts.interrupts import INSIST_S
from composer3d.reliability import signals
from composer3d.reliability.signals import stop_signals
from composer3d.runtime.launch import run_ranks

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
    with stop_signals() as caught:
        # Before the first step, a signal ends the process.
        assert [signal.getsignal(number) for number in numbers] == previous
        caught.catch()
        caught.catch()
        assert caught.received == []
        # A terminal's Ctrl-C reaches a rank twice.
        sent = [signal.SIGTERM, signal.SIGINT, signal.SIGINT] if is_stopped else []
        for number in sent:
            os.kill(os.getpid(), number)
        assert caught.received == sent
    assert ([signal.getsignal(number) for number in numbers] == previous) != is_stopped
    if is_stopped:
        # The process is about to end: nothing may change its status.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def be_stopped_twice(second: int, second_s: float) -> int:
    """As a rank, return how many signals have come."""
    seconds = iter([100.0, second_s])
    signals.time = SimpleNamespace(monotonic=lambda: next(seconds))  # type: ignore[assignment]
    with stop_signals() as caught:
        caught.catch()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), second)
        return len(caught.received)


@pytest.mark.parametrize(
    ("second", "waits", "ends"),
    [
        (signal.SIGINT, False, False),
        (signal.SIGINT, True, True),
        (signal.SIGTERM, True, False),
    ],
)
def test_only_a_later_ctrl_c_ends_the_process(second: int, waits: bool, ends: bool) -> None:
    second_s = 100.0 + INSIST_S + (0.1 if waits else -0.1)
    arguments = {"second": second, "second_s": second_s}
    result = run_ranks(be_stopped_twice, arguments, processes=1)
    assert (result.status, result.died) == ((1, {0: -130}) if ends else (2, {}))
