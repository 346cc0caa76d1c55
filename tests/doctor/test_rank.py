"""What rank 0 finds out of the disk: the place of the checkpoints, their size, and their number."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.doctor.rank import disk_of
from composer3d.models.registry import architecture
from composer3d.planner.memory import GIB
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import Recipe
from composer3d.training.build import whole_model
from tests.planner import setups


def recipe_of(*sets: str) -> Recipe:
    return setups.recipe_of("debug-1-single", *sets)


def saved_bytes(recipe: Recipe) -> int:
    """Return the bytes of all parameters, and of the state that a checkpoint has of them."""
    optimizer: Any = SimpleNamespace(
        facts=recipe.optim.optimizer,
        matrix_names=matrices_of(
            architecture(recipe.model.architecture), recipe.model, recipe.optim
        ),
        state=defaultdict(dict),
    )
    parameters = dict(whole_model(recipe).named_parameters())
    state = optimizer_state(optimizer, parameters.items()).values()
    # Counters of steps are no part of the estimate.
    return sum(each.nbytes for each in (*parameters.values(), *state) if each.dim())


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("precision.params=float64", "model.tied=true"),
        ('optim.train=["blocks.1.attn.*"]',),
        ("optim.name=muon", 'optim.train=["blocks.0.*", "first.*"]'),
        ('model.architecture="deepseek"', 'model.preset="debug-deepseek"'),
    ],
)
def test_the_size_is_that_of_the_tensors_that_are_saved(sets: tuple[str, ...]) -> None:
    recipe = recipe_of(*sets)
    assert disk_of(recipe).checkpoint_gib * GIB == pytest.approx(saved_bytes(recipe), rel=1e-12)


@pytest.mark.parametrize("is_url", [False, True])
def test_checkpoints_that_are_there_need_no_room_again(tmp_path: Path, is_url: bool) -> None:
    recipe = recipe_of(f"run.out_dir={tmp_path}", "checkpoint.keep=2")
    folder = recipe.run.folder / "checkpoints"
    if is_url:
        # A mounted folder is a disk too.
        recipe = recipe_of("checkpoint.keep=2", f"checkpoint.folder=file://{tmp_path}/all")
        folder = tmp_path / "all" / recipe.run.name
    disk = disk_of(recipe)
    assert (disk.folder, disk.kept, disk.present, disk.missing) == (str(tmp_path), 3, 0, 3)
    assert disk.free_gib is not None
    for number in range(1, 4):
        (folder / f"step-{number:08}").mkdir(parents=True)
        # A folder without a manifest is no checkpoint: the next save removes it.
        assert disk_of(recipe).present == number - 1
        (folder / f"step-{number:08}" / "manifest.json").touch()
        disk = disk_of(recipe)
        assert (disk.folder, disk.present) == (str(folder), number)
        # The next one is complete before one is removed.
        assert disk.missing == max(1, 3 - number)


def test_an_object_store_needs_no_disk(tmp_path: Path) -> None:
    disk = disk_of(recipe_of(f"run.out_dir={tmp_path}", "checkpoint.folder=s3://bucket/folder"))
    assert disk.folder == "s3://bucket/folder/debug-1-single"
    assert disk.free_gib is None
    assert disk.checkpoint_gib > 0
