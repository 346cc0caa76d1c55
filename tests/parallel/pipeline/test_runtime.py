"""Schedules: torch's own tables against our facts and our check of files, weight gradients put off, and followers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule, get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.parallel.pipeline import runtime as pp
from composer3d.parallel.pipeline import zero_bubble
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import PlanError
from composer3d.spec.schedules import (
    SCHEDULES,
    check_csv,
    forward_order,
    micro_batch_requirement,
    read_csv,
    stages_of,
)
from composer3d.training.build import build_stages
from composer3d.training.loop import compute_gradients, update
from composer3d.training.optim import build_optimizer
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tools.prove.paths import RECIPE as RECIPE_PATH

VERIFY = RECIPE_PATH
BUILT_IN = [name for name in SCHEDULES if name not in ("GPipe", "1F1B", "csv")]
CASES = [
    (size, each, count) for size, each in ((2, 2), (3, 2), (4, 2), (2, 4)) for count in range(1, 13)
]


def tables(name: str) -> dict[tuple[int, int, int], list[str] | None]:
    """What torch builds for each of CASES as lines of a file; None where it refuses."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
        return {
            case: _lines(name, groups[case[0]], *case)
            for case in CASES
            if not (SCHEDULES[name].v_shaped and case[1] > 2)
        }
    finally:
        dist.destroy_process_group()


def _lines(name: str, group: Any, size: int, each: int, count: int) -> list[str] | None:
    example = torch.empty(1, requires_grad=True)
    own = stages_of(0, size, each, v_shaped=SCHEDULES[name].v_shaped)
    device = torch.device("cpu")
    fixed: dict[str, Any] = {"input_args": (example,), "output_args": (example,), "group": group}
    stages = [PipelineStage(nn.Identity(), stage, each * size, device, **fixed) for stage in own]
    try:
        schedule: Any = get_schedule_class(name)(
            stages, n_microbatches=count, loss_fn=lambda loss, _: loss
        )
    except ValueError:
        return None
    order = schedule.pipeline_order
    return [
        ",".join("" if action is None else str(action) for action in order[rank])
        for rank in range(size)
    ]


@pytest.mark.parametrize("name", BUILT_IN)
def test_torch_builds_what_the_facts_say(pool: Pool, tmp_path: Path, name: str) -> None:
    built = pool.run(tables, {"name": name}, world_size=1)[0]
    for (size, each, count), lines in built.items():
        assert (lines is None) == (micro_batch_requirement(name, count, size, "") is not None), (
            size,
            count,
        )
        if lines is None:
            continue
        file = tmp_path / f"{size}-{each}-{count}.csv"
        file.write_text("\n".join(lines))
        placed = check_csv(read_csv(str(file)), str(file), pp=size, stages_per_rank=each, micro_batches=count)
        assert placed == [stages_of(rank, size, each, v_shaped=SCHEDULES[name].v_shaped) for rank in range(size)]
        assert any("W" in line for line in lines) == SCHEDULES[name].splits_backward


def test_every_schedule_has_a_runtime() -> None:
    assert all(
        issubclass(get_schedule_class(name), _PipelineSchedule)
        for name in SCHEDULES
        if name != "csv"
    )


