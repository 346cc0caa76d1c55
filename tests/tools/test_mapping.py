"""``tools/mapping.py``: its table, and its recipe."""

from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from tools import mapping
from tools.mapping import Placement, Row


def test_the_error_is_that_of_the_ratio() -> None:
    row = Row("tp", Placement(2.0, 1.0), Placement(8.0, 5.0))
    assert (row.measured_ratio, row.predicted_ratio) == (4.0, 5.0)
    assert row.error == pytest.approx(0.25)
    assert mapping.table([row], 200.0)[-1] == (
        "| tp | 2.00 s (1.00) | 8.00 s (5.00) | 4.00 | 5.00 | +25% |"
    )


@pytest.mark.parametrize("axis", mapping.AXES)
def test_each_axis_has_a_recipe_of_two_ranks(tmp_path: Path, axis: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(mapping.RECIPE)
    sets = [f"mesh.{other}={2 if other == axis else 1}" for other in mapping.AXES]
    recipe = load(path, sets).recipe
    assert recipe.world_size == 2
    # Ranks of tp and of data do the same work.
    assert recipe.data.global_batch % (2 * recipe.data.micro_batch) == 0
