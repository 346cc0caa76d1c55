"""The ledger of dtypes: nothing computes narrow but what its tables allow, on CPU and GPU."""

import os
from collections.abc import Sequence

import pytest

from composer3d.runtime.launch import Pool
from tools.fake_cuda import device
from tools.prove.dtypes import (
    NARROW,
    WIDE,
    Job,
    Operation,
    judge,
    narrow_rule,
    operations_of,
    wide_rule,
)
from tools.prove.paths import MOE_RECIPE, RECIPE

SMALL = "model.n_layers=2 data.seq_len=32 data.micro_batch=1 precision.compute=bfloat16"
# Those of ``ON_GPU`` run on a GPU in name as well: it has other kernels.
DENSE = [
    "data.global_batch=2",
    "data.global_batch=2 memory.loss_chunks=2 memory.activation_checkpoint=full",
    "data.global_batch=2 mesh.tp=2 precision.matmul=float8",
    "mesh.tp=2 mesh.cp=2 mesh.dp_shard=2 data.global_batch=4 data.packing=documents",
    "mesh.tp=2 mesh.dp_replicate=2 parallel.zero=0 parallel.sequence_parallel=false "
    "data.global_batch=4 model.qkv_bias=true model.qk_norm=true",
    "mesh.pp=2 mesh.dp_shard=2 parallel.schedule=ZBVZeroBubble model.n_layers=4 model.tied=true "
    "model.qkv_bias=true data.global_batch=8",
    "mesh.cp=2 parallel.cp_method=ulysses model.window=20 data.global_batch=2",
    "mesh.dp_shard=2 parallel.zero=2 precision.reduce=bfloat16 data.global_batch=4",
    "model.architecture=gemma3 model.preset=debug-gemma3 mesh.tp=2 data.global_batch=2",
]
EXPERTS = [
    "data.global_batch=2 model.expert_ffn=96",
    "mesh.tp=2 mesh.ep=2 model.router=sigmoid model.router_bias=true model.shared_ffn=48 "
    "data.global_batch=2",
]
ON_GPU = (DENSE[0], DENSE[3], DENSE[6], DENSE[8], EXPERTS[1])


def operations_of_one(jobs: Sequence[Job]) -> set[Operation]:
    return operations_of(jobs[int(os.environ["RANK"])])


@pytest.fixture(scope="module")
def seen(pool: Pool, request: pytest.FixtureRequest) -> dict[str, set[Operation]]:
    """What each layout does, on the CPU, and with a compiler also on a GPU in name."""
    libraries = [None]
    if device.compiler() is not None:
        libraries.append(request.getfixturevalue("library"))
    jobs = [
        Job(recipe, (SMALL + " " + layout).split(), library=library)
        for recipe, layouts in ((RECIPE, DENSE), (MOE_RECIPE, EXPERTS))
        for layout in layouts
        for library in (libraries if layout in ON_GPU else libraries[:1])
    ]
    found = {}
    for begin in range(0, len(jobs), 8):
        some = jobs[begin : begin + 8]
        results = pool.run(operations_of_one, {"jobs": some}, world_size=len(some))
        for job, operations in zip(some, results, strict=True):
            found[f"{' '.join(job.sets)} {'cpu' if job.library is None else 'gpu'}"] = operations
    return found


def test_nothing_computes_narrow_but_what_may(seen: dict[str, set[Operation]]) -> None:
    assert [f"{name}: {line}" for name, found in seen.items() for line in judge(found)] == []


def test_every_row_of_the_tables_is_of_use(seen: dict[str, set[Operation]]) -> None:
    operations = set.union(*seen.values())
    assert {row.what for row in WIDE} == {
        row.what for row in map(wide_rule, operations) if row is not None
    }
    assert {row.what for row in NARROW} == {
        row.what for row in map(narrow_rule, operations) if row is not None
    }
