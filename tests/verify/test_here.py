"""``verify --here``: the recipe's own mesh, proven on the ranks of a job."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from composer3d.facts.errors import UserError
from composer3d.models.registry import architecture
from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from composer3d.runtime import process_group
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from composer3d.verify import here
from composer3d.verify.judge import Verdict
from composer3d.verify.shrink import HERE_LIMIT, shrink_on_own_mesh
from tools.prove.faults.exchanges import reduce_scatter_twice
from tools.prove.paths import MOE_RECIPE, RECIPE, ROOT


def prove(
    recipe: str,
    sets: list[str],
    dtype: str = "float64",
    fault: Callable[[], None] | None = None,
    other: str = "",
) -> Verdict | None:
    """A task: prove a recipe here; rank 1 has one more override."""
    # Other tests run beside this one, and threads of the reference would wait for their cores.
    here.usable_cores = lambda: 1
    if fault is not None:
        fault()
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    sets = [*sets, other] if other and rank == 1 else sets
    with pool_world() as device:
        full = load(recipe, sets, world_size=size, check_files=False).recipe
        return here.prove_here(full, device, dtype, steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "sets", "dtype"),
    [
        (RECIPE, ["mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2"], "float64"),
        (RECIPE, ["mesh.cp=2", "mesh.tp=2"], "float32"),
        (RECIPE, ["mesh.dp_shard=2", 'optim.train=["blocks.1.*"]'], "float32"),
        (MOE_RECIPE, ["mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=2"], "float32"),
    ],
)
def test_a_mesh_is_exact_here(pool: Pool, recipe: Path, sets: list[str], dtype: str) -> None:
    full = load(recipe, sets, check_files=False).recipe
    arguments = {"recipe": str(recipe), "sets": sets, "dtype": dtype}
    verdict, *others = pool.run(prove, arguments, world_size=full.world_size)
    assert verdict.passed, verdict
    assert verdict.world_size == full.world_size
    assert verdict.dtype == dtype
    assert set(others) == {None}


def count_received(recipe: str, sets: list[str]) -> tuple[bool, int]:
    """A task: whether the proof passes, where it is known, and the numbers that this rank gets."""
    received = []
    send_to_each = process_group.send_to_each

    def count(make: Callable[[int], torch.Tensor] | None, own: torch.Tensor) -> None:
        received.append(own.numel())
        send_to_each(make, own)

    process_group.send_to_each = count
    verdict = prove(recipe, sets)
    (numbers,) = received
    return verdict is None or verdict.passed, numbers


def test_a_rank_receives_its_own_parts_of_the_reference(pool: Pool) -> None:
    sets = ["mesh.pp=2", "mesh.dp_shard=2"]
    arguments = {"recipe": str(RECIPE), "sets": sets}
    of_ranks = pool.run(count_received, arguments, world_size=4)
    assert all(passed for passed, _ in of_ranks)
    small = shrink_on_own_mesh(load(RECIPE, sets, check_files=False).recipe)
    model = architecture(small.model.architecture).build(
        small.model, dtype=torch.float64, device="meta"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # The initial weights, and two steps with gradients and weights. Each element is of one rank.
    assert sum(numbers for _, numbers in of_ranks) == 5 * parameters
    assert max(numbers for _, numbers in of_ranks) < 0.8 * 5 * parameters / 2


def test_a_fault_that_no_message_shows_is_found(pool: Pool) -> None:
    arguments = {"recipe": str(RECIPE), "sets": ["mesh.tp=2"], "fault": reduce_scatter_twice}
    verdict, _ = pool.run(prove, arguments, world_size=2)
    assert not verdict.passed
    assert not verdict.refused
    assert verdict.error is not None
    assert verdict.worst_parameter is not None


def test_ranks_with_another_recipe_are_refused(pool: Pool) -> None:
    arguments = {"recipe": str(RECIPE), "sets": ["mesh.dp_shard=2"], "other": "optim.lr=0.5"}
    with pytest.raises(WorkerError) as caught:
        pool.run(prove, arguments, world_size=2)
    assert caught.value.user_error is not None
    (line,) = caught.value.user_error.lines
    assert "optim.lr is" in line
    assert line.endswith("0.5 on rank 1")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_a_recipe_keeps_its_own_mesh(path: Path) -> None:
    full = load(path, check_files=False).recipe
    if full.world_size > HERE_LIMIT:
        words = f"at most 1,024 processes, and this one has {full.world_size:,}"
        with pytest.raises(UserError, match=words):
            shrink_on_own_mesh(full)
        return
    small = shrink_on_own_mesh(full)
    assert small.mesh == full.mesh
    assert violations(small) == []
    assert small.model.dim <= 1024
    assert replace(small.parallel, stages=None, async_tp=False) == replace(
        full.parallel, stages=None, async_tp=False
    )
