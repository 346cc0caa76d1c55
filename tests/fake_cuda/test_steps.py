"""A step and an evaluation of composed recipes on CUDA tensors without data, rank by rank.

What no test on a CPU sees: a copy between host and device, a value that the host reads from the
device, other collectives than on a CPU, or more operators.
"""

from collections import Counter
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
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
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "fsdp": ("mesh.dp_shard=2", BF16),
    "hsdp, window, documents": (
        "mesh.dp_replicate=2",
        "mesh.dp_shard=2",
        "model.window=24",
        DOCUMENTS,
        BF16,
    ),
    "tp": ("mesh.tp=2", "mesh.dp_shard=2"),
    "pp 1F1B, documents": ("mesh.pp=2", 'parallel.schedule="1F1B"', DOCUMENTS, BF16),
    "pp ZBV": (
        "mesh.pp=2",
        'parallel.schedule="ZBVZeroBubble"',
        "mesh.dp_shard=2",
        "model.n_layers=4",
    ),
    "cp ring": ("mesh.cp=2", BF16),
    "cp allgather, documents": ("mesh.cp=2", 'parallel.cp_method="allgather"', DOCUMENTS, BF16),
    "cp ulysses, window": ("mesh.cp=2", 'parallel.cp_method="ulysses"', "model.window=24", BF16),
    "hsdp, selective": (
        "mesh.dp_replicate=2",
        "mesh.dp_shard=2",
        BF16,
        'memory.activation_checkpoint="selective"',
    ),
    "gradients in bfloat16": (
        "mesh.dp_shard=2",
        "parallel.zero=2",
        BF16,
        'precision.reduce="bfloat16"',
    ),
    "float8": ("mesh.tp=2", "mesh.dp_shard=2", BF16, 'precision.matmul="float8"'),
    "full checkpointing": ("mesh.dp_shard=2", BF16, 'memory.activation_checkpoint="full"'),
}

# What one more block of a rank launches on the device at most, in forward and backward of a step.
# In backward, each micro-batch after the first one also adds to the gradients of 9 parameters.
LAUNCHED = {
    "one process": (4 * 22, 4 * 39 + 3 * 9),
    "fsdp": (2 * 23, 2 * 40 + 9),
    "hsdp, window, documents": (23, 41),
    "tp": (2 * 29, 2 * 45 + 9),
    # With a single rank, FSDP casts every parameter and gradient alone.
    "pp 1F1B, documents": (119, 230),
    # Two blocks, of two stages. Gradients of weights are computed outside of autograd's backward,
    # and count as forward.
    "pp ZBV": (126, 166),
    "cp ring": (4 * 35, 4 * 60 + 3 * 9),
    "cp allgather, documents": (4 * 26, 4 * 54 + 3 * 9),
    "cp ulysses, window": (4 * 31, 4 * 54 + 3 * 9),
    "hsdp, selective": (23, 52),
    # The gradients of a block are rounded, sent and summed in each micro-batch.
    "gradients in bfloat16": (43, 87),
    # In eager code, as here, 13 operators round a matrix: 14 matrices in forward, 14 in backward.
    # From torch 2.15 on, gradients of norms are float32: 2 more casts in each micro-batch.
    "float8": (2 * 231, 2 * 269 + 9 + 4),
    "full checkpointing": (2 * 23, 2 * 58 + 9),
}

# What a step copies between host and device: the batch, and its sums over the world.
TO_DEVICE = Copy("aten::_to_copy", "cpu", "cuda", "batches.py:move_to_device")
TO_HOST = Copy("aten::_to_copy", "cuda", "cpu", OF_HOST_COPY)


# Operators that torch refuses on a GPU under ``run.deterministic`` (the documentation of
# ``torch.use_deterministic_algorithms``), as far as a language model might call them.
NOT_DETERMINISTIC = {
    *("aten::bincount", "aten::cumsum", "aten::embedding_bag", "aten::histc", "aten::kthvalue"),
    *("aten::median", "aten::nll_loss2d_forward", "aten::put_", "aten::scatter_reduce"),
}

