"""The covering matrix is complete, its refusals have messages, and a slice of it is exact."""

from pathlib import Path

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.planner.layouts import Choices, layouts
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant
from composer3d.runtime.launch import Pool
from composer3d.verify.proof import verify_layout
from composer3d.verify.shrink import shrink
from tests.long import some_of
from tools.prove.faults.catch import STEPS
from tools.prove.matrix import cover as matrix
from tools.prove.matrix import report
from tools.prove.matrix.run import main, numbers_of
from tools.prove.paths import RECIPE, ROOT

COVER = matrix.read()


def id_of(row: matrix.Row) -> str:
    return ", ".join(
        f"{column} {value}" for column, value in row.items() if value != matrix.COLUMNS[column][0]
    )


def test_the_list_holds_all_legal_targets() -> None:
    assert len(COVER.rows) >= 300
    assert [*matrix.uncovered(COVER)] == []
    assert all(matrix.makes_sense(row) and matrix.is_legal(row) for row in COVER.rows)


@pytest.mark.parametrize("row", COVER.rows[::25], ids=id_of)
def test_a_proof_runs_every_value_of_its_row(row: matrix.Row) -> None:
    assert matrix.as_run(row) == row


def test_a_value_that_a_proof_does_not_run_counts_as_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {column: values[0] for column, values in matrix.COLUMNS.items()}
    two_heads = plain | {"kv heads": "2"}
    assert matrix.as_run(two_heads) == plain
    for distinct in ({"tp": "2"}, {"cp": "2", "cp method": "ulysses"}):
        assert matrix.as_run(two_heads | distinct) == two_heads | distinct

    def shrink_more(full: Recipe) -> list[Recipe]:
        return [variant(small, {"model.vocab": 256}) for small in shrink(full)]

    monkeypatch.setattr(matrix, "shrink", shrink_more)
    monkeypatch.setattr(matrix, "_MOST_TRIES", 3)
    assert matrix.as_run(plain | {"vocabulary": "257"}) == plain
    target = (("vocabulary", "257"), ("tied", "yes"))
    monkeypatch.setattr(matrix, "targets", lambda: [target])
    assert matrix.cover([plain | dict(target)]).rows == (plain | {"tied": "yes"},)
    assert [*matrix.uncovered(matrix.Cover((), ()))] == []


def test_ep_8_is_compiled() -> None:
    assert any(row["ep"] == "8" and row["compile"] == "yes" for row in COVER.rows)


@pytest.mark.parametrize(
    ("text", "numbers"), [("9", [9]), ("9-12", [9, 10, 11, 12]), ("1-2,9", [1, 2, 9])]
)
def test_rows_are_chosen_by_number(text: str, numbers: list[int]) -> None:
    assert numbers_of(text) == numbers


