"""Pipeline schedules: torch builds what our facts say, and files that cannot run are refused."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import (
    SCHEDULES,
    check_csv,
    forward_order,
    micro_batch_requirement,
    read_csv,
    stages_of,
)
from composer3d.parallel.pipeline import runtime
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.launch import Pool

BUILT_IN = [name for name in SCHEDULES if name not in ("GPipe", "1F1B", "csv")]


class Case(NamedTuple):
    """A pipeline of ``pp`` ranks with ``per_rank`` stages each."""

    pp: int
    per_rank: int
    micro_batches: int


CASES = [
    Case(pp, per_rank, micro_batches)
    for pp, per_rank in ((2, 2), (3, 2), (4, 2), (2, 4))
    for micro_batches in range(1, 13)
]


def tables_of_torch(name: str) -> dict[Case, list[str] | None]:
    """Build the schedule for all ``CASES`` with torch, as lines of a CSV file.

    None: torch refuses the case.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        groups = {pp: dist.new_group(list(range(pp))) for pp in (2, 3, 4)}
        return {
            case: csv_lines(name, groups[case.pp], case)
            for case in CASES
            if not (SCHEDULES[name].v_shaped and case.per_rank > 2)
        }
    finally:
        dist.destroy_process_group()


def csv_lines(name: str, group: Any, case: Case) -> list[str] | None:
    """Build one schedule with torch; None: torch refuses it."""
    example = torch.empty(1, requires_grad=True)
    stages = [
        PipelineStage(
            nn.Identity(),
            stage,
            case.per_rank * case.pp,
            torch.device("cpu"),
            input_args=(example,),
            output_args=(example,),
            group=group,
        )
        for stage in stages_of(0, case.pp, case.per_rank, v_shaped=SCHEDULES[name].v_shaped)
    ]
    try:
        schedule: Any = get_schedule_class(name)(
            stages, n_microbatches=case.micro_batches, loss_fn=lambda loss, _: loss
        )
    except ValueError:
        return None
    lines = []
    for rank in range(case.pp):
        actions = schedule.pipeline_order[rank]
        lines.append(",".join("" if action is None else str(action) for action in actions))
    return lines


@pytest.mark.parametrize("name", BUILT_IN)
def test_torch_builds_the_schedules_as_our_facts_say(pool: Pool, tmp_path: Path, name: str) -> None:
    facts = SCHEDULES[name]
    tables = pool.run(tables_of_torch, {"name": name}, world_size=1)[0]
    for case, lines in tables.items():
        requirement = micro_batch_requirement(name, case.micro_batches, case.pp, "")
        assert (lines is None) == (requirement is not None), case
        if lines is None:
            continue
        file = tmp_path / f"{case.pp}-{case.per_rank}-{case.micro_batches}.csv"
        file.write_text("\n".join(lines))
        placement = check_csv(
            read_csv(str(file)),
            str(file),
            pp=case.pp,
            stages_per_rank=case.per_rank,
            micro_batches=case.micro_batches,
        )
        assert placement == [
            stages_of(rank, case.pp, case.per_rank, v_shaped=facts.v_shaped)
            for rank in range(case.pp)
        ]
        assert any("W" in line for line in lines) == facts.splits_backward


def test_every_schedule_has_a_runtime() -> None:
    assert all(
        issubclass(get_schedule_class(name), _PipelineSchedule)
        for name in SCHEDULES
        if name != "csv"
    )


@pytest.mark.parametrize("v_shaped", [False, True])
def test_forward_order_runs_every_forward_once_and_after_its_input(v_shaped: bool) -> None:
    stages_by_rank = [stages_of(rank, 3, 2, v_shaped=v_shaped) for rank in range(3)]
    for micro_batches in (1, 2, 5):
        ticks = forward_order(stages_by_rank, micro_batches)
        tick_of = {
            forward: number
            for number, tick in enumerate(ticks)
            for forward in tick
            if forward is not None
        }
        assert set(tick_of) == {
            (stage, micro_batch) for stage in range(6) for micro_batch in range(micro_batches)
        }
        n_forwards = sum(forward is not None for tick in ticks for forward in tick)
        assert n_forwards == 6 * micro_batches
        assert all(
            tick_of[stage, micro_batch] > tick_of[stage - 1, micro_batch]
            for stage, micro_batch in tick_of
            if stage
        )
        for tick in ticks:
            assert all(
                forward is None or forward[0] in own_stages
                for forward, own_stages in zip(tick, stages_by_rank, strict=True)
            )
        # At most the forwards of a rank, and the time to fill the pipeline once.
        assert len(ticks) <= 2 * micro_batches + 6


GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1I1,1W1"]
WRONG = [
    (["0F0"], 2, 1, "has 1 lines, but needs one for each of mesh.pp = 2 pipeline ranks"),
    (["0F0,0X0", "1F0,1B0"], 2, 1, ":1: '0X0' is not an action"),
    (["0F0,0B0,1F0,1B0", "2F0,2B0"], 2, 1, "must put stages 0 to 1 on 2 ranks, 1 on each"),
    (["0F0,0B0", "0F0,0B0"], 2, 1, "must put stages 0 to 1"),
    (["0F0,0B0", "1F0,1F0,1B0"], 2, 1, ":2: 1F0 comes twice"),
    (["0B0,0F0", "1F0,1B0"], 2, 1, ":1: 0B0 comes before 0F0"),
    (["0F0,0W0,0I0", "1F0,1B0"], 2, 1, ":1: 0W0 comes before 0I0"),
    (["0F0,0I0", "1F0,1B0"], 2, 1, ":1: it must have either 0B0, or both 0I0 and 0W0"),
    (["0F0,0B0,0I0,0W0", "1F0,1B0"], 2, 1, ":1: it must have either 0B0"),
    (["0F0,0B0", "1F0,1B0"], 2, 2, ":1: it must have either 0B1"),
    (["0F0,0B0,0F3", "1F0,1B0"], 2, 1, ":1: 0F3 is beyond the 1 micro-batches"),
    (["0F0,0F1,0B0,0B1", "1F0,1F1,1B1,1B0"], 2, 2, None),
    (["0F0,0B0,0F1,0B1", "1F0,1F1,1B1,1B0"], 2, 2, ":1: 0B0 waits for ever"),
    (GOOD, 2, 2, None),
    # Actions that overlap wait for the messages of all of them before any of them runs.
    (["0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,1B0,1F1,1B1"], 2, 2, None),
    (["0F0,(0F1;0B1)OVERLAP_F_B,0B0", "1F0,1B0,1F1,1B1"], 2, 2, ":1: 0B1 waits for ever"),
    (["0F0,(0F1;0B0", "1F0,1B0"], 2, 1, ":1: '(0F1;0B0' is not an action"),
    (
        ["0F0,0B0,0F0,0B0,0F0", "1F0,1B0"],
        2,
        1,
        ":1 has 5 cells, but 1 stages with 1 micro-batches need at most 4",
    ),
    (
        ["0F0,0B" + "1" * 5000, "1F0,1B0"],
        2,
        1,
        # Python cannot read such a number.
        ":1: '0B1{198}[.]{3} .*' is not an action",
    ),
]


@pytest.mark.parametrize(("lines", "size", "count", "words"), WRONG)
def test_a_schedule_that_cannot_run_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], size: int, count: int, words: str | None
) -> None:
    file = tmp_path / "own.csv"
    file.write_text("\n".join(lines) + "\n")
    rows = read_csv(str(file))
    if words is None:
        assert check_csv(rows, str(file), pp=size, stages_per_rank=1, micro_batches=count) == [
            [0],
            [1],
        ]
        return
    with pytest.raises(PlanError, match=words.replace("(", r"\(")) as caught:
        check_csv(rows, str(file), pp=size, stages_per_rank=1, micro_batches=count)
    assert str(file) in str(caught.value)


def test_a_schedule_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no/such.csv cannot be read"):
        read_csv("no/such.csv")


def test_a_schedule_with_too_few_micro_batches_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"DualPipeV has 3 micro-batches, but needs at least twice pp = 2"
    ):
        runtime.place_stages(2, ParallelTable(schedule="DualPipeV"), 3)
