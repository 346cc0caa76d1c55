"""The flags of a step: what all ranks read is what any of them has raised."""

import signal

import pytest

from composer3d.facts.flags import N_FLAGS, StepFlags
from composer3d.facts.interrupts import STOP_SIGNALS


def summed(*flags: StepFlags) -> StepFlags:
    columns = zip(*(own.pack() for own in flags), strict=True)
    return StepFlags.unpack([sum(column) for column in columns])


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_flag_of_one_rank_reaches_all(number: int) -> None:
    none = StepFlags()
    assert len(none.pack()) == N_FLAGS
    assert summed(none, none) == none
    assert summed(none, StepFlags(number), none) == StepFlags(number)
    assert summed(StepFlags(save_failed=True), StepFlags(save_is_due_by_clock=True)) == (
        0,
        True,
        True,
    )


def test_of_several_signals_the_first_of_the_list_counts() -> None:
    flags = StepFlags(signal.SIGINT), StepFlags(signal.SIGHUP), StepFlags(signal.SIGTERM)
    assert summed(*flags).stop_signal == signal.SIGTERM
    assert summed(*flags[:2]).stop_signal == signal.SIGINT
