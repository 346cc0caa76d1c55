"""What compose promises beyond exact numbers: what is computed again, how often what is sent, which dtypes are kept."""

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import ShardingPlan, Stages, StepShape, compose
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import MemoryTable, MeshTable, ParallelTable, PrecisionTable, Recipe
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import PlanError
from composer3d.training.build import build_stages
from composer3d.training.loop import compute_gradients, update
from composer3d.training.optim import build_optimizer
from composer3d.verify.data import random_batch
from composer3d.verify.proof import verify_layout
from composer3d.verify.worker import local_batch
from tools.prove.paths import RECIPE as RECIPE_PATH
from tools.prove.paths import ROOT

SHAPE = ModelShape(dim=16, n_layers=3, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
RECIPE = RECIPE_PATH
CSV = ROOT / "recipes" / "zb-h1-2x4.csv"
MICRO_BATCHES = 4


def composed(mesh: Mesh, *, plan: ShardingPlan | None = None, **tables: Any) -> Stages:
    step = StepShape(micro_batch=1, micro_batches=MICRO_BATCHES, seq_len=8)
    tables = {"parallel": ParallelTable()} | tables
    return compose(Llama(SHAPE), plan or sharding_plan(SHAPE), mesh, step=step, seed=0, **tables)


def take_a_step(stages: Stages) -> None:
    tokens = torch.arange(8 * MICRO_BATCHES).view(MICRO_BATCHES, 8) % SHAPE.vocab
    stages.forward_backward(tokens, tokens, torch.arange(8).expand_as(tokens), 32.0)


def count_sends(zero: int, pp: int, compute: str | None) -> Counter[tuple[str, torch.dtype]]:
    """Collectives over fsdp of the second step on this rank, by kind and dtype."""
    counts: Counter[tuple[str, torch.dtype]] = Counter()

    def count(name: str, kind: str) -> None:
        right = getattr(dist, name, None)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            sent = next(
                each for each in (*arguments, *keywords.values()) if isinstance(each, torch.Tensor)
            )
            counts[kind, sent.dtype] += 1
            return right(*arguments, **keywords)  # type: ignore[misc]

        if right is not None:
            setattr(dist, name, counted)

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        count(name, "reduce-scatter")
    for name in ("all_gather_into_tensor", "all_gather_single"):
        count(name, "all-gather")
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(pp=pp, dp_shard=2), device)
        precision = PrecisionTable(compute=compute)  # type: ignore[arg-type]
        stages = composed(mesh, parallel=ParallelTable(zero=zero), precision=precision)  # type: ignore[arg-type]
        take_a_step(stages)
        counts.clear()
        take_a_step(stages)
        return counts


UNITS = SHAPE.n_layers + 2


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"),
    [
        (1, UNITS, UNITS),
        (2, UNITS, UNITS * MICRO_BATCHES),
        # Gathered again for backward, but for the last unit, whose backward follows its forward.
        (3, (2 * UNITS - 1) * MICRO_BATCHES, UNITS * MICRO_BATCHES),
    ],
)
def test_zero_says_how_often_parameters_are_gathered_and_gradients_reduced(
    pool: Pool, zero: int, gathers: int, reductions: int
) -> None:
    for counts in pool.run(
        count_sends, {"zero": zero, "pp": 1, "compute": "bfloat16"}, world_size=2
    ):
        assert counts == {
            ("all-gather", torch.bfloat16): gathers,
            ("reduce-scatter", torch.float32): reductions,
        }


def test_a_pipeline_reduces_once_at_every_zero(pool: Pool) -> None:
    for counts in pool.run(count_sends, {"zero": 3, "pp": 2, "compute": None}, world_size=4):
        assert counts["reduce-scatter", torch.float32] in (
            2,
            3,
        )  # the units of a stage: 5 over the two