# With experts, each layer also copies numbers of rows to the host for each micro-batch, but not
# again when it is recomputed.
EXPERTS = (
    *('model.architecture="moe"', 'model.preset="debug-moe"', "model.expert_ffn=96", BF16),
    *("model.n_layers=2", "data.seq_len=64", "data.global_batch=4"),
)
EXPERTS_LAUNCHED = {
    "one process": (285, 358),
    "ep": (147, 164),
    "ep, checkpointed": (147, 264),
}
EXPERT_LAYOUTS: dict[str, tuple[tuple[str, ...], int]] = {
    "one process": ((), 0),
    "ep": (("mesh.dp_shard=2", "mesh.ep=2"), 4),
    "ep, checkpointed": (
        ("mesh.dp_shard=2", "mesh.ep=2", 'memory.activation_checkpoint="full"'),
        4,
    ),
}


def run_ranks(pool: Pool, library: Path, *overrides: str) -> tuple[list[Seen], Seen]:
    """Run a rank of each stage on a GPU and on the CPU, and the first with more blocks on a GPU.

    Returns:
        What each rank does, on the GPU and on the CPU in turns; and what the first one does with
        one more block in each stage.
    """
    recipe = recipe_of(BASE, overrides)
    deeper, _ = with_more_blocks(recipe)
    ranks = range(0, recipe.world_size, recipe.world_size // recipe.mesh.pp)
    jobs = [Job(recipe, rank, on_gpu) for rank in ranks for on_gpu in (True, False)]
    arguments = {"jobs": [*jobs, Job(deeper)], "library": library}
    *seen, of_deeper = pool.run(counts.run_one_of, arguments, world_size=len(jobs) + 1)
    return seen, of_deeper


def check_launched(shallow: Seen, deep: Seen, most: tuple[int, int]) -> None:
    """Check that a block launches at most as many operators, and nothing in the update."""
    launched = launched_by_more_blocks(shallow, deep)
    forward, backward = launched[Phase.FORWARD], launched[Phase.BACKWARD]
    assert 0 < forward.total() <= most[0], forward
    assert 0 < backward.total() <= most[1], backward
    assert not launched[Phase.UPDATE]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_copies_only_its_batch_and_sends_what_it_sends_on_a_cpu(
    name: str, pool: Pool, library: Path
) -> None:
    seen, deeper = run_ranks(pool, library, *SIZES, *LAYOUTS[name])
    for on_gpu, on_cpu in zip(seen[::2], seen[1::2], strict=True):
        assert on_gpu.step.copies == Counter({TO_DEVICE: 3, TO_HOST: 1})
        assert on_gpu.step.waits == 1
        assert on_gpu.evaluation.copies == Counter({TO_DEVICE: 3})
        assert on_gpu.step.collectives == on_cpu.step.collectives
        assert on_gpu.evaluation.collectives == on_cpu.evaluation.collectives
        assert not NOT_DETERMINISTIC & set(on_gpu.step.operators)
    check_launched(seen[0], deeper, LAUNCHED[name])


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_copy_numbers_of_rows_and_send_what_they_send_on_a_cpu(
    name: str, pool: Pool, library: Path
) -> None:
    sets, of_rows = EXPERT_LAYOUTS[name]
    (on_gpu, on_cpu), deeper = run_ranks(pool, library, *EXPERTS, *sets)
    assert on_gpu.step.copies == Counter({TO_DEVICE: 3, TO_HOST: of_rows + 1})
    assert on_gpu.step.waits == of_rows + 1
    assert on_gpu.evaluation.copies == +Counter({TO_DEVICE: 3, TO_HOST: of_rows})
    assert on_gpu.step.collectives == on_cpu.step.collectives
    assert on_gpu.evaluation.collectives == on_cpu.evaluation.collectives
    check_launched(on_gpu, deeper, EXPERTS_LAUNCHED[name])


def test_muon_waits_for_nothing_and_sends_what_it_sends_on_a_cpu(pool: Pool, library: Path) -> None:
    layout = (*LAYOUTS["tp"], 'optim.name="muon"')
    (on_gpu, on_cpu), _ = run_ranks(pool, library, *SIZES, *layout)
    assert on_gpu.step.copies == Counter({TO_DEVICE: 3, TO_HOST: 1})
    assert on_gpu.step.collectives == on_cpu.step.collectives
    assert sum(each.operation == "all_to_all" for each in on_gpu.step.collectives) == 2
