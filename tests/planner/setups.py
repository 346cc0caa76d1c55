"""Devices and recipes that several tests predict."""

from composer3d.facts import hardware
from composer3d.facts.hardware import Hardware
from composer3d.planner.predict import of_recipe
from composer3d.planner.setup import Setup
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from tools.prove.paths import ROOT


def device(name: str) -> Hardware:
    """Return the row of a device that has links."""
    row = hardware.by_name(name)
    assert row is not None
    assert row.links is not None
    return row


def recipe_of(name: str, *sets: str, world_size: int | None = None) -> Recipe:
    path = str(ROOT / "recipes" / f"{name}.toml")
    return load(path, list(sets), check_files=False, world_size=world_size).recipe


def setup_on(gpu: str, name: str, *sets: str) -> Setup:
    """Return the setup of a recipe on a device."""
    return of_recipe(recipe_of(name, *sets), device(gpu))
