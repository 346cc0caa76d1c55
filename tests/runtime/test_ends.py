"""How ranks ended, in words."""

import signal

import pytest

from composer3d.recipe.schema import MeshTable
from composer3d.runtime.ends import (
    DIED,
    describe_died,
    describe_end,
    describe_left,
    is_no_answer,
    no_answer,
)

MESH = MeshTable(dp_shard=16)


@pytest.mark.parametrize(
    ("end", "processes", "words"),
    [
        (signal.SIGSEGV, 1, "was ended by signal 11 (SIGSEGV)"),
        (signal.SIGTERM, 2, "were ended by signal 15 (SIGTERM)"),
        (signal.SIGRTMIN + 1, 1, f"was ended by signal {signal.SIGRTMIN + 1} (a real-time signal)"),
        (-4, 2, "ended with status 4"),
        (0, 1, "ended with status 0"),
        (
            signal.SIGKILL,
            1,
            "was ended by signal 9 (SIGKILL; the kernel often sends it when memory runs out: see "
            "dmesg)",
        ),
    ],
)
def test_an_end_is_a_signal_or_a_status(end: int, processes: int, words: str) -> None:
    assert describe_end(end, processes) == words


def test_ranks_that_ended_in_one_way_have_one_line() -> None:
    ends = {3: 11, 0: -4, 1: 11}
    assert describe_died(ends, MESH) == [
        "rank 0 (pp0 dp0 cp0 tp0) ended with status 4",
        "rank 1 (pp0 dp1 cp0 tp0), rank 3 (pp0 dp3 cp0 tp0) were ended by signal 11 (SIGSEGV)",
    ]
    (line,) = describe_died(dict.fromkeys(range(11), 11), MESH)
    assert "rank 7 (pp0 dp7 cp0 tp0) and 3 more were ended by signal 11" in line


def test_ranks_that_left_the_others() -> None:
    assert describe_left({0: 0, 1: -2}, MESH) == [
        "rank 0 (pp0 dp0 cp0 tp0) ended before the others",
        "rank 1 (pp0 dp1 cp0 tp0) ended with status 2 before the others",
    ]


def test_the_lack_of_an_answer_is_recognised() -> None:
    assert no_answer(3.0) == "no answer after 3 s"
    assert is_no_answer(no_answer(3.0))
    assert not is_no_answer(DIED)
