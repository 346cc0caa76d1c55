"""The bytes of a dry run, against the allocations of real processes and against sizes."""

import pytest
import torch

from composer3d.dryrun.memory import Kind, MemoryLedger
from composer3d.models.counts import parameters
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import dry_run_of, measure_real_memory, recipe_of
from tests.long import some_of
from tools.prove.paths import ROOT

BASE = ROOT / "recipes" / "debug-1-single.toml"
SIZES = (
    'model.preset="debug-bench"',
    "model.n_layers=4",
    "data.seq_len=256",
    "data.global_batch=8",
)
LAYOUTS = {
    "dp tp pp": ("mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2"),
    "cp pp, all recomputed": (
        "mesh.pp=2",
        "mesh.cp=2",
        "data.global_batch=4",
        'memory.activation_checkpoint="full"',
    ),
    "two blocks a unit": (
        "mesh.dp_shard=4",
        "parallel.zero=3",
        "parallel.fsdp_blocks=2",
        "model.n_layers=5",
        "precision.compute=bfloat16",
    ),
    "every second block recomputed": (
        "mesh.dp_shard=4",
        "parallel.zero=3",
        "model.n_layers=5",
        "precision.compute=bfloat16",
        "memory.activation_checkpoint=every 2 blocks",
    ),
    "first of two stages recomputed": (
        "mesh.pp=2",
        "mesh.dp_shard=2",
        "model.n_layers=5",
        "precision.compute=bfloat16",
        "memory.activation_checkpoint=full in the first 1 stages",
    ),
    "windows in two of three blocks, positions in one of two": (
        "mesh.pp=2",
        "mesh.cp=2",
        "data.global_batch=4",
        "model.window=32",
        "model.full_every=3",
        "model.nope_every=2",
    ),
    "zero bubble, tied, documents": (
        "mesh.pp=2",
        "mesh.dp_shard=2",
        "model.tied=true",
        "data.packing=documents",
        "parallel.schedule=ZBVZeroBubble",
    ),
}

# How much lower than the real peak that of a dry run may be. With the deferred gradients of weights
# real ranks hold 2 to 5% more than the dry run sees; the reason is not known.
WITHIN = dict.fromkeys(LAYOUTS, 0.02) | {"zero bubble, tied, documents": 0.05}
if torch.__version__ >= "2.15":
    # Real ranks of the first stage hold 3.1% less than the dry run sees, for an unknown reason.
    WITHIN["dp tp pp"] = 0.05


def test_storages_count_once_until_they_are_freed() -> None:
    ledger = MemoryLedger(offload=False)
    x = torch.empty(100)
    ledger.see(x)
    ledger.see(x[:50])
    assert ledger.now == (0, 0, 0, 400, 400)
    view = x[10:]
    del x
    y = torch.empty(10)
    ledger.see(y)
    assert ledger.lap() == (0, 0, 0, 440, 440)
    del view
    z = torch.empty(100)
    ledger.see(z)
    assert ledger.now == ledger.lap() == (0, 0, 0, 440, 440 + 0 * len(y) * len(z))
    ledger.mark([y], Kind.GRADIENTS)
    assert ledger.now == (0, 40, 0, 400, 440)
    # A lap begins with what is alive.
    assert ledger.lap() == (0, 40, 0, 440, 440)
    assert ledger.lap() == ledger.now


def test_a_resized_storage_counts_with_its_new_size() -> None:
    ledger = MemoryLedger(offload=False)
    x = torch.empty(100)
    ledger.see(x)
    x.untyped_storage().resize_(0)
    ledger.resize(x.untyped_storage())
    y = torch.empty(50)
    ledger.see(y)
    assert ledger.now == (0, 0, 0, 200, 200)
    assert ledger.lap() == (0, 0, 0, 400, 400)


def test_host_memory_is_not_on_the_device() -> None:
    ledger = MemoryLedger(offload=True)
    x, y = torch.empty(100), torch.empty(10)
    ledger.mark([x], Kind.PARAMETERS)
    ledger.see(y)
    assert ledger.now == (400, 0, 0, 40, 40)


@some_of(3, "name", LAYOUTS)
def test_the_peak_is_that_of_real_allocations(name: str, pool: Pool) -> None:
    recipe = recipe_of(BASE, (*SIZES, *LAYOUTS[name]))
    counted = [dry_run_of(pool, recipe, rank).memory.peak for rank in range(recipe.mesh.pp)]
    expected = [pytest.approx(peak, rel=WITHIN[name]) for peak in counted]
    # gloo's threads release messages when they get to it. So the ranks of a stage, which do the
    # same, reach different peaks; the lowest is that of a rank whose threads were quick. On a busy
    # machine it may take a few runs until a rank of each stage is.
    lowest = [2**62] * recipe.mesh.pp
    for _ in range(4):
        peaks = pool.run(measure_real_memory, {"recipe": recipe}, world_size=recipe.world_size)
        ranks = recipe.world_size // recipe.mesh.pp
        of_stages = [min(peaks[first : first + ranks]) for first in range(0, len(peaks), ranks)]
        lowest = [min(pair) for pair in zip(lowest, of_stages, strict=True)]
        if lowest == expected:
            break
    assert lowest == expected


def test_gradients_in_host_memory_are_not_on_the_device_whatever_reduces_them(pool: Pool) -> None:
    sets = (
        *SIZES,
        "memory.cpu_offload=true",
        "memory.activation_checkpoint=full",
        "precision.compute=bfloat16",
    )

    def peak(*more: str) -> int:
        return dry_run_of(pool, recipe_of(BASE, (*sets, *more))).memory.peak

    scattered = peak("mesh.dp_shard=8")
    # FSDP copies on one rank. If the shards counted, this would be three times as much.
    assert peak("mesh.dp_shard=1") <= scattered
    # Sent narrow, they have two narrow copies for a while.
    assert peak("mesh.dp_shard=8", "precision.reduce=bfloat16") <= 1.25 * scattered


def test_a_gpu_has_one_kernel_for_a_norm(pool: Pool) -> None:
    sets = (*SIZES, "mesh.dp_shard=8", "precision.compute=bfloat16", "model.n_layers=8")
    of_cpu = dry_run_of(pool, recipe_of(BASE, sets)).memory
    of_gpu = dry_run_of(pool, recipe_of(BASE, (*sets, "run.device=cuda"))).memory
    # 17 norms of 256 tokens: a CPU keeps two copies of the stream in float32, a GPU the stream.
    stream = 256 * 256
    assert of_cpu.activations - of_gpu.activations == pytest.approx(
        17 * (2 * 4 - 2) * stream, rel=0.01
    )
    assert of_cpu.params == of_gpu.params


def test_state_is_that_of_the_parameters(pool: Pool) -> None:
    recipe = recipe_of(BASE, (*SIZES, "mesh.dp_shard=8", "parallel.zero=3"))
    memory = dry_run_of(pool, recipe).memory
    shards = parameters(recipe.parameters) / 8 * 4
    # Two moments; and a step counter of 4 bytes for each parameter.
    assert 2 * shards < memory.optimizer < 2 * shards + 1000
    assert memory.params > shards
    assert memory.peak > shards + memory.optimizer