@pytest.mark.parametrize("rows", ["9-8", "0", "600-9999", "x"])
def test_rows_that_the_matrix_lacks_are_refused(rows: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--rows", rows])
    assert caught.value.code == 2


def plan_of(recipe: Recipe) -> tuple[object, ...]:
    """What the enumerator of layouts chooses."""
    stages = recipe.parallel.stages_per_rank if recipe.mesh.pp > 1 else 1
    schedule = recipe.parallel.schedule if recipe.mesh.pp > 1 else None
    checkpoint = recipe.memory.activation_checkpoint
    micro_batch, zero = recipe.data.micro_batch, recipe.parallel.zero
    return recipe.mesh, schedule, stages, zero, micro_batch, checkpoint


@pytest.mark.parametrize("row", COVER.rows[::30], ids=id_of)
def test_the_enumerator_of_layouts_finds_the_row(row: matrix.Row) -> None:
    if row["schedule"] == "csv":
        pytest.skip("a file is no schedule that the enumerator can choose")
    recipe = matrix.recipe_of(row)
    choices = Choices(
        schedules=(recipe.parallel.schedule,),  # type: ignore[arg-type]
        checkpoints=(recipe.memory.activation_checkpoint,),
        zeros=(recipe.parallel.zero,),
        micro_batches=(recipe.data.micro_batch,),
        tp_over_nodes=True,
        any_mesh=True,
    )
    found = {plan_of(layout) for layout in layouts(recipe, recipe.world_size, 8, choices)}
    assert plan_of(recipe) in found


def test_a_list_without_a_schedule_is_incomplete() -> None:
    incomplete = matrix.Cover(
        tuple(row for row in COVER.rows if row["schedule"] != "DualPipeV"), COVER.refused
    )
    assert next(matrix.uncovered(incomplete), None) is not None


def test_many_layouts_have_experts() -> None:
    rows = [row for row in COVER.rows if matrix.has_experts(row)]
    assert len(rows) >= 60
    assert any(set(matrix.ALL_AXES) <= set(row.items()) and matrix.world(row) == 16 for row in rows)


def test_a_search_keeps_rows_and_adds_those_that_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = (("tp", "2"), ("ep", "2"))
    refused = (("compile", "yes"), ("schedule", "DualPipeV"))
    monkeypatch.setattr(matrix, "targets", lambda: [shared, refused])
    plain = {column: values[0] for column, values in matrix.COLUMNS.items()}
    illegal = plain | {"cp": "3", "cp method": "ulysses"}

    found = matrix.cover([plain, illegal])
    assert found.rows[0] == plain
    assert len(found.rows) == 2
    assert set(shared) <= set(found.rows[1].items())
    ((target, row),) = found.refused
    assert target == refused
    assert "splits backward into two halves" in report.message_of(row)
    assert matrix.cover(found.rows) == found


def test_columns_of_experts_need_experts() -> None:
    plain = {column: values[0] for column, values in matrix.COLUMNS.items()}
    for column in matrix.EXPERTS[1:]:
        row = plain | {column: matrix.COLUMNS[column][1]}
        assert not matrix.makes_sense(row)
        assert matrix.makes_sense(row | {"ep": "1"})
    # One rank cannot share experts with another.
    assert not matrix.makes_sense(plain | {"ep": "2"})
    # Without data or context parallelism, FSDP shards experts alone, over the ranks of tp.
    assert not matrix.makes_sense(plain | {"tp": "2", "zero": "1"})
    assert matrix.makes_sense(plain | {"tp": "2", "zero": "1", "ep": "1"})
    assert not matrix.makes_sense(plain | {"tp": "2", "zero": "1", "ep": "2"})


def test_columns_of_models_need_a_model_that_has_them() -> None:
    plain = {column: values[0] for column, values in matrix.COLUMNS.items()}
    deepseek = plain | {"model": "DeepSeek-V3", "ep": "1", "kv heads": "8"}
    assert matrix.makes_sense(deepseek | {"router": "softmax, not renormalised"})
    assert not matrix.makes_sense(deepseek | {"kv heads": "1"})
    assert not matrix.makes_sense(deepseek | {"window": "20 of 48"})
    assert not matrix.makes_sense(deepseek | {"ep": "none"})
    granite = plain | {"model": "Granite 3"}
    assert matrix.makes_sense(granite | {"positions": "YaRN"})
    assert not matrix.makes_sense(granite | {"ep": "1"})
    assert not matrix.makes_sense(granite | {"norms": "head norms and biases"})


@pytest.mark.parametrize(("model", "has_experts"), matrix.MODELS)
def test_each_model_has_many_layouts(model: str, has_experts: bool) -> None:
    rows = [row for row in COVER.rows if row["model"] == model]
    rows = [row for row in rows if matrix.has_experts(row) == has_experts]
    assert len(rows) >= 8
    # Every schedule and every way of context parallelism is among them.
    assert {row["schedule"] for row in rows} == set(matrix.COLUMNS["schedule"])
    with_cp = [row for row in rows if row["cp"] != "1"]
    assert {row["cp method"] for row in with_cp} == set(matrix.COLUMNS["cp method"])


@pytest.mark.parametrize("row", [COVER.rows[0], COVER.rows[-1]], ids=id_of)
def test_a_line_holds_a_whole_row(row: matrix.Row) -> None:
    assert matrix.from_text(matrix.to_text(COVER)) == COVER
    assert matrix.recipe_of(row) == load(RECIPE, matrix.sets(row), check_files=False).recipe


def test_the_slice_has_a_layout_of_each_ep() -> None:
    rows = [row for row in matrix.slice_of(COVER.rows) if matrix.has_experts(row)]
    assert [row["ep"] for row in rows] == ["1", "2", "4", "8"]
    for column in matrix.EXPERTS[1:]:
        assert {row[column] for row in rows} - {matrix.COLUMNS[column][0]}


@pytest.mark.parametrize(("target", "row"), COVER.refused, ids=lambda value: str(value)[:60])
def test_an_illegal_layout_is_refused_with_a_message(
    target: matrix.Target, row: matrix.Row
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(RECIPE, matrix.sets(row), check_files=False)
    assert all(row[column] == value for column, value in target)
    assert any(" use " in line or "remove" in line for line in caught.value.lines), caught.value


@some_of(8, "row", matrix.slice_of(COVER.rows), ids=id_of)
def test_a_layout_of_the_matrix_is_exact(
    pool: Pool, references: Path, row: matrix.Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name schedule files relative to it
    sets = matrix.sets(row)
    verdict = verify_layout(pool, references, str(RECIPE), sets, dtype="float64", steps=STEPS)
    assert verdict.passed, verdict
