"""The compiled length of a pipeline is the end of its simulation."""

import random

import pytest

from composer3d.planner.pipeline import (
    compile_cells,
    compiled,
    critical_path,
    length_s,
    zero_bubble_actions,
)
from composer3d.planner.schedule import actions
from composer3d.planner.simulate import StageTimes, simulate

SCHEDULES = [
    ("GPipe", 4, 1, 5),
    ("1F1B", 4, 1, 9),
    ("LoopedBFS", 3, 2, 4),
    ("Interleaved1F1B", 4, 3, 8),
    ("InterleavedZeroBubble", 4, 2, 8),
    ("ZBVZeroBubble", 4, 2, 9),
    ("DualPipeV", 4, 2, 10),
]


@pytest.mark.parametrize(("schedule", "pp", "virtual", "count"), SCHEDULES)
def test_length_is_that_of_the_simulation(schedule: str, pp: int, virtual: int, count: int) -> None:
    chance = random.Random(f"{schedule}{pp}")
    times = [StageTimes(*(chance.random() for _ in range(4))) for _ in range(pp * virtual)]
    sends = [0.2 * chance.random() for _ in range(pp * virtual - 1)]
    cells = actions(schedule, pp, virtual, count)
    end = max(row[-1].end_s for row in simulate(cells, times, sends))
    nodes = compile_cells(cells)
    assert length_s(nodes, times, sends) == pytest.approx(end, rel=1e-12)
    # The critical path is the same length, and predicts small changes exactly.
    path = critical_path(nodes, times, sends)
    assert path.length_s(times, sends) == pytest.approx(end, rel=1e-12)
    changed = [StageTimes(*(1.00001 * seconds for seconds in stage)) for stage in times]
    assert path.length_s(changed, sends) == pytest.approx(length_s(nodes, changed, sends), rel=1e-9)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_zero_bubble_is_complete_and_holds_what_it_may(in_flight: int) -> None:
    pp, count = 4, 12
    for rank, cells in enumerate(zero_bubble_actions(pp, count, in_flight)):
        assert sorted(str(cell[0]) for cell in cells) == sorted(
            f"{rank}{kind}{index}" for kind in "FIW" for index in range(count)
        )
        held = most = 0
        for (action,) in cells:
            held += {"F": 1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        assert most <= in_flight * pp - (in_flight - 1)


def test_more_memory_leaves_a_smaller_bubble() -> None:
    times = [StageTimes(1.0, 2.0, 1.0, 1.0)] * 4
    plain = length_s(compiled("1F1B", 4, 1, 12), times, [0.0] * 3)
    once = length_s(compiled("ZeroBubble", 4, 1, 12, 1), times, [0.0] * 3)
    twice = length_s(compiled("ZeroBubble", 4, 1, 12, 2), times, [0.0] * 3)
    assert plain == 3 * (12 + 3)
    # The paper's sections 2.2 and 3: (P-1)(F+I-W), and then nothing, as no rank waits for others.
    assert once == 3 * 12 + 3
    assert twice == 3 * 12


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_without_waiting_is_the_longest_span_of_a_rank(in_flight: int) -> None:
    chance = random.Random(in_flight)
    times = [StageTimes(*(chance.random() for _ in range(4))) for _ in range(4)]
    sends = [0.2 * chance.random() for _ in range(3)]
    rows = simulate(zero_bubble_actions(4, 9, in_flight), times, sends)
    spans = [row[-1].end_s - row[0].start_s for row in rows]
    nodes = compiled("ZeroBubble", 4, 1, 9, in_flight)
    assert length_s(nodes, times, sends) == pytest.approx(max(spans), rel=1e-12)
    assert max(spans) < max(row[-1].end_s for row in rows)
    path = critical_path(nodes, times, sends)
    assert path.length_s(times, sends) == pytest.approx(max(spans), rel=1e-12)
    changed = [StageTimes(*(1.00001 * seconds for seconds in stage)) for stage in times]
    assert path.length_s(changed, sends) == pytest.approx(length_s(nodes, changed, sends), rel=1e-9)
