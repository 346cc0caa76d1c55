"""The action lists of schedules are those that torch builds and runs, action by action."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import SCHEDULES, Action, parse_csv, stages_of
from composer3d.planner.schedule import actions, keeps_gradients_of_loss, recipe_actions
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.launch import Pool
from tools.prove.paths import ROOT

BUILT_IN = [name for name in SCHEDULES if name != "csv"]
MOST_RANKS = 8


class Case(NamedTuple):
    """A pipeline of ``pp`` ranks with ``per_rank`` stages each."""

    pp: int
    per_rank: int
    micro_batches: int


def cases_of(name: str) -> list[Case]:
    """Return pipelines of 2 to 8 ranks, with few micro-batches and with many."""
    stages = SCHEDULES[name].stages
    return [
        Case(pp, per_rank, micro_batches)
        for pp in (2, 3, 4, 8)
        for per_rank in range(stages.least_per_rank, min(stages.most_per_rank, 3) + 1)
        for micro_batches in (*range(1, 8), *range(2 * pp - 1, 2 * pp + 4), 3 * pp, 4 * pp + 1)
    ]


def rows_of_torch(name: str) -> dict[Case, list[list[str]] | None]:
    """Build the schedule for all cases with torch, as rows of a CSV file; None: torch refuses."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MOST_RANKS)
    try:
        groups = {pp: dist.new_group(list(range(pp))) for pp in range(2, MOST_RANKS + 1)}
        rows = run_order if issubclass(get_schedule_class(name), PipelineScheduleSingle) else built
        return {case: rows(name, groups[case.pp], case) for case in cases_of(name)}
    finally:
        dist.destroy_process_group()


def stage_of_torch(stage: int, case: Case, group: Any) -> Any:
    example = torch.empty(1, requires_grad=True)
    return PipelineStage(
        nn.Identity(),
        stage,
        case.per_rank * case.pp,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=group,
    )


def built(name: str, group: Any, case: Case) -> list[list[str]] | None:
    """The order that a schedule with several stages on a rank builds, for its runtime to run."""
    chosen: Any = get_schedule_class(name)
    # Without the sends and receives, which take most of the time to build.
    without_messages = type(name, (chosen,), {"_prepare_schedule_with_comms": lambda *_: None})
    held = stages_of(0, case.pp, case.per_rank, v_shaped=SCHEDULES[name].v_shaped)
    stages = [stage_of_torch(stage, case, group) for stage in held]
    try:
        schedule = without_messages(stages, n_microbatches=case.micro_batches)
    except ValueError:
        return None
    return [
        [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        for rank in range(case.pp)
    ]


def run_order(name: str, group: Any, case: Case) -> list[list[str]] | None:
    """The order in which a schedule with one stage on a rank calls its stage."""
    rows = []
    for rank in range(case.pp):
        stage = stage_of_torch(rank, case, group)
        row: list[str] = []

        def record(kind: str, index: int, rank: int = rank, row: list[str] = row) -> None:
            row.append(f"{rank}{kind}{index}")

        stage.forward_one_chunk = lambda index, *_, **__: record("F", index)
        stage.backward_one_chunk = lambda index, **_: record("B", index)
        stage.perform_reduce_grad = lambda _: None
        for receive_or_send in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            setattr(stage, f"get_{receive_or_send}_ops", lambda _: [])
        chosen: Any = get_schedule_class(name)
        try:
            schedule = chosen(stage, n_microbatches=case.micro_batches)
        except ValueError:
            return None
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches()
        rows.append(row)
    return rows


@pytest.mark.parametrize("name", BUILT_IN)
def test_actions_are_those_of_torch(pool: Pool, name: str) -> None:
    n_compared = 0
    for case, rows in pool.run(rows_of_torch, {"name": name}, world_size=1)[0].items():
        if rows is None:
            with pytest.raises(PlanError, match=f"{name} has {case.micro_batches} micro-batches"):
                actions(name, *case)
            continue
        pp, per_rank, micro_batches = case
        expected = parse_csv(
            rows, name, pp=pp, stages_per_rank=per_rank, micro_batches=micro_batches
        )
        assert actions(name, *case) == expected, case
        n_compared += 1
    assert n_compared >= 20


def test_actions_of_a_recipe_are_those_of_its_schedule(tmp_path: Path) -> None:
    by_name = recipe_actions(4, ParallelTable(schedule="DualPipeV"), 8)
    assert by_name == actions("DualPipeV", 4, 2, 8)
    assert recipe_actions(1, ParallelTable(schedule="DualPipeV"), 2) == [
        [(Action(0, kind, index),) for index in (0, 1) for kind in "FB"]
    ]
    file = tmp_path / "own.csv"
    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1I0,1W0,1F1,1B1\n")
    rows = recipe_actions(2, ParallelTable(schedule="csv", schedule_csv=str(file)), 2)
    assert rows[0][1] == (Action(0, "F", 1), Action(0, "B", 0))
    assert [action for (action,) in rows[1]][1:3] == [Action(1, "I", 0), Action(1, "W", 0)]


def test_the_recipe_with_a_file_has_its_actions() -> None:
    file = str(ROOT / "recipes" / "zb-h1-2x4.csv")
    rows = recipe_actions(2, ParallelTable(schedule="csv", schedule_csv=file), 4)
    # The last rank has one whole backward.
    assert [len(row) for row in rows] == [12, 11]
    assert rows[1][-2:] == [(Action(1, "B", 3),), (Action(1, "W", 2),)]


@pytest.mark.parametrize(
    ("schedule", "numbers", "words"),
    [
        ("1F2B", (2, 1, 4), "the schedule '1F2B' has no rule; the schedules are GPipe, 1F1B,"),
        ("csv", (2, 1, 4), "the schedule 'csv' has no rule"),
        ("1F1B", (2, 2, 4), "1F1B cannot have 2 stages on a rank; use 1$"),
        ("Interleaved1F1B", (2, 1, 4), "cannot have 1 stages on a rank; use 2 or more"),
        ("GPipe", (2, 1, 0), "GPipe has 2 pipeline ranks and 0 micro-batches; use at least one"),
        ("1F1B", (4, 1, 3), "1F1B has 3 micro-batches, but needs at least pp = 4"),
    ],
)
def test_schedules_that_cannot_run_are_refused(
    schedule: str, numbers: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        actions(schedule, *numbers)


@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("GPipe", False),
        ("1F1B", True),
        ("LoopedBFS", False),
        ("Interleaved1F1B", True),
        ("InterleavedZeroBubble", True),
        ("ZBVZeroBubble", True),
        ("DualPipeV", True),
    ],
)
def test_gradients_of_the_loss_are_kept_if_it_waits_for_no_other(name: str, *, keeps: bool) -> None:
    stages = SCHEDULES[name].stages.least_per_rank
    parallel = ParallelTable(schedule=name, virtual_stages=stages)  # type: ignore[arg-type]
    assert keeps_gradients_of_loss(4, parallel, 8) == keeps
    assert keeps_gradients_of_loss(1, parallel, 8)
