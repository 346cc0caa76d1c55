"""Messages of a pipeline wait for no other: torch's own schedules, by the rules of NCCL."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from composer3d.facts.schedules import SCHEDULES
from composer3d.models.contract import Parts
from composer3d.parallel.executor import StepShape
from composer3d.parallel.pipeline import runtime
from composer3d.parallel.pipeline.neighbours import Route, rounds_of_neighbours
from composer3d.parallel.pipeline.runtime import Pipeline, place_stages
from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import fake_world
from tests.parallel.pipeline.nccl import Action, Batch, Message, Step, StuckError, Wait, length_of
from tests.parallel.pipeline.test_runtime import Case, tables_of_torch

LENGTHS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
LATENCY = 0.005  # of a message, in forwards of all stages of a rank
MOST_WAIT = 1.02  # of the time with independent messages


class _Stage(Parts):
    """A stage; the last one returns a loss."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.is_last = is_last

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        out = self.linear(input.float())
        return out.sum() if self.is_last else out


class _Recorder:
    """Records what the host of a rank does in a step."""

    def __init__(self, per_rank: int, pp_group: dist.ProcessGroup) -> None:
        self.step: list[Batch | Wait | Action] = []
        self._per_rank = per_rank
        self._numbers: Counter[tuple[bool, int, str]] = Counter()
        self._pp_group = pp_group

    def launch(self, operations: list[dist.P2POp], desc: str | None = None) -> list[Wait]:
        messages = []
        for operation in operations:
            key = operation.op is dist.isend, operation.peer, self._name_of(operation.group)
            messages.append(Message(*key, self._numbers[key]))
            self._numbers[key] += 1
        self.step.append(Batch(tuple(messages)))
        return [Wait(tuple(messages))] if messages else []

    def _name_of(self, group: dist.ProcessGroup) -> str:
        """Name a group as its other ranks do: in a fake world, each counts groups for itself."""
        ranks = dist.get_process_group_ranks(group)
        return f"{ranks} of the mesh" if group is self._pp_group else str(ranks)

    def wait(self, works: list[Wait]) -> None:
        self.step += works

    def around(self, name: str) -> Any:
        if name[-1].isdigit():
            kind = next(letter for letter in name if letter.isalpha())
            self.step.append(Action(name, LENGTHS[kind] / self._per_rank))
        return nullcontext()


@contextmanager
def _recorded(recorder: _Recorder, pipeline: Pipeline) -> Iterator[None]:
    # The vote on whether shapes are static, before the first step: all ranks say yes. Since torch
    # 2.15 it is an all-reduce, which the fake world answers, and these methods are gone.
    say_yes = partial(mock.patch.object, PipelineStage, return_value=torch.ones(1), create=True)
    with (
        pipeline.around_actions(recorder.around),
        say_yes("_warmup_forward_vote"),
        say_yes("_warmup_backward_result"),
        mock.patch.object(torch_schedules, "_batch_p2p", recorder.launch),
        mock.patch.object(torch_schedules, "_wait_batch_p2p", recorder.wait),
    ):
        yield


def steps_of(parallel: ParallelTable, pp: int, micro_batches: int) -> dict[int, Step]:
    """What the host of each rank does in a step, recorded from torch's runtime."""
    steps: dict[int, Step] = {}
    for rank in range(pp):
        with fake_world(rank, pp):
            mesh = Mesh.build(MeshTable(pp=pp, dp_shard=1), torch.device("cpu"))
            placement = place_stages(pp, parallel, micro_batches)
            own = placement.stages[rank]
            last = max(max(held) for held in placement.stages)
            pipeline = Pipeline(
                [_Stage(is_last=stage == last) for stage in own],
                [None] * len(own),
                mesh,
                parallel,
                placement,
                StepShape(micro_batch=1, micro_batches=micro_batches, seq_len=2),
                torch.empty(1, 2, device="meta"),
            )
            tokens = torch.ones(micro_batches, 2, dtype=torch.int64)
            recorder = _Recorder(len(own), mesh.pp_group)
            with _recorded(recorder, pipeline):
                pipeline.forward_backward(tokens, {"labels_BT": tokens}, torch.ones(()))
            steps[rank] = recorder.step
    return steps


