"""``compose``: mixed precision, the cut into stages, and models that it refuses.

``layouts.txt`` proves that layouts are exact.
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.parallel import StepShape, compose, float8
from composer3d.parallel.context import implementation
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import (
    CompileTable,
    MeshTable,
    ParallelTable,
    PrecisionTable,
    Recipe,
)
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.step import compute_gradients, update
from composer3d.verify.data import random_batch
from composer3d.verify.proof import verify_layout
from composer3d.verify.worker import local_batch
from tests.long import some_of
from tests.parallel.small_model import SHAPE, compose_small
from tools.prove.paths import RECIPE, ROOT

CSV = ROOT / "recipes" / "zb-h1-2x4.csv"


# --- mixed precision ---


class Training(NamedTuple):
    """A few steps of training on one rank.

    ``output_dtypes`` are those of blocks, ``stored_dtypes`` those of parameters and gradients.
    """

    losses: list[float]
    norms: list[float]
    output_dtypes: set[torch.dtype]
    stored_dtypes: set[torch.dtype]


def train(recipe: Recipe, steps: int) -> Training:
    """Train ``steps`` steps on the same rows, which the model learns by heart."""
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        output_dtypes: set[torch.dtype] = set()
        stored_dtypes: set[torch.dtype] = set()

        def note_dtype(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output_dtypes.add(output.dtype)

        for module in stages.modules:
            for block in module.blocks.values():
                block.register_forward_hook(note_dtype)
        losses, norms = [], []
        for _ in range(steps):
            batch = local_batch(random_batch(recipe, 0), stages)
            sums = compute_gradients(stages, batch)
            for parameter in stages.parameters():
                stored_dtypes.add(parameter.dtype)
                if parameter.grad is not None:
                    stored_dtypes.add(parameter.grad.dtype)
            values = update(stages, optimizer, sums, max_norm=1.0, lr=1e-3)
            losses.append(values.loss)
            norms.append(values.norm)
        return Training(losses, norms, output_dtypes, stored_dtypes)


def bfloat16_recipe(*overrides: str) -> Recipe:
    """A small recipe with bfloat16 compute and these overrides."""
    sizes = ("data.seq_len=16", "data.global_batch=8", "model.n_layers=2", "model.dim=32")
    settings = [*sizes, "precision.compute=bfloat16", *overrides]
    return load(RECIPE, settings, check_files=False).recipe


def max_relative_difference(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))


@pytest.fixture(scope="module")
def on_one_process(pool: Pool) -> Training:
    """Training on one process in bfloat16, which agrees with float32 to bfloat16's precision."""
    recipe = bfloat16_recipe()
    (narrow,) = pool.run(train, {"recipe": recipe, "steps": 20}, world_size=1)
    assert narrow.output_dtypes == {torch.bfloat16}
    assert narrow.stored_dtypes == {torch.float32}
    recipe = replace(recipe, precision=PrecisionTable())
    (wide,) = pool.run(train, {"recipe": recipe, "steps": 20}, world_size=1)
    assert wide.output_dtypes == {torch.float32}
    assert 1e-6 < max_relative_difference(narrow.losses, wide.losses) < 5e-3
    assert narrow.losses[-1] < narrow.losses[0] - 0.1
    return narrow


@some_of(
    2,
    ("layout", "loss_bound", "norm_bound"),
    [
        # A cut along the batch or the layers leaves every product as it is. Only sums in float32
        # differ.
        ("mesh.dp_replicate=2 mesh.dp_shard=2", 1e-6, 1e-5),
        ("mesh.dp_replicate=2 parallel.zero=0", 1e-6, 1e-5),
        # Deferred weight gradients are summed over micro-batches in float32 like the others.
        (f"mesh.pp=2 parallel.schedule=csv parallel.schedule_csv={CSV}", 1e-6, 1e-5),
        # A cut through a product or an attention rounds partial sums to bfloat16 before they meet.
        ("mesh.cp=2", 1e-3, 2e-3),
        ("mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 memory.activation_checkpoint=selective", 1e-3, 2e-3),
    ],
)
def test_composed_bfloat16_learns_as_on_one_process(
    pool: Pool, on_one_process: Training, layout: str, loss_bound: float, norm_bound: float
) -> None:
    recipe = bfloat16_recipe(*layout.split())
    arguments = {"recipe": recipe, "steps": 20}
    for composed in pool.run(train, arguments, world_size=recipe.world_size):
        assert composed.output_dtypes == {torch.bfloat16}
        assert composed.stored_dtypes == {torch.float32}
        assert max_relative_difference(composed.losses, on_one_process.losses) < loss_bound
        assert max_relative_difference(composed.norms, on_one_process.norms) < norm_bound