class Operators(TorchDispatchMode):
    """Counts the operators that run, backward and recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_operators(mode: str) -> Counter[str]:
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1), device)
        stages = composed(mesh, memory=MemoryTable(activation_checkpoint=mode))  # type: ignore[arg-type]
        assert [name for name, _ in stages.named_parameters()] == [
            name for name, _ in Llama(SHAPE).named_parameters()
        ]
        with Operators() as operators:
            take_a_step(stages)
        return operators.counts


def test_checkpointing_computes_again_what_it_says(pool: Pool) -> None:
    counts = {
        mode: pool.run(count_operators, {"mode": mode}, world_size=1)[0]
        for mode in ("none", "selective", "full")
    }
    blocks = SHAPE.n_layers * MICRO_BATCHES
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert {mode: each[attention] for mode, each in counts.items()} == {
        "none": blocks,
        "selective": blocks,
        "full": 2 * blocks,
    }
    # The plan's globs name what they mean: biased projections and the ring as well.
    plan = sharding_plan(SHAPE)
    for operator in (torch.ops.aten.addmm.default, torch.ops.composer3d.ring_attention.default):
        assert any(fnmatchcase(str(operator), glob) for glob in plan.save)
    # Seven products a block; backward has two for each of them. The last one's output is not needed again.
    products = {mode: each["mm"] - counts["none"]["mm"] for mode, each in counts.items()}
    assert products["selective"] == 0
    assert 6 * blocks <= products["full"] <= 7 * blocks
    assert [counts[mode]["silu"] for mode in ("none", "selective", "full")] == [
        blocks,
        2 * blocks,
        2 * blocks,
    ]


def train_in(
    recipe: Recipe, steps: int
) -> tuple[list[float], list[float], set[torch.dtype], set[torch.dtype]]:
    """Losses and norms of ``steps`` steps, the dtypes that blocks return, and those of parameters and gradients."""
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        seen: set[torch.dtype] = set()
        for module in stages.modules:
            for block in module.blocks.values():
                block.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
        losses, norms = [], []
        for _ in range(steps):  # the same rows: they are learned by heart
            loss, norm = compute_gradients(stages, local_batch(random_batch(recipe, 0), stages))
            kept = {p.dtype for p in stages.parameters()} | {
                p.grad.dtype for p in stages.parameters() if p.grad is not None
            }
            update(stages, optimizer, norm=norm, max_norm=1.0, lr=1e-3)
            losses.append(loss)
            norms.append(norm)
        return losses, norms, seen, kept


def small(*sets: str) -> Recipe:
    few = ("data.seq_len=16", "data.global_batch=8", "model.n_layers=2", "model.dim=32")
    return load(RECIPE, [*few, "precision.compute=bfloat16", *sets], check_files=False).recipe


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[list[float], list[float]]:
    """Losses and norms of one process in bfloat16, which are those of float32 as far as bfloat16 can tell."""
    recipe = small()
    losses, norms, seen, kept = pool.run(train_in, {"recipe": recipe, "steps": 20}, world_size=1)[0]
    assert (seen, kept) == ({torch.bfloat16}, {torch.float32})
    recipe = replace(recipe, precision=PrecisionTable())
    wide, _, seen, _ = pool.run(train_in, {"recipe": recipe, "steps": 20}, world_size=1)[0]
    assert seen == {torch.float32}
    assert 1e-6 < apart(losses, wide) < 5e-3
    assert losses[-1] < losses[0] - 0.1
    return losses, norms


@pytest.mark.parametrize(
    ("layout", "of_loss", "of_norm"),
    [
        # Cut along the batch or the layers, every product is the same, and only sums in float32 differ.
        ("mesh.dp_shard=2", 1e-6, 1e-5),
        ("mesh.dp_replicate=2", 1e-6, 1e-5),
        ("mesh.dp_replicate=2 parallel.zero=0", 1e-6, 1e-5),
        ("mesh.pp=2", 1e-6, 1e-5),
        # Weight gradients that are put off are summed over micro-batches in float32 like the others.
        (f"mesh.pp=2 parallel.schedule=csv parallel.schedule_csv={CSV}", 1e-6, 1e-5),
        # Cut along a product or an attention, partial sums are rounded to bfloat16 before they meet.
        ("mesh.cp=2", 1e-3, 2e-3),
        ("mesh.tp=2", 1e-3, 2e-3),
        ("mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 memory.activation_checkpoint=selective", 1e-3, 2e-3),
    ],
)
def test_bfloat16_composed_learns_as_bfloat16_on_one_process(
    pool: Pool, alone: tuple[list[float], list[float]], layout: str, of_loss: float, of_norm: float
) -> None:
    recipe = small(*layout.split())
    for losses, norms, seen, kept in pool.run(
        train_in, {"recipe": recipe, "steps": 20}, world_size=recipe.world_size
    ):
        assert (seen, kept) == ({torch.bfloat16}, {torch.float32})
        assert apart(losses, alone[0]) < of_loss
        assert apart(norms, alone[1]) < of_norm


@pytest.mark.parametrize(
    "layout",
    [
        "mesh.dp_shard=2 model.tied=true parallel.zero=2",
        "mesh.tp=2 model.qk_norm=true",
        "mesh.pp=2 mesh.dp_shard=2 parallel.schedule=ZBVZeroBubble model.tied=true",
        "mesh.dp_replicate=2 mesh.cp=2 parallel.zero=0",
        "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 parallel.schedule=Interleaved1F1B memory.activation_checkpoint=full",
    ],
)
def test_mixed_precision_is_composed_as_it_is_on_one_process(
    pool: Pool, references: Path, layout: str
) -> None:
    """float32 compute over float64 parameters: what is reduced or kept in a narrow dtype shows beyond 1e-5."""
    sets = [*layout.split(), "precision.compute=bfloat16"]
    verdict = verify_layout(
        pool, references, str(RECIPE), sets, dtype="float64", steps=2, compute="float32"
    )
    assert verdict.max_grad_rel_err is not None, verdict
    assert 1e-9 < verdict.max_grad_rel_err < 1e-5
    assert (verdict.loss_rel_err or 1.0) < 1e-6
    assert (verdict.grad_norm_rel_err or 1.0) < 1e-6


def blocks_held(table: MeshTable, parallel: ParallelTable) -> list[list[str]]:
    with pool_world() as device:
        return [
            list(stage.blocks)
            for stage in composed(Mesh.build(table, device), parallel=parallel).modules
        ]


def test_stages_lie_where_the_cut_says(pool: Pool) -> None:
    table = MeshTable(pp=2, dp_shard=1)
    held = pool.run(
        blocks_held, {"table": table, "parallel": ParallelTable(stages=(1, 2))}, world_size=2
    )
    assert held == [[["0"]], [["1", "2"]]]
    table = MeshTable(pp=1, dp_shard=1)
    assert pool.run(blocks_held, {"table": table, "parallel": ParallelTable()}, world_size=1) == [
        [["0", "1", "2"]]
    ]
    arguments = {"table": MeshTable(pp=2, dp_shard=1), "parallel": ParallelTable(stages=(2, 2))}
    with pytest.raises(WorkerError) as caught:
        pool.run(blocks_held, arguments, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    assert "no cut of 3 blocks into 2 stages" in str(caught.value.user_error)


def compose_without_a_seam() -> None:
    with pool_world() as device:
        model = Llama(SHAPE)
        for block in model.blocks.values():
            del block.attn.attend
        plan = replace(sharding_plan(SHAPE), attend=None)
        step = StepShape(micro_batch=1, micro_batches=2, seq_len=8)
        compose(
            model,
            plan,
            Mesh.build(MeshTable(dp_shard=1, cp=2), device),
            parallel=ParallelTable(),
            step=step,
            seed=0,
        )


def compose_tied_blocks() -> None:
    with pool_world() as device:
        model = Llama(SHAPE)
        model.blocks["2"].ffn.w1.weight = model.blocks["0"].ffn.w1.weight
        step = StepShape(micro_batch=1, micro_batches=2, seq_len=8)
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        compose(model, sharding_plan(SHAPE), mesh, parallel=ParallelTable(), step=step, seed=0)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (compose_tied_blocks, "between `first` and `last` alone"),
        (compose_without_a_seam, "no module that attends"),
    ],
)
def test_what_cannot_be_composed_is_refused(pool: Pool, task: Any, words: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(task, {}, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    assert words in str(caught.value.user_error)
