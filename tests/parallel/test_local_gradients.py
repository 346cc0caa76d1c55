"""The gradients of micro-batches before any reduction: they are right, and nothing remains."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import StepShape, compose
from composer3d.parallel.data import fsdp
from composer3d.parallel.expert.balance import routers_of
from composer3d.parallel.local_gradients import GradientUnit, see_local_gradients
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable, PrecisionTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import gathered_parameters

SHAPE = MoeShape(16, 4, 4, 2, 24, 32, 100.0, experts=4, experts_per_token=2)
MICRO_BATCHES, TOKENS = 4, 8


def compare_with_a_step(
    axes: dict[str, int], tables: dict[str, dict[str, Any]], is_tied: bool
) -> list[str]:
    """A task: compare local gradients with those of a step whose micro-batches are all the same.

    Returns:
        The units of this rank, in the order in which backward came to them.
    """
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(**axes), device)
        shape = replace(SHAPE, tied=is_tied)
        stages = compose(
            MoeLlama(shape, dtype=torch.float64),
            sharding_plan(shape),
            mesh,
            parallel=ParallelTable(**tables.get("parallel", {})),
            memory=MemoryTable(**tables.get("memory", {})),
            precision=PrecisionTable(params="float64", **tables.get("precision", {})),
            step=StepShape(micro_batch=1, micro_batches=MICRO_BATCHES, seq_len=TOKENS),
            seed=0,
        )
        generator = torch.Generator().manual_seed(mesh.batch_rank)
        tokens = torch.randint(SHAPE.vocab, (1, TOKENS), generator=generator)
        one = [stages.own_tokens(x) for x in (tokens, tokens, torch.arange(TOKENS)[None])]
        step = [x.expand(MICRO_BATCHES, -1) for x in one]
        # A schedule runs the micro-batches of a step and no others.
        seen = step if mesh.sizes.pp > 1 else one
        routers = [router for module in stages.modules for router in routers_of(module).values()]
        units = [unit for module in stages.modules for unit in fsdp.units(module)]
        taken: dict[GradientUnit, dict[int, Tensor]] = defaultdict(dict)

        def see(unit: GradientUnit, index: int, gradient: Tensor) -> None:
            held = [p for u in units for p in gathered_parameters(u) if p.grad is not None]
            assert len(held) == 1  # no other gradient is in memory
            taken[unit][index] = taken[unit].get(index, 0) + gradient.double()

        # Before the first step of all, there are no whole parameters yet.
        see_local_gradients(stages, *seen, see=see)
        taken.clear()
        step_loss = stages.forward_backward(*step, MICRO_BATCHES * TOKENS)
        expected = gradients_of(stages)
        shards = {name: parameter.grad for name, parameter in stages.named_parameters()}
        statistics = [router.statistics.sums for router in routers]

        loss = see_local_gradients(stages, *seen, see=see)
        torch.testing.assert_close(loss, step_loss, rtol=1e-12, atol=0)
        # As much as the ranks' gradients add up to in the step.
        (group,) = [
            mesh.device_mesh[axis].get_group()
            for axis in ("dp_replicate", "fsdp")
            if mesh.device_mesh[axis].size() > 1
        ]
        for unit, by_index in taken.items():
            names = [name for name in expected if is_in_unit(name, unit.name)]
            assert len(names) == len(by_index)
            for name, (_, local) in zip(names, sorted(by_index.items()), strict=True):
                dist.all_reduce(local, group=group)
                torch.testing.assert_close(local, expected[name], rtol=1e-12, atol=1e-15)

        # Nothing remains.
        for name, parameter in stages.named_parameters():
            assert parameter.grad is shards[name]
        for unit in units:
            for parameter in gathered_parameters(unit):
                assert parameter.grad is None
                assert not parameter._post_accumulate_grad_hooks
        for router, before in zip(routers, statistics, strict=True):
            assert router.statistics.sums is before
        for name, gradient in gradients_of(stages).items():
            assert torch.equal(gradient, expected[name])
        stages.forward_backward(*step, MICRO_BATCHES * TOKENS)
        for name, gradient in gradients_of(stages).items():
            assert torch.equal(gradient, expected[name])
    return [unit.name for unit in taken]


def is_in_unit(name: str, unit: str) -> bool:
    """Whether a parameter belongs to a unit: one module, several blocks, or both ends."""
    if unit == "first and last":
        return not name.startswith("blocks.")
    first, _, last = unit.partition(" to ")
    if not last:
        return name.startswith(f"{unit}.")
    block = name.split(".")[1] if name.startswith("blocks.") else "-1"
    return int(first.split(".")[1]) <= int(block) <= int(last.split(".")[1])


def gradients_of(stages: Any) -> dict[str, Tensor]:
    """The whole gradients of this rank's stages, by name, in copies."""
    found = {}
    for module in stages.modules:
        for name, parameter in module.named_parameters():
            grad = parameter.grad
            if grad is not None:
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                found[name] = whole.to("cpu", torch.float64, copy=True)
    return found


BLOCKS = ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]


@pytest.mark.parametrize(
    ("axes", "tables", "is_tied", "units"),
    [
        (
            {"dp_shard": 2},
            {
                "precision": {"compute": "bfloat16"},
                "memory": {"activation_checkpoint": "full", "loss_chunks": 2},
            },
            False,
            [["last", *BLOCKS, "first"]] * 2,
        ),
        (
            {"dp_replicate": 2, "dp_shard": 1},
            {"parallel": {"zero": 1}},
            True,
            [["first and last", *BLOCKS]] * 2,
        ),
        (
            {"cp": 2, "dp_shard": 1},
            {"memory": {"cpu_offload": True}, "parallel": {"zero": 2}},
            False,
            [["last", *BLOCKS, "first"]] * 2,
        ),
        (
            {"pp": 2, "dp_shard": 2},
            {"parallel": {"schedule": "ZBVZeroBubble"}},
            False,
            [["last", "blocks.3", "blocks.0", "first"]] * 2 + [["blocks.2", "blocks.1"]] * 2,
        ),
        (
            {"dp_shard": 2},
            {"parallel": {"fsdp_blocks": 3}, "precision": {"compute": "bfloat16"}},
            False,
            [["last", "blocks.3", "blocks.0 to blocks.2", "first"]] * 2,
        ),
    ],
    ids=["checkpointed", "tied", "offload", "zero bubble", "several blocks a unit"],
)
def test_local_gradients_add_up_to_those_of_a_step(
    pool: Pool,
    axes: dict[str, int],
    tables: dict[str, dict[str, Any]],
    is_tied: bool,
    units: list[list[str]],
) -> None:
    arguments = {"axes": axes, "tables": tables, "is_tied": is_tied}
    found = pool.run(compare_with_a_step, arguments, world_size=len(units))
    assert found == units
