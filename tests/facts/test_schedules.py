"""The cut into stages, compared with all cuts; numbers of micro-batches; files of schedules."""

import os
import time
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import (
    balanced_cut,
    check_csv,
    fewest_micro_batches,
    micro_batch_requirement,
    nearest_micro_batches,
    read_csv,
)
from composer3d.models.llama.shape import PRESETS
from composer3d.models.llama.table import table

COSTS = st.integers(0, 12)


def costs(ranges: list[range], first: float, blocks: list[int], last: float) -> list[float]:
    """Return the cost of each stage, counted independently."""
    sums = [float(sum(blocks[index] for index in stage)) for stage in ranges]
    sums[0] += first
    sums[-1] += last
    return sums


def every_cut(count: int, stages: int) -> list[list[range]]:
    cuts = [(0, *inner, count) for inner in combinations(range(1, count), stages - 1)]
    return [[range(a, b) for a, b in pairwise(ends)] for ends in cuts]


@given(first=COSTS, blocks=st.lists(COSTS, min_size=1, max_size=9), last=COSTS, data=st.data())
def test_no_cut_has_a_faster_slowest_stage_or_is_as_even(
    first: int, blocks: list[int], last: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    cut = balanced_cut(first, blocks, last, stages)
    assert len(cut) == stages
    assert all(len(stage) >= 1 for stage in cut)
    assert [index for stage in cut for index in stage] == list(range(len(blocks)))

    def rank(ranges: list[range]) -> tuple[int, int]:
        sums = costs(ranges, first, blocks, last)
        return max(sums), sum(cost * cost for cost in sums)

    assert rank(cut) == min(map(rank, every_cut(len(blocks), stages)))


def test_room_is_left_for_the_embedding_and_the_head() -> None:
    assert [len(stage) for stage in balanced_cut(1.0, [1.0] * 6, 1.0, 4)] == [1, 2, 2, 1]
    # The cut of the Llama 3 report, section 3.3.2: the first and the last stage have a layer less.
    shape = PRESETS["llama3-405b"]
    first, *blocks, last = (sum(row.elements for row in rows) for _, rows in table(shape).units())
    cut = balanced_cut(first / 2, blocks, last, 16)
    assert [len(stage) for stage in cut] == [7, *[8] * 14, 7]


def test_costly_block_gets_a_stage_of_its_own() -> None:
    assert balanced_cut(0, [1, 1, 9, 1, 1], 0, 3) == [range(0, 2), range(2, 3), range(3, 5)]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match=r"^2 layers cannot be cut into 3 pipeline stages; use mesh\.pp of at most 2$",
    ):
        balanced_cut(0, [1, 1], 0, 3)
    assert balanced_cut(5, [1, 1], 5, 2) == [range(0, 1), range(1, 2)]


@pytest.mark.parametrize(
    "schedule", ["1F1B", "DualPipeV", "Interleaved1F1B", "InterleavedZeroBubble"]
)
def test_the_nearest_numbers_of_micro_batches_are_those_of_a_search(schedule: str) -> None:
    for pp in range(2, 9):
        good = [
            count
            for count in range(1, 200)
            if micro_batch_requirement(schedule, count, pp, "") is None
        ]
        for count in sorted(set(range(1, 150)) - set(good)):
            below = [number for number in good if number < count][-1:]
            above = [number for number in good if number > count][:1]
            assert nearest_micro_batches(schedule, count, pp) == below + above


@pytest.mark.parametrize(
    ("schedule", "fewest"),
    [("GPipe", 2), ("1F1B", 3), ("DualPipeV", 6), ("InterleavedZeroBubble", 2)],
)
def test_the_fewest_micro_batches_of_a_schedule(schedule: str, fewest: int) -> None:
    assert fewest_micro_batches(schedule, 3) == fewest


def test_a_schedule_that_runs_one_rank_at_a_time_is_checked_in_linear_time(tmp_path: Path) -> None:
    """Every action waits for the one before it, so that only one of 300 ranks can run at a time."""
    ranks, count = 300, 100
    first = ",".join(f"0F{number},0B{number}" for number in range(count))
    rows = [first] + [
        first.replace("0F", f"{rank}F").replace("0B", f"{rank}B") for rank in range(1, ranks)
    ]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(rows))
    begin = time.process_time()
    stages = check_csv(
        read_csv(str(file)), str(file), pp=ranks, stages_per_rank=1, micro_batches=count
    )
    assert stages == [[rank] for rank in range(ranks)]
    assert time.process_time() - begin < 4


@pytest.mark.timeout(10)  # opening a pipe would wait forever
def test_a_file_of_a_schedule_is_plain_and_of_a_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        PlanError, match=r"pipe cannot be read \(is a named pipe, not a plain file\)$"
    ):
        read_csv(str(tmp_path / "pipe"))
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match=r"large cannot be read \(is larger than 4,194,304 bytes"):
        read_csv(str(tmp_path / "large"))
