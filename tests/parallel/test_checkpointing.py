"""Activation checkpointing: which operators run again in backward."""

from collections import Counter
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from tests.parallel.small_model import MICRO_BATCHES, SHAPE, compose_small, take_a_step


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run, backward and recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_operators(mode: str) -> Counter[str]:
    """Count the operators of a step, by name, with ``memory.activation_checkpoint = mode``."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1), device)
        memory = MemoryTable(activation_checkpoint=mode)
        stages = compose_small(mesh, memory=memory)
        assert [name for name, _ in stages.named_parameters()] == [
            name for name, _ in Llama(SHAPE).named_parameters()
        ]
        with OperatorCounter() as operators:
            take_a_step(stages)
        return operators.counts


def checkpointed_blocks() -> list[list[str]]:
    """Name the blocks of this rank's stages that are checkpointed."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(pp=2, dp_shard=1), device)
        memory = MemoryTable(activation_checkpoint="every 2 blocks")
        parallel = ParallelTable(stages=(1, 2))
        stages = compose_small(mesh, memory=memory, parallel=parallel)
        return [
            [name for name, block in stage.blocks.items() if isinstance(block.forward, partial)]
            for stage in stages.modules
        ]


def test_blocks_are_counted_from_the_first_one_of_each_stage(pool: Pool) -> None:
    assert pool.run(checkpointed_blocks, {}, world_size=2) == [[["0"]], [["1"]]]


def test_each_mode_recomputes_the_operators_that_it_does_not_save(pool: Pool) -> None:
    counts = {
        mode: pool.run(count_operators, {"mode": mode}, world_size=1)[0]
        for mode in ("none", "selective", "full")
    }
    blocks = SHAPE.n_layers * MICRO_BATCHES
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert {mode: operators[attention] for mode, operators in counts.items()} == {
        "none": blocks,
        "selective": blocks,
        "full": 2 * blocks,
    }

    # The first of every so many blocks of a stage; the model is one stage of three blocks.
    for mode, recomputed in {"every 1 blocks": 3, "every 2 blocks": 2, "every 9 blocks": 1}.items():
        operators = pool.run(count_operators, {"mode": mode}, world_size=1)[0]
        assert operators[attention] == blocks + recomputed * MICRO_BATCHES

    # The plan also saves projections with a bias and the ring, which this model does not run.
    plan = sharding_plan(SHAPE)
    for operator in (torch.ops.aten.addmm.default, torch.ops.composer3d.ring_attention.default):
        assert any(fnmatchcase(str(operator), glob) for glob in plan.save)

    # A block has seven matrix products. Backward does not need the output of the last one, and may
    # leave it out when it computes the block again.
    extra_products = {
        mode: operators["mm"] - counts["none"]["mm"] for mode, operators in counts.items()
    }
    assert extra_products["selective"] == 0
    assert 6 * blocks <= extra_products["full"] <= 7 * blocks
    assert [counts[mode]["silu"] for mode in ("none", "selective", "full")] == [
        blocks,
        2 * blocks,
        2 * blocks,
    ]
