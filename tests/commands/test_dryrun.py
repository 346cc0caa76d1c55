"""``composer3d dryrun``: its JSON, its tables and its errors."""

import pytest

from composer3d.cli import main
from composer3d.planner.predict import mfu, model_flops_per_token, of_recipe
from tests.commands.conftest import Ask
from tests.planner import setups

RECIPE = "debug-8-dp-tp-pp"


def test_json_has_a_stage_for_each_pipeline_rank(ask: Ask) -> None:
    _, answer = ask("dryrun", RECIPE)
    assert sorted(answer) == ["seconds", "stages", "world_size"]
    assert answer["world_size"] == 8
    assert [stage["stage"] for stage in answer["stages"]] == [0, 1]
    assert [stage["ranks"] for stage in answer["stages"]] == [4, 4]
    first, last = answer["stages"]
    # Two micro-batches are in flight on the first stage, and one on the last; the loss is last.
    assert first["comm"]["pp"] == last["comm"]["pp"]
    assert first["comm"]["tp"]["all_reduce"]["count"] < last["comm"]["tp"]["all_reduce"]["count"]
    for stage in answer["stages"]:
        assert stage["peak_gib"] > 0


def test_tables_name_axes_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "parallel.schedule=GPipe", "--set", "mesh.dp_shard=8"]
    assert main(["dryrun", RECIPE, *sets]) == 0
    out = capsys.readouterr().out
    assert "a step of 32 ranks" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[-3:] for row in rows if row[:2] == ["tp", "all-gather"]] == [
        ["inside", "a", "node"]
    ] * 2
    assert ["between", "nodes"] in [row[-2:] for row in rows if row[:2] == ["fsdp", "all-gather"]]


@pytest.mark.parametrize(
    ("sets", "dtype"),
    [
        ((), "float32"),
        (("precision.params=float64",), "float32"),
        (("precision.compute=bfloat16",), "bfloat16"),
        (("precision.compute=bfloat16", "precision.matmul=float8"), "bfloat16"),
    ],
)
def test_the_time_to_hide_traffic_in_is_of_the_peak_that_plan_uses(
    sets: tuple[str, ...], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for each in sets for part in ("--set", each)]
    assert main(["dryrun", "debug-1-single", *options]) == 0
    recipe = setups.recipe_of("debug-1-single", *sets)
    step_tokens = recipe.data.global_batch * recipe.data.seq_len
    setup = of_recipe(recipe, setups.device("H100"))
    at_peak_s = mfu(setup, model_flops_per_token(recipe), step_tokens)
    assert at_peak_s is not None
    words = f"in the {at_peak_s / 0.4:.2g} s in which an H100-80GB SXM computes the step"
    assert f"{words} at 40% of its peak in {dtype}\n" in capsys.readouterr().out


@pytest.mark.parametrize("skew", ["0.5", "9", "nan", "x"])
def test_an_impossible_skew_is_refused(skew: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "mixtral-8x7b-64-4d", "--routing-skew", skew]) == 2
    error = capsys.readouterr().err
    assert "--routing-skew" in error
    assert skew in error


def test_a_wrong_recipe_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", RECIPE, "--gpus", "12"]) == 2
    assert "12" in capsys.readouterr().err


def test_a_schedule_from_a_file_runs(ask: Ask) -> None:
    _, answer = ask("dryrun", "debug-2-csv")
    assert [stage["stage"] for stage in answer["stages"]] == [0, 1]