@pytest.mark.parametrize(
    "layout",
    [
        "mesh.dp_shard=2 model.tied=true parallel.zero=2",
        "mesh.dp_replicate=2 mesh.cp=2 parallel.zero=0",
        "mesh.pp=2 mesh.tp=2 parallel.schedule=ZBVZeroBubble model.tied=true model.qk_norm=true "
        "memory.activation_checkpoint=full",
    ],
)
def test_composed_mixed_precision_agrees_with_one_process(
    pool: Pool, references: Path, layout: str
) -> None:
    """float32 compute, float64 parameters: a sum or copy in a too narrow dtype exceeds 1e-5."""
    overrides = [*layout.split(), "precision.compute=bfloat16"]
    verdict = verify_layout(
        pool, references, str(RECIPE), overrides, dtype="float64", steps=2, compute="float32"
    )
    assert verdict.max_grad_rel_err is not None, verdict
    assert 1e-9 < verdict.max_grad_rel_err < 1e-5
    assert (verdict.loss_rel_err or 1.0) < 1e-6
    assert (verdict.grad_norm_rel_err or 1.0) < 1e-6


# --- the cut into stages ---


def blocks_of_stages(table: MeshTable, parallel: ParallelTable) -> list[list[str]]:
    """The names of the blocks of each stage of this rank."""
    with pool_world() as device:
        stages = compose_small(Mesh.build(table, device), parallel=parallel)
        return [list(stage.blocks) for stage in stages.modules]


def test_stages_have_the_blocks_of_the_explicit_cut(pool: Pool) -> None:
    arguments = {"table": MeshTable(pp=2, dp_shard=1), "parallel": ParallelTable(stages=(1, 2))}
    assert pool.run(blocks_of_stages, arguments, world_size=2) == [[["0"]], [["1", "2"]]]

    arguments = {"table": MeshTable(pp=1, dp_shard=1), "parallel": ParallelTable()}
    assert pool.run(blocks_of_stages, arguments, world_size=1) == [[["0", "1", "2"]]]

    arguments = {"table": MeshTable(pp=2, dp_shard=1), "parallel": ParallelTable(stages=(2, 2))}
    with pytest.raises(WorkerError) as caught:
        pool.run(blocks_of_stages, arguments, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    assert (
        "parallel.stages = [2, 2] must be 2 numbers of at least 1, with the sum 3, "
        "the number of blocks"
    ) in str(caught.value.user_error)


# --- models that cannot be composed ---

STEP = StepShape(micro_batch=1, micro_batches=2, seq_len=8)


def compose_without_a_seam() -> None:
    with pool_world() as device:
        model = Llama(SHAPE)
        for block in model.blocks.values():
            del block.attn.attend
        plan = replace(sharding_plan(SHAPE), attend=None)
        mesh = Mesh.build(MeshTable(dp_shard=1, cp=2), device)
        compose(model, plan, mesh, parallel=ParallelTable(), step=STEP, seed=0)


def compose_tied_blocks() -> None:
    with pool_world() as device:
        model = Llama(SHAPE)
        model.blocks["2"].ffn.w1.weight = model.blocks["0"].ffn.w1.weight
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        compose(model, sharding_plan(SHAPE), mesh, parallel=ParallelTable(), step=STEP, seed=0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (compose_tied_blocks, "can tie parameters of `first` and `last` only"),
        (compose_without_a_seam, "the plan names no module that attends"),
    ],
)
def test_models_that_cannot_be_composed_are_refused(pool: Pool, task: Any, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(task, {}, world_size=2)
    assert isinstance(caught.value.user_error, PlanError)
    assert message in str(caught.value.user_error)


# --- machines that differ ---


def compose_where_rank_1_lacks_something(lacks: str) -> tuple[str, ...]:
    """Return the lines of the error. Rank 1 is on another host, which lacks what rank 0 has."""
    rank = int(os.environ["RANK"])
    lacks_it = rank == 1
    patch = pytest.MonkeyPatch()
    patch.setattr(socket, "gethostname", lambda: f"node-{rank}")
    patch.setenv("CXX", "no-such-compiler" if lacks_it else sys.executable)
    capability = (8, 0) if lacks_it else (9, 0)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "an old GPU")
    # The package is there in name only.
    patch.setattr(implementation, "activate_flash_attention_impl", lambda name: None)
    patch.setattr(implementation, "current_flash_attention_impl", lambda: "FA3")
    gpu = torch.device("cuda", 0)
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=2), device)
        try:
            if lacks == "compiler":
                compose_small(mesh, compiling=CompileTable(enabled=True))
            elif lacks == "kernels":
                implementation.activate("flash3", gpu)
            else:
                precision = PrecisionTable(compute="bfloat16", matmul="float8")
                plan = sharding_plan(SHAPE)
                float8.check(Llama(SHAPE), plan, MeshTable(dp_shard=1), precision, gpu)
        except DeviceError as error:
            return error.lines
    return ()


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("compiler", "compile.enabled = true needs a C++ compiler on a CPU, and there is no"),
        ("kernels", 'parallel.attention_kernel = "flash3" needs a GPU of compute capability 9.x'),
        ("float8", 'precision.matmul = "float8" needs a GPU of compute capability 8.9 or newer'),
    ],
)
def test_what_one_machine_lacks_is_raised_on_all_ranks_with_its_name(
    pool: Pool, lacks: str, words: str
) -> None:
    arguments = {"lacks": lacks}
    one, other = pool.run(compose_where_rank_1_lacks_something, arguments, world_size=2)
    assert one == other
    (line,) = one
    assert line.startswith(f"rank 1 on node-1: {words}")
