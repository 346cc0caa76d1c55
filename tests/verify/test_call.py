"""``composer3d.verify`` from Python. ``tests/test_library.py`` runs it in scripts."""

from pathlib import Path
from typing import Any

import pytest

import composer3d
from composer3d.facts.errors import RecipeError, UserError
from composer3d.recipe.schema import DataTable, MeshTable, Recipe
from composer3d.recipe.tables import make_recipe, preset
from composer3d.runtime.launch import Pool
from composer3d.verify.call import verify
from composer3d.verify.judge import Verdict

TINY = preset("debug-tiny", n_layers=2)


def test_an_exact_layout_has_a_verdict_that_says_so() -> None:
    verdict = composer3d.verify(make_recipe(TINY, MeshTable(tp=2)), steps=1, dtype="float32")
    assert isinstance(verdict, Verdict)
    assert verdict.passed
    assert (verdict.world_size, verdict.dtype, verdict.error) == (2, "float32", None)
    assert verdict.max_grad_rel_err is not None
    assert 1e-9 < verdict.max_grad_rel_err < 1e-5
    assert str(verdict).startswith("exact   tp 2 zero 3, ")


def test_neither_data_nor_checkpoints_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        '[model]\npreset = "debug-tiny"\nn_layers = 2\n[data]\nsource = "tokens"\npath = "/none"\n'
    )
    assert verify(path, steps=1).passed
    path.write_text(path.read_text() + "[mesh]\ntp = 3\n")
    with pytest.raises(RecipeError, match=r"x\.toml:8: mesh\.tp = 3 must divide"):
        verify(path)


def test_a_refused_layout_is_an_error() -> None:
    recipe = make_recipe(
        TINY, DataTable(seq_len=32), sets=["precision.matmul=float8", "precision.compute=bfloat16"]
    )
    with pytest.raises(UserError, match=r"is proven in float64 alone"):
        verify(recipe, dtype="float32")


def refused(recipe: Recipe) -> str:
    try:
        verify(recipe)
    except UserError as error:
        return str(error)
    return ""


def test_a_process_of_a_job_starts_no_proof(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(TINY)
    (text,) = pool.run(refused, {"recipe": recipe}, world_size=1)
    assert "verify was called by a process that it has started" in text
    monkeypatch.setenv("RANK", "0")
    assert "this one is a rank of a job" in refused(recipe)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"passed": True, "loss_rel_err": 2e-16, "max_weight_rel_err": 0.5},
            "exact   tp 2  (float64)  loss 2e-16  norm -  grad -  weight 5e-01",
        ),
        ({"error": "x"}, "WRONG   tp 2  (float64)  loss -  norm -  grad -  weight -\n        x"),
        ({"refused": True, "error": "x"}, "refused tp 2\n        x"),
        ({"timed_out": True, "error": "x"}, "NO TIME tp 2\n        x"),
        ({"undecided": True, "error": "\x1b"}, "UNSURE  tp 2\n        \\x1b"),
    ],
)
def test_a_verdict_in_words(fields: dict[str, Any], line: str) -> None:
    values = {"passed": False, "world_size": 2, "layout": "tp 2", "dtype": "float64", **fields}
    verdict = Verdict(**values)
    assert str(verdict) == line
    assert verdict.in_words("my\nline") == line.replace("tp 2", "my\\nline")