CASES = [
    (name, pp, per_rank, micro_batches)
    for name, schedule in SCHEDULES.items()
    if name != "csv"
    for pp in (2, 4, 8)
    for per_rank in ((1,) if name in ("GPipe", "1F1B") else (2,) if schedule.v_shaped else (2, 8))
    for micro_batches in ((pp, 2 * pp, 4 * pp) if pp == 4 and per_rank < 8 else (2 * pp,))
    if pp * per_rank <= 32
    if not (name == "DualPipeV" and micro_batches == pp)
]


def parallel_of(name: str, per_rank: int, **keys: Any) -> ParallelTable:
    return ParallelTable(schedule=name, virtual_stages=per_rank, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "pp", "per_rank", "micro_batches"), CASES)
def test_messages_wait_for_no_other(name: str, pp: int, per_rank: int, micro_batches: int) -> None:
    steps = steps_of(parallel_of(name, per_rank), pp, micro_batches)
    independent = length_of(steps, LATENCY, "one a message")
    assert length_of(steps, LATENCY) <= MOST_WAIT * independent


@pytest.mark.parametrize("v_shaped", [False, True])
def test_messages_of_a_file_wait_for_no_other(tmp_path: Path, *, v_shaped: bool) -> None:
    """The actions of a file are as those of a schedule of torch on 4 ranks."""
    name = "ZBVZeroBubble" if v_shaped else "InterleavedZeroBubble"
    path = tmp_path / "schedule.csv"
    rows = tables_of_torch(name)[Case(4, 2, 8)]
    assert rows is not None
    path.write_text("\n".join(rows))
    steps = steps_of(parallel_of("csv", 2, schedule_csv=str(path)), 4, 8)
    assert length_of(steps, LATENCY) <= MOST_WAIT * length_of(steps, LATENCY, "one a message")


@pytest.mark.parametrize(
    ("name", "pp", "per_rank", "micro_batches", "more"),
    [("Interleaved1F1B", 4, 8, 8, 0.438), ("DualPipeV", 4, 2, 16, 0.385), ("1F1B", 4, 1, 8, 0.0)],
)
def test_over_one_group_they_would_wait(
    name: str, pp: int, per_rank: int, micro_batches: int, more: float
) -> None:
    """What another emulator of the same rules has found for torch's own groups."""
    steps = steps_of(parallel_of(name, per_rank), pp, micro_batches)
    waiting = length_of(steps, LATENCY, "one a pipeline")
    assert waiting / length_of(steps, LATENCY, "one a message") - 1 == pytest.approx(more, abs=1e-3)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    first, second = (Message(sends=False, peer=peer, group="", number=0) for peer in (1, 0))
    steps = {
        rank: [
            Batch((receive,)),
            Wait((receive,)),
            Action("0F0", 1.0),
            Batch((receive._replace(sends=True),)),
        ]
        for rank, receive in enumerate((first, second))
    }
    with pytest.raises(StuckError, match="rank 0 at 0F0, rank 1 at 0F0"):
        length_of(steps, LATENCY)


@pytest.mark.parametrize(
    ("stages", "rounds"),
    [
        ([[0], [1], [2], [3]], [[(0, 1), (2, 3)], [(1, 2)]]),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]),
        ([[0, 3], [1, 4], [2, 5]], [[(0, 1)], [(0, 2)], [(1, 2)]]),
        ([[0, 5], [1, 4], [2, 3]], [[(0, 1)], [(1, 2)]]),
        ([[0, 1], [2, 3]], [[(0, 1)]]),
    ],
)
def test_a_round_has_each_rank_once(
    stages: list[list[int]], rounds: list[list[tuple[int, int]]]
) -> None:
    assert rounds_of_neighbours(stages) == rounds


def test_a_message_over_the_group_of_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = runtime.form_routes

    def swapped(*arguments: Any) -> dict[Route, dist.ProcessGroup]:
        routes = right(*arguments)
        return dict(zip(routes, reversed(routes.values()), strict=True))

    monkeypatch.setattr(runtime, "form_routes", swapped)
    try:
        with pytest.raises(ValueError, match="is not part of group"):
            steps_of(parallel_of("1F1B", 1), 3, 4)
    finally:
        # After an error, a fake world leaves its group to the end of the process.
        dist.destroy_process_group()
