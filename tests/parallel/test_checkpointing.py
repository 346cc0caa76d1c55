"""Activation checkpointing: which operators run again in backward."""

import weakref
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.models import fit
from composer3d.models.contract import SequenceInfo
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan as moe_plan
from composer3d.models.moe.shape import PRESETS as MOE_PRESETS
from composer3d.models.moe.shape import MoeShape
from composer3d.parallel import checkpointing
from composer3d.parallel.pipeline import zero_bubble
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


def checkpointed_blocks(mode: str) -> list[list[str]]:
    """Name the blocks of this rank's stages that are checkpointed."""
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(pp=2, dp_shard=1), device)
        memory = MemoryTable(activation_checkpoint=mode)
        parallel = ParallelTable(stages=(1, 2))
        stages = compose_small(mesh, memory=memory, parallel=parallel)
        return [
            [name for name, block in stage.blocks.items() if isinstance(block.forward, partial)]
            for stage in stages.modules
        ]


@pytest.mark.parametrize(
    ("mode", "blocks"),
    [
        ("every 2 blocks", [[["0"]], [["1"]]]),
        ("full in the first 1 stages", [[["0"]], [[]]]),
        ("selective in the first 1 stages", [[["0"]], [[]]]),
        ("every 1 blocks", [[["0"]], [["1", "2"]]]),
    ],
)
def test_blocks_are_counted_from_the_first_one_of_each_stage(
    pool: Pool, mode: str, blocks: list[list[list[str]]]
) -> None:
    assert pool.run(checkpointed_blocks, {"mode": mode}, world_size=2) == blocks


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

    # A block has seven matrix products. Backward does not read the output of the last one, and
    # leaves it out when it computes the block again.
    extra_products = {
        mode: operators["mm"] - counts["none"]["mm"] for mode, operators in counts.items()
    }
    assert extra_products["selective"] == 0
    assert extra_products["full"] == 6 * blocks
    assert [counts[mode]["silu"] for mode in ("none", "selective", "full")] == [
        blocks,
        2 * blocks,
        2 * blocks,
    ]


class Products(NamedTuple):
    """The matrix products of one model's blocks.

    Attributes:
        outputs: the numbers of columns of the outputs that are in memory after forward.
        forward, backward: how many were computed.
    """

    outputs: list[int]
    forward: int
    backward: int


class ProductCounter(OperatorCounter):
    """Also remembers the outputs of products, as long as they are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket.__name__ == "mm":
            self.outputs.append((weakref.ref(out.untyped_storage()), out.shape[1]))
        return out


def run_blocks(mode: str, *, shape: Any, defers: bool) -> Products:
    """Run forward and backward of the blocks of a model."""
    is_moe = isinstance(shape, MoeShape)
    architecture = MoeLlama if is_moe else Llama
    model = architecture(shape, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plan = moe_plan(shape) if is_moe else sharding_plan(shape)
    fit.check(architecture(shape), plan)
    take_work = zero_bubble.defer_weight_grads(model, model.blocks) if defers else None
    checkpointing.apply(model.blocks, plan, MemoryTable(activation_checkpoint=mode))
    tokens = torch.arange(16).view(2, 8)
    seq = SequenceInfo(torch.arange(8).expand_as(tokens))
    h = model.first(tokens, seq).detach().requires_grad_()
    with ProductCounter() as counter:
        for block in model.blocks.values():
            h = block(h, seq)
        kept = [columns for storage, columns in counter.outputs if storage() is not None]
        forward = counter.counts["mm"]
        h.pow(2).sum().backward()
        if take_work is not None:
            take_work()()
    return Products(kept, forward, counter.counts["mm"] - forward)


@pytest.mark.parametrize("defers", [False, True])
def test_the_output_of_the_last_product_is_neither_kept_nor_computed_again(defers: bool) -> None:
    shape = replace(SHAPE, n_layers=2)
    dim, kv, ffn = shape.dim, shape.n_kv_heads * shape.head_width, shape.ffn
    none = run_blocks("none", shape=shape, defers=defers)
    assert (none.forward, none.backward) == (7 * 2, 2 * 7 * 2)
    selective = run_blocks("selective", shape=shape, defers=defers)
    # Queries, keys, values, the output of attention, gate, up; not the output of the block.
    assert selective.outputs == 2 * [dim, kv, kv, dim, ffn, ffn]
    assert (selective.forward, selective.backward) == (none.forward, none.backward)
    # Backward of each block computes all products again but the last one.
    full = run_blocks("full", shape=shape, defers=defers)
    assert full.backward == none.backward + 6 * 2


def test_the_output_of_a_shared_expert_is_neither_kept_nor_computed_again() -> None:
    shape = replace(
        MOE_PRESETS["debug-moe-shared"], n_layers=3, dense_layers=1, dim=16, vocab=32, shared_ffn=20
    )
    none, selective = (
        run_blocks(mode, shape=shape, defers=False) for mode in ("none", "selective")
    )
    assert selective.backward == none.backward
    # The output of attention's last product, of width 16, is kept; of dense layers and shared
    # experts, only gate and up are.
    assert selective.outputs.count(20) == 2 * 2
    assert len(selective.outputs) == selective.forward - 3
