"""Ranks with another recipe or other software are refused, with the key that differs."""

import os

import pytest
import torch

from composer3d.facts.errors import MeshError
from composer3d.recipe.resolve import load
from composer3d.runtime import agreement
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import describe_ranks, pool_world
from tools.prove.paths import RECIPE

BATCH = "data.global_batch=12"


def agree(other: list[str], version: str = "", variable: str = "") -> None:
    """A task: rank 1 has another recipe, version or variable."""
    is_other = os.environ["RANK"] == "1"
    recipe = load(RECIPE, ["mesh.dp_shard=3", BATCH, *(other if is_other else [])]).recipe
    if is_other and version:
        right = agreement.versions
        agreement.versions = lambda: right() | {"torch": version}
    if is_other and variable:
        os.environ["NCCL_ALGO"] = variable
    with pool_world():
        agreement.check_agreement(recipe)


def test_the_same_recipe_is_accepted_and_paths_may_differ(pool: Pool) -> None:
    arguments = {"other": ["run.out_dir=/elsewhere"]}
    assert pool.run(agree, arguments, world_size=3) == [None] * 3


def test_what_differs_is_named(pool: Pool) -> None:
    sets = ["optim.lr=0.5", "mesh.dp_shard=1", "mesh.pp=3", "model.n_layers=3"]
    arguments = {"other": sets, "version": "2.99", "variable": "Tree"}
    with pytest.raises(WorkerError) as caught:
        pool.run(agree, arguments, world_size=3)
    error = caught.value.user_error
    assert isinstance(error, MeshError)
    start = "the recipe and the environment must be the same on every rank: "
    assert all(line.startswith(start) for line in error.lines)
    recipe = load(RECIPE).recipe
    of_ranks = [
        ("mesh.dp_shard is 3", "1"),
        ("mesh.pp is 1", "3"),
        (f"model.n_layers is {recipe.model.n_layers}", "3"),
        (f"optim.lr is {recipe.optim.lr}", "0.5"),
        (f"the version of torch is {torch.__version__}", "2.99"),
        ("NCCL_ALGO is absent", "Tree"),
    ]
    expected = [f"{start}{usual} on ranks 0, 2; {other} on rank 1" for usual, other in of_ranks]
    assert list(error.lines) == expected


def test_ranks_are_described_in_few_words() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert describe_ranks(range(0, 100, 2)).endswith("14 and 42 more")
