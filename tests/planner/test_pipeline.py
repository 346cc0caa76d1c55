"""The compiled length of a pipeline is the end of its simulation."""

import random

import pytest

from composer3d.planner.pipeline import compile_cells, critical_path, length_s
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
