"""A training does not start on ranks that disagree, or on a network that gives wrong values."""

import os
from pathlib import Path

import pytest
import torch

from composer3d.facts.errors import ExchangeError, MeshError
from composer3d.runtime import exchanges
from composer3d.runtime.launch import Pool, WorkerError
from tests.training.jobs import RECIPE, built_run


def start(folder: str, other: str = "", axis: str = "") -> None:
    """A task: build the run; rank 1 has another override, or an axis that gives wrong values."""
    rank = int(os.environ["RANK"])
    if axis and rank == 1:
        right = exchanges._values

        def wrong(mesh: object, entry: exchanges.AxisGroup, *rest: object) -> str | None:
            call = exchanges.call

            def off(name: object, x: torch.Tensor, out: torch.Tensor, group: object) -> None:
                call(name, x, out, group)
                out += 1

            exchanges.call = off if entry.axis == axis else call
            finding = right(mesh, entry, *rest)
            exchanges.call = call
            return finding

        exchanges._values = wrong
    with built_run(folder, [other] if other and rank == 1 else []):
        pass


def failure(pool: Pool, folder: Path, **faults: str) -> WorkerError:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh="dp_shard = 2\ntp = 2"))
    with pytest.raises(WorkerError) as caught:
        pool.run(start, {"folder": str(folder), **faults}, world_size=4)
    assert not (folder / "runs").exists()
    return caught.value


def test_ranks_with_another_recipe_do_not_start(pool: Pool, folder: Path) -> None:
    error = failure(pool, folder, other="optim.lr=0.5").user_error
    assert isinstance(error, MeshError)
    (line,) = error.lines
    assert line == (
        "the recipe and the environment must be the same on every rank: optim.lr is 0.001 on "
        "ranks 0, 2-3; 0.5 on rank 1"
    )


@pytest.mark.parametrize(
    ("axis", "collective"), [("tp", "all_gather"), ("fsdp", "all_gather"), ("world", "all_reduce")]
)
def test_wrong_values_end_a_start(pool: Pool, folder: Path, axis: str, collective: str) -> None:
    error = failure(pool, folder, axis=axis).user_error
    assert isinstance(error, ExchangeError)
    assert error.lines[0].startswith("rank 1 (pp0 dp0 cp0 tp1, node 0) on ")
    assert f": {collective} over {axis} (" in error.lines[0]
