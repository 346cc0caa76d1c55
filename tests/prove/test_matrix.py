"""The covering matrix is complete, its refusals have messages, and a slice of it is exact."""

from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.spec.errors import RecipeError
from composer3d.verify.proof import verify_layout
from tools.prove.matrix import cover as matrix
from tools.prove.paths import RECIPE, ROOT

COVER = matrix.read()


def id_of(row: matrix.Row) -> str:
    return ", ".join(
        f"{column} {value}" for column, value in row.items() if value != matrix.COLUMNS[column][0]
    )


def test_the_list_holds_all_legal_targets() -> None:
    assert len(COVER.rows) >= 200
    assert matrix.uncovered(COVER) == []
    assert all(matrix.makes_sense(row) and matrix.is_legal(row) for row in COVER.rows)


def test_a_list_without_a_schedule_is_incomplete() -> None:
    incomplete = matrix.Cover(
        tuple(row for row in COVER.rows if row["schedule"] != "DualPipeV"), COVER.refused
    )
    assert matrix.uncovered(incomplete)


def test_a_line_holds_a_whole_row() -> None:
    assert matrix.from_text(matrix.to_text(COVER)) == COVER
    row = COVER.rows[-1]
    assert matrix.recipe_of(row) == load(RECIPE, matrix.sets(row), check_files=False).recipe


@pytest.mark.parametrize(("target", "row"), COVER.refused, ids=lambda value: str(value)[:60])
def test_an_illegal_layout_is_refused_with_a_message(
    target: matrix.Target, row: matrix.Row
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(RECIPE, matrix.sets(row), check_files=False)
    assert all(row[column] == value for column, value in target)
    assert any(" use " in line or "remove" in line for line in caught.value.lines), caught.value


@pytest.mark.parametrize("row", matrix.slice_of(COVER.rows), ids=id_of)
def test_a_layout_of_the_matrix_is_exact(
    pool: Pool, references: Path, row: matrix.Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name schedule files relative to it
    sets, steps = matrix.sets(row), matrix.STEPS
    verdict = verify_layout(pool, references, str(RECIPE), sets, dtype="float64", steps=steps)
    assert verdict.passed, verdict