@pytest.mark.parametrize("v", [False, True])
def test_forwards_in_step_run_everything_once_and_in_order(v: bool) -> None:
    stages = [stages_of(rank, 3, 2, v_shaped=v) for rank in range(3)]
    for count in (1, 2, 5):
        ticks = forward_order(stages, count)
        when = {
            work: tick for tick, works in enumerate(ticks) for work in works if work is not None
        }
        assert set(when) == {(stage, number) for stage in range(6) for number in range(count)}
        assert sum(work is not None for works in ticks for work in works) == 6 * count
        assert all(when[stage, number] > when[stage - 1, number] for stage, number in when if stage)
        for works in ticks:
            assert all(
                work is None or work[0] in held for work, held in zip(works, stages, strict=True)
            )
        assert (
            len(ticks) <= 2 * count + 6
        )  # no more than the work of a rank, and filling the pipeline once


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("again", [False, True])
def test_weight_gradients_wait_until_they_are_asked_for(again: bool) -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList([Three()]).to(torch.float64)
    plain = nn.ModuleList([Three()]).to(torch.float64)
    plain.load_state_dict(blocks.state_dict())
    inputs = [torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(3)]

    def run(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = checkpoint(module, x, use_reentrant=False) if again else module(x)
        out.pow(3).sum().backward()
        assert x.grad is not None
        return x.grad

    builder = zero_bubble.defer_weight_grads(blocks, blocks)
    works = []
    for x in inputs:
        assert torch.equal(run(blocks[0], x), run(plain[0], x))
        works.append(builder())
        assert blocks[0].a.weight.grad is None
        assert blocks[0].a.bias.grad is None
        assert blocks[0].b.weight.grad is None
    assert blocks[0].norm.weight.grad is not None  # only linear layers wait
    for work in reversed(works):
        work()
    for (name, a), b in zip(blocks.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-13, atol=1e-13, msg=name)
    builder()()  # nothing is left
    torch.testing.assert_close(
        blocks[0].b.weight.grad, plain[0].b.weight.grad, rtol=1e-13, atol=1e-13
    )


def train_tied(sets: list[str]) -> dict[str, Any]:
    """Two steps; what the rank holds then, by the names of its optimizer, and its followers' values."""
    recipe = load(VERIFY, ["model.tied=true", "data.seq_len=16", *sets], check_files=False).recipe
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        for step in range(2):
            _, norm = compute_gradients(stages, local_batch(random_batch(recipe, step), stages))
            update(stages, optimizer, norm=norm, max_norm=1.0, lr=1e-2)
        stages.evaluate(*(t for t in local_batch(random_batch(recipe, 0), stages)[:3]))
        held = dict(stages.named_parameters())
        followers = {
            owner: module.get_parameter(alias).tolist()
            for module in stages.modules
            for alias, owner in module.tied_copies.items()
        }
        return {
            "names": sorted(held),
            "state": sorted(
                name
                for name in optimizer_state(optimizer, stages.named_parameters())
                if "embed" in name
            ),
            "owner": held["first.embed.weight"].tolist() if "first.embed.weight" in held else None,
            "followers": followers,
        }


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_follower_is_its_owner_everywhere_but_in_memory(pool: Pool, schedule: str) -> None:
    first, last = pool.run(
        train_tied, {"sets": ["mesh.pp=2", f"parallel.schedule={schedule}"]}, world_size=2
    )
    name = "first.embed.weight"
    holder = first if schedule == "ZBVZeroBubble" else last
    assert list(holder["followers"]) == [name]
    assert holder["followers"][name] == first["owner"]
    assert first["state"] == [f"optim.{name}.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
    assert (name in last["names"], last["state"]) == (False, [])
    assert not any("head" in each for rank in (first, last) for each in rank["names"])


GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1I1,1W1"]
WRONG = [
    (["0F0"], 2, 1, "has 1 lines, one for each pipeline rank, but mesh.pp = 2"),
    (["0F0,0X0", "1F0,1B0"], 2, 1, ":1: '0X0' is no action"),
    (["0F0,0B0,1F0,1B0", "2F0,2B0"], 2, 1, "must put stages 0 to 1 on 2 ranks, 1 on each"),
    (["0F0,0B0", "0F0,0B0"], 2, 1, "must put stages 0 to 1"),
    (["0F0,0B0", "1F0,1F0,1B0"], 2, 1, ":2: 1F0 comes twice"),
    (["0B0,0F0", "1F0,1B0"], 2, 1, ":1: 0B0 comes before 0F0"),
    (["0F0,0W0,0I0", "1F0,1B0"], 2, 1, ":1: 0W0 comes before 0I0"),
    (["0F0,0I0", "1F0,1B0"], 2, 1, ":1: it must hold either 0B0, or both 0I0 and 0W0"),
    (["0F0,0B0,0I0,0W0", "1F0,1B0"], 2, 1, ":1: it must hold either 0B0"),
    (["0F0,0B0", "1F0,1B0"], 2, 2, ":1: it must hold either 0B1"),
    (["0F0,0B0,0F3", "1F0,1B0"], 2, 1, ":1: 0F3 is beyond the 1 micro-batches"),
    (["0F0,0F1,0B0,0B1", "1F0,1F1,1B1,1B0"], 2, 2, None),
    (["0F0,0B0,0F1,0B1", "1F0,1F1,1B1,1B0"], 2, 2, ":1: 0B0 waits for ever"),
    (GOOD, 2, 2, None),
    # What overlaps waits for all that it receives before any of it runs.
    (["0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,1B0,1F1,1B1"], 2, 2, None),
    (["0F0,(0F1;0B1)OVERLAP_F_B,0B0", "1F0,1B0,1F1,1B1"], 2, 2, ":1: 0B1 waits for ever"),
    (["0F0,(0F1;0B0", "1F0,1B0"], 2, 1, ":1: '(0F1;0B0' is no action"),
    (
        ["0F0,0B0,0F0,0B0,0F0", "1F0,1B0"],
        2,
        1,
        ":1 has 5 cells, but 1 stages with 1 micro-batches make at most 4",
    ),
    (
        ["0F0,0B" + "1" * 5000, "1F0,1B0"],
        2,
        1,
        ":1: '0B1{297}[.]{3} is no action",
    ),  # Python reads no such number
]


@pytest.mark.parametrize(("lines", "size", "count", "words"), WRONG)
def test_a_schedule_that_cannot_run_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], size: int, count: int, words: str | None
) -> None:
    file = tmp_path / "own.csv"
    file.write_text("\n".join(lines) + "\n")
    rows = read_csv(str(file))
    if words is None:
        assert check_csv(rows, str(file), pp=size, stages_per_rank=1, micro_batches=count) == [[0], [1]]
        return
    with pytest.raises(PlanError, match=words.replace("(", r"\(")) as caught:
        check_csv(rows, str(file), pp=size, stages_per_rank=1, micro_batches=count)
    assert str(file) in str(caught.value)


def test_a_schedule_that_cannot_be_read_is_refused() -> None:
    table = ParallelTable(schedule="csv", schedule_csv="no/such.csv")
    with pytest.raises(PlanError, match=r"no/such.csv cannot be read"):
        read_csv(str(table.schedule_csv))
    with pytest.raises(
        PlanError, match=r"DualPipeV has 3 micro-batches, but needs at least twice pp = 2"
    ):
        pp.place_stages(2, ParallelTable(schedule="DualPipeV"), 3)
