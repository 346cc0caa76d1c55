"""A step and an evaluation of composed recipes on CUDA tensors without data, rank by rank.

What no test on a CPU sees: a copy between host and device, a value that the host reads from the
device, other collectives than on a CPU, or more operators.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.long import some_of
from tools.fake_cuda import counts, device
from tools.fake_cuda.counts import (
    OF_HOST_COPY,
    Copy,
    Job,
    Phase,
    Seen,
    launched_by_more_blocks,
    with_more_blocks,
)
from tools.prove.paths import ROOT

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

BASE = ROOT / "recipes" / "debug-1-single.toml"
SIZES = ("model.n_layers=2", "data.seq_len=64", "data.global_batch=4")

BF16 = 'precision.compute="bfloat16"'
DOCUMENTS = 'data.packing="documents"'
FULL = 'memory.activation_checkpoint="full"'
MUON = 'optim.name="muon"'
# A step of one row of ranks has as many micro-batches as samples.
TWO_MICRO_BATCHES = "data.global_batch=2"
FSDP = ("mesh.dp_shard=2", BF16)
EXPERTS = ('model.architecture="moe"', 'model.preset="debug-moe"', "model.expert_ffn=96", BF16)
LATENTS = (
    *('model.architecture="deepseek"', 'model.preset="debug-deepseek"', BF16),
    "model.router_bias=false",  # the update moves a bias of each block by itself
)


# Operators that torch refuses on a GPU under ``run.deterministic`` (the documentation of
# ``torch.use_deterministic_algorithms``), as far as a language model might call them.
NOT_DETERMINISTIC = {
    *("aten::bincount", "aten::cumsum", "aten::embedding_bag", "aten::histc", "aten::kthvalue"),
    *("aten::median", "aten::nll_loss2d_forward", "aten::put_", "aten::scatter_reduce"),
}


class Layout(NamedTuple):
    """A layout, and what it may do on the device.

    Attributes:
        overrides: of the recipe.
        forward, backward: the operators that one more block of a rank launches on the device at
            most, in a step. In backward, each micro-batch after the first one also adds to the
            gradients of 9 parameters.
        rows_copied: with experts, how often a step copies numbers of rows to the host: once for
            each layer and micro-batch, and not again when it is recomputed.
        numbers_copied: how often a step copies numbers to the device from pinned memory: sequences
            and their lengths once for all routers of a micro-batch.
    """

    overrides: tuple[str, ...]
    forward: int
    backward: int
    rows_copied: int = 0
    numbers_copied: int = 0

    @property
    def not_deterministic(self) -> set[str]:
        """The operators that a step must not have on a GPU."""
        # Experts sum up numbers of rows, and torch refuses a cumulative sum of floats alone.
        has_experts = {EXPERTS[0], LATENTS[0]} & set(self.overrides)
        allowed = {"aten::cumsum"} if has_experts else set()
        return NOT_DETERMINISTIC - allowed


LAYOUTS = {
    "one process": Layout((TWO_MICRO_BATCHES,), 2 * 22, 2 * 39 + 9),
    "hsdp, window, documents, selective": Layout(
        (
            *("mesh.dp_replicate=2", "mesh.dp_shard=2", "model.window=24", DOCUMENTS, BF16),
            'memory.activation_checkpoint="selective"',
        ),
        *(23, 52),
    ),
    "tp, muon": Layout(("mesh.tp=2", "mesh.dp_shard=2", MUON), 2 * 29, 2 * 45 + 9),
    # With a single rank, FSDP casts every parameter and gradient alone.
    "pp 1F1B, documents": Layout(
        ("mesh.pp=2", 'parallel.schedule="1F1B"', DOCUMENTS, BF16), 119, 230
    ),
    # Two blocks, of two stages. Gradients of weights are computed outside of autograd's backward,
    # and count as forward.
    "pp ZBV": Layout(
        ("mesh.pp=2", 'parallel.schedule="ZBVZeroBubble"', "mesh.dp_shard=2", "model.n_layers=4"),
        *(126, 166),
    ),
    "cp ring": Layout(("mesh.cp=2", BF16, TWO_MICRO_BATCHES), 2 * 35, 2 * 60 + 9),
    "cp allgather, documents": Layout(
        ("mesh.cp=2", 'parallel.cp_method="allgather"', DOCUMENTS, BF16, TWO_MICRO_BATCHES),
        *(2 * 26, 2 * 54 + 9),
    ),
    # The second block, and each one more, has experts. It has four norms (see "float8").
    "cp allgather of latents, documents": Layout(
        (*LATENTS, "mesh.cp=2", 'parallel.cp_method="allgather"', DOCUMENTS, TWO_MICRO_BATCHES),
        *(184, 248 + 8),
    ),
    "cp ring of latents": Layout((*LATENTS, "mesh.cp=2", TWO_MICRO_BATCHES), *(212, 290 + 8)),
    "cp ulysses, window": Layout(
        ("mesh.cp=2", 'parallel.cp_method="ulysses"', "model.window=24", BF16, TWO_MICRO_BATCHES),
        *(2 * 31, 2 * 54 + 9),
    ),
    # The gradients of a block are rounded, sent and summed in each micro-batch.
    "gradients in bfloat16": Layout(
        (*FSDP, "parallel.zero=2", 'precision.reduce="bfloat16"'), 43, 87
    ),
    # In eager code, as here, 13 operators round a matrix: 14 matrices in forward, 14 in backward.
    # From torch 2.15 on, gradients of norms are float32: 2 more casts in each micro-batch.
    "float8": Layout((*FSDP, "mesh.tp=2", 'precision.matmul="float8"'), 2 * 231, 2 * 269 + 9 + 4),
    "full checkpointing": Layout((*FSDP, FULL), 2 * 23, 2 * 58 + 9),
    # In eager code, the outputs of a token's two experts are added up one after the other.
    "experts, one process": Layout((*EXPERTS, TWO_MICRO_BATCHES), 147, 176),
    "experts, ep, checkpointed": Layout(
        (*EXPERTS, "mesh.dp_shard=2", "mesh.ep=2", FULL), 151, 270, rows_copied=4
    ),
    "experts, balance loss, documents": Layout(
        (*EXPERTS, "model.balance_loss=0.01", DOCUMENTS, TWO_MICRO_BATCHES),
        *(177, 188),
        numbers_copied=2 * 2,
    ),
}

# What a step copies between host and device: the batch, and its sums over the world.
TO_DEVICE = Copy("aten::_to_copy", "cpu", "cuda", "batches.py:move_to_device")
NUMBERS = Copy("aten::copy_", "cpu", "cuda", "to_device.py:copy_to_device_of")
TO_HOST = Copy("aten::_to_copy", "cuda", "cpu", OF_HOST_COPY)


def run_ranks(pool: Pool, library: Path, overrides: tuple[str, ...]) -> tuple[list[Seen], Seen]:
    """Run a rank of each stage on a GPU and on the CPU, and the first with more blocks on a GPU.

    Returns:
        What each rank does, on the GPU and on the CPU in turns; and what the first one does with
        one more block in each stage.
    """
    recipe = recipe_of(BASE, (*SIZES, *overrides))
    deeper, _ = with_more_blocks(recipe)
    ranks = range(0, recipe.world_size, recipe.world_size // recipe.mesh.pp)
    jobs = [Job(recipe, rank, on_gpu) for rank in ranks for on_gpu in (True, False)]
    arguments = {"jobs": [*jobs, Job(deeper)], "library": library}
    *seen, of_deeper = pool.run(counts.run_one_of, arguments, world_size=len(jobs) + 1)
    return seen, of_deeper


def check_launched(shallow: Seen, deep: Seen, layout: Layout) -> None:
    """Check that a block launches at most as many operators, and nothing in the update.

    Muon updates each matrix by itself.
    """
    launched = launched_by_more_blocks(shallow, deep)
    forward, backward = launched[Phase.FORWARD], launched[Phase.BACKWARD]
    assert 0 < forward.total() <= layout.forward, forward
    assert 0 < backward.total() <= layout.backward, backward
    assert bool(launched[Phase.UPDATE]) == (MUON in layout.overrides)


@some_of(8, "name", LAYOUTS)
def test_a_step_copies_only_its_batch_and_sends_what_it_sends_on_a_cpu(
    name: str, pool: Pool, library: Path
) -> None:
    layout = LAYOUTS[name]
    seen, deeper = run_ranks(pool, library, layout.overrides)
    for on_gpu, on_cpu in zip(seen[::2], seen[1::2], strict=True):
        copies = {TO_DEVICE: 3, NUMBERS: layout.numbers_copied, TO_HOST: layout.rows_copied + 1}
        assert on_gpu.step.copies == +Counter(copies)
        assert on_gpu.step.waits == layout.rows_copied + 1
        assert on_gpu.evaluation.copies == +Counter({TO_DEVICE: 3, TO_HOST: layout.rows_copied})
        assert on_gpu.step.collectives == on_cpu.step.collectives
        assert on_gpu.evaluation.collectives == on_cpu.evaluation.collectives
        assert not layout.not_deterministic & set(on_gpu.step.operators)
    check_launched(seen[0], deeper, layout)
