"""A step and an evaluation of composed recipes on CUDA tensors without data, rank by rank.

What no test on a CPU sees: a copy between host and device, a value that the host reads from the
device, other collectives than on a CPU, or far more operators.
"""

from collections import Counter
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import recipe_of
from tests.fake_cuda import device, jobs
from tests.fake_cuda.jobs import Copy, Seen
from tools.prove.paths import ROOT

pytestmark = pytest.mark.skipif(device.compiler() is None, reason="no C++ compiler here")

BASE = ROOT / "recipes" / "debug-1-single.toml"
SIZES = ("model.n_layers=2", "data.seq_len=64", "data.global_batch=4")

BF16 = 'precision.compute="bfloat16"'
DOCUMENTS = 'data.packing="documents"'
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
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
    "full checkpointing": ("mesh.dp_shard=2", BF16, 'memory.activation_checkpoint="full"'),
}

# What a step copies between host and device: the batch, and its sums over the world.
TO_DEVICE = Copy("aten::_to_copy", "cpu", "cuda", "batches.py:move_to_device")
TO_HOST = Copy("aten::_to_copy", "cuda", "cpu", "step.py:send_to_host")


# Operators that torch refuses on a GPU under ``run.deterministic`` (the documentation of
# ``torch.use_deterministic_algorithms``), as far as a language model might call them.
NOT_DETERMINISTIC = {
    *("aten::bincount", "aten::cumsum", "aten::embedding_bag", "aten::histc", "aten::kthvalue"),
    *("aten::median", "aten::nll_loss2d_forward", "aten::put_", "aten::scatter_reduce"),
}

# With experts, a layer also copies numbers of rows to the host, for each forward and recomputation,
# and the order of rows back.
EXPERTS = (
    *('model.architecture="moe"', 'model.preset="debug-moe"', "model.expert_ffn=96", BF16),
    *("model.n_layers=2", "data.seq_len=64", "data.global_batch=4"),
)
ROWS = Copy("aten::_to_copy", "cuda", "cpu", "dispatch.py:exchange")
ORDER = Copy("aten::_to_copy", "cpu", "cuda", "dispatch.py:exchange")
EXPERT_LAYOUTS: dict[str, tuple[tuple[str, ...], Counter[Copy], Counter[Copy]]] = {
    "one process": ((), Counter(), Counter()),
    "ep": (
        ("mesh.dp_shard=2", "mesh.ep=2"),
        Counter({ROWS: 4, ORDER: 4}),
        Counter({ROWS: 4, ORDER: 4}),
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return device.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_copies_only_its_batch_and_sends_what_it_sends_on_a_cpu(
    name: str, pool: Pool, library: Path
) -> None:
    recipe = recipe_of(BASE, (*SIZES, *LAYOUTS[name]))
    arguments = {"recipe": recipe, "library": library}
    seen: list[Seen] = pool.run(jobs.run_ranks, arguments, world_size=2 * recipe.mesh.pp)
    for on_gpu, on_cpu in zip(seen[::2], seen[1::2], strict=True):
        assert on_gpu.step.copies == Counter({TO_DEVICE: 3, TO_HOST: 1})
        assert on_gpu.evaluation.copies == Counter({TO_DEVICE: 3})
        assert on_gpu.step.collectives == on_cpu.step.collectives
        assert on_gpu.evaluation.collectives == on_cpu.evaluation.collectives
        assert not NOT_DETERMINISTIC & set(on_gpu.step.operators)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_copy_numbers_of_rows_and_send_what_they_send_on_a_cpu(
    name: str, pool: Pool, library: Path
) -> None:
    sets, of_step, of_evaluation = EXPERT_LAYOUTS[name]
    arguments = {"recipe": recipe_of(BASE, (*EXPERTS, *sets)), "library": library}
    seen: list[Seen] = pool.run(jobs.run_ranks, arguments, world_size=2)
    on_gpu, on_cpu = seen
    assert on_gpu.step.copies == of_step + Counter({TO_DEVICE: 3, TO_HOST: 1})
    assert on_gpu.evaluation.copies == of_evaluation + Counter({TO_DEVICE: 3})
    assert on_gpu.step.collectives == on_cpu.step.collectives
    assert on_gpu.evaluation.collectives == on_cpu.evaluation.collectives
