"""What bounds a layout, in words: the links of the device that an axis really sends over."""

import pytest

from composer3d.planner.search import Device, price
from tests.planner.setups import device, recipe_of

FSDP = "gathers and reductions of FSDP over"
REPLICAS = "mesh.dp_shard=1 mesh.dp_replicate=8 data.global_batch=16 data.seq_len=512"


@pytest.mark.parametrize(
    ("gpu", "recipe", "sets", "words"),
    [
        # 16 devices are two nodes. Shards stay inside of each, and only the replicas meet.
        (
            "H100",
            "llama3-8b-8-fsdp",
            "mesh.dp_replicate=2 data.global_batch=64",
            f"{FSDP} NVLink and of replicas over network",
        ),
        ("H100", "llama3-8b-8-fsdp", "mesh.dp_shard=16 data.global_batch=16", f"{FSDP} network"),
        (
            "L40S",
            "llama3-8b-8-fsdp",
            "mesh.dp_shard=1 mesh.dp_replicate=8 parallel.zero=0 data.global_batch=8 "
            "data.seq_len=512",
            "reductions of replicas over PCIe",
        ),
        (
            "H100-80GB PCIe",
            "llama3-8b-8-fsdp",
            "mesh.dp_shard=1 mesh.tp=8",
            "tp collectives over PCIe",
        ),
        (
            "A100-80GB",
            "llama3-8b-8-fsdp",
            "mesh.dp_shard=1 mesh.dp_replicate=16 parallel.zero=1 data.global_batch=16 "
            "data.seq_len=512",
            "reductions of replicas over network",
        ),
        (
            "MI300X",
            "llama3-8b-8-fsdp",
            "mesh.dp_shard=1 mesh.tp=8",
            "tp collectives over Infinity Fabric",
        ),
        ("CPU", "quickstart", "mesh.pp=1 mesh.tp=4", "tp collectives over host memory"),
    ],
)
def test_what_bounds_a_layout_names_the_links_of_its_groups(
    gpu: str, recipe: str, sets: str, words: str
) -> None:
    plan = price(recipe_of(recipe, *sets.split()), Device(hardware=device(gpu)))
    before, _, share = plan.bound_by.rpartition(" ")
    assert before == words
    assert share.endswith("%")


@pytest.mark.parametrize(
    ("gpu", "recipe", "sets", "words"),
    [
        ("H100", "qwen3-30b-a3b-16-ep-pp", "", "less ep"),
        (
            "H100",
            "qwen3-30b-a3b-16-ep-pp",
            "mesh.pp=1 mesh.dp_shard=16 mesh.ep=16",
            "ep inside a node",
        ),
        ("L40S", "llama3.2-1b-8-fsdp", f"{REPLICAS} parallel.zero=0", "more tokens in a step"),
        ("L40S", "llama3.2-1b-8-fsdp", f"{REPLICAS} parallel.zero=1", "more tokens in a step"),
        (
            "H100",
            "llama3-8b-8-fsdp",
            "mesh.dp_shard=16 data.global_batch=16",
            "more tokens in a micro-batch, or shards over fewer ranks (dp_replicate)",
        ),
    ],
)
def test_the_next_lever_is_one_that_the_layout_has(
    gpu: str, recipe: str, sets: str, words: str
) -> None:
    job = recipe_of(recipe, *sets.split())
    assert price(job, Device(hardware=device(gpu))).lever == words
