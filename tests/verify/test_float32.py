"""What only float32 runs is proven too: faults that float64 cannot see are found."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from composer3d.facts.errors import UserError
from composer3d.models.layers import moe
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import DataTable, MeshTable, Recipe
from composer3d.recipe.tables import make_recipe, preset
from composer3d.runtime.launch import Pool
from composer3d.training.optimizers.adamw import AdamW
from composer3d.verify import float32, proof
from composer3d.verify.judge import ReferenceStats, Verdict
from composer3d.verify.proof import verify_layout, verify_recipe
from composer3d.verify.shrink import shrink
from tools.prove.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
DENSE, EXPERTS = (ROOT / "recipes" / name for name in ("debug-2-dp.toml", "quickstart-moe.toml"))


def lose_the_divisor() -> None:
    """The kernel of AdamW does not divide the gradients of a step that clips."""
    step = AdamW.step

    def step_without(self: Any, *args: Any) -> Any:
        self.grad_scale = None
        return step(self, *args)

    AdamW.step = step_without  # type: ignore[method-assign]


def take_begins_for_ends() -> None:
    """The grouped product takes the first row of each expert for the one after its last."""

    def begins_E(self: moe.Groups) -> torch.Tensor:
        ends_E = self.tokens_E.cumsum(0, dtype=torch.int32)
        return ends_E - self.tokens_E.to(torch.int32)

    moe.Groups.ends_E = cached_property(begins_E)  # type: ignore[assignment]
    moe.Groups.ends_E.__set_name__(moe.Groups, "ends_E")


@pytest.mark.parametrize(
    ("fault", "recipe", "message"),
    [
        (lose_the_divisor, DENSE, "gradient norm after clipping at step 1 is off"),
        # Rows that no expert computes have what was in memory before, so anything may be off first.
        (take_begins_for_ends, EXPERTS, ""),
    ],
)
def test_a_fault_that_float64_cannot_see_is_found(
    pool: Pool, tmp_path: Path, fault: Any, recipe: Path, message: str
) -> None:
    only_float64 = verify_layout(
        pool, tmp_path, str(recipe), [], dtype="float64", steps=2, fault=fault
    )
    assert only_float64.passed
    assert only_float64.float32 is None
    verdict = verify_layout(pool, tmp_path, str(recipe), [], steps=2, fault=fault)
    assert not verdict.passed
    assert not verdict.undecided
    assert verdict.dtype == "float32"
    assert verdict.error is not None
    assert verdict.error.startswith(f"in float32, while all is exact in float64: {message}")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_small_model_of_each_recipe_runs_the_kernels_of_training(path: Path) -> None:
    full = load(str(path), check_files=False).recipe
    small = float32.small_recipe(full, [])  # none of these is needed
    assert small.mesh.world_size == (1 if path.stem in ("debug-1-single", "debug-2-csv") else 2)
    assert not small.compile.enabled
    assert small.precision.matmul == "compute"
    assert small.optim.clip > 0
    assert small.mesh.ep == min(2, full.mesh.ep)
    assert (small.model.experts > 0) == (full.model.experts > 0)
    if full.model.experts:
        widths = (small.model.dim, getattr(small.model, "expert_ffn", small.model.ffn))
        assert moe._has_grouped_kernel(4, *widths)


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({"dp_shard": 4, "cp": 2}, {"dp_shard": 2}),
        ({"cp": 4, "tp": 2}, {"cp": 2}),
        ({"pp": 2, "tp": 4}, {"tp": 2}),
        ({"pp": 2, "dp_replicate": 4}, {"dp_replicate": 2}),
        ({"pp": 2}, {}),
    ],
)
def test_two_ranks_have_an_axis_of_the_job(mesh: dict[str, int], ranks: dict[str, int]) -> None:
    small = float32.small_recipe(recipe_of(**mesh), [])
    assert small.mesh == MeshTable(**{"dp_shard": 1, **ranks})


def recipe_of(*sets: str, **mesh: int) -> Recipe:
    tables = (MeshTable(**{"dp_shard": 1, **mesh}), DataTable(seq_len=32, global_batch=16))
    return make_recipe(preset("debug-tiny", n_layers=4), *tables, sets=sets)


def test_the_smallest_proof_stands_in_where_no_mesh_of_two_is_legal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = recipe_of("compile.enabled=true", pp=2, dp_shard=2)
    small_recipes = [*shrink(full), *shrink(recipe_of(pp=4, dp_shard=2))]

    def refuse(*_: Any) -> Recipe:
        raise UserError("refused")

    monkeypatch.setattr(float32, "shrink_to", refuse)
    small = float32.small_recipe(full, small_recipes)
    assert small == replace(small_recipes[0], compile=replace(full.compile, enabled=False))


STATS = ReferenceStats(noise=[], norms_of_all=[], norms={}, shapes={}, clips=[])
TIE = STATS._replace(closest_scores=1e-8)


def verdict_of(
    monkeypatch: pytest.MonkeyPatch,
    in_float32: dict[str, Any],
    *sets: str,
    stats: ReferenceStats | None = STATS,
    dtype: str | None = None,
    in_float64: bool = True,
) -> tuple[Verdict, list[tuple[str, int]]]:
    """The verdict on a layout, and the dtype and the steps of each proof, without any run.

    Args:
        monkeypatch: replaces the runs.
        in_float32: the fields of the verdict in float32.
        sets: overrides of the recipe.
        stats: of the reference in float32.
        dtype: as for ``verify_recipe``.
        in_float64: whether the layout is exact in float64.
    """
    runs = []

    def prove(
        pool: Any, folder: Any, small: Recipe, of: str, steps: int, arguments: Any
    ) -> tuple[Verdict, ReferenceStats | None]:
        runs.append((of, steps))
        fields = in_float32 if of == "float32" else {"passed": in_float64}
        values = {"passed": False, "world_size": 2, "layout": "x", "dtype": of, **fields}
        return Verdict(**values), stats

    monkeypatch.setattr(proof, "_prove", prove)
    nothing: Any = None
    full = recipe_of(*sets, dp_shard=2)
    return verify_recipe(nothing, nothing, full, dtype=dtype, steps=3), runs


def test_an_exact_proof_is_repeated_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, runs = verdict_of(monkeypatch, {"passed": True})
    assert runs == [("float64", 3), ("float32", 2)]
    assert verdict.passed
    assert (verdict.dtype, verdict.float32) == ("float64", "exact")
    assert "  (float64, and float32)  loss" in str(verdict)


@pytest.mark.parametrize(
    ("options", "proven_in"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"dtype": "float32"}, "float32"),
        ({"in_float64": False}, "float64"),
    ],
)
def test_one_dtype_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], proven_in: str
) -> None:
    """A dtype that the user names is the only one; and what is wrong in float64 is wrong."""
    verdict, runs = verdict_of(monkeypatch, {"passed": True}, **options)
    assert runs == [(proven_in, 3)]
    assert verdict.float32 is None
    assert f"  ({proven_in})  loss" in str(verdict)


def test_a_job_in_float64_has_no_proof_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, runs = verdict_of(monkeypatch, {}, "precision.params=float64")
    assert runs == [("float64", 3)]
    assert verdict.passed


@pytest.mark.parametrize(
    ("in_float32", "stats"),
    [({"undecided": True, "error": "noise"}, STATS), ({"error": "gradient is off"}, TIE)],
)
def test_what_rounding_hides_in_float32_leaves_the_layout_exact(
    monkeypatch: pytest.MonkeyPatch, in_float32: dict[str, Any], stats: ReferenceStats
) -> None:
    """The gradients are noisy, or two experts have equal scores with every seed."""
    verdict, _ = verdict_of(monkeypatch, in_float32, stats=stats)
    assert verdict.passed
    assert (verdict.dtype, verdict.float32) == ("float64", "undecided")
    assert "  (float64; float32 undecided)  loss" in str(verdict)


@pytest.mark.parametrize("outcome", ["WRONG  ", "NO TIME", "refused"])
def test_a_proof_in_float32_that_fails_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    fields = {"timed_out": outcome == "NO TIME", "refused": outcome == "refused", "error": "why"}
    verdict, _ = verdict_of(monkeypatch, fields, stats=None)
    assert not verdict.passed
    assert (verdict.dtype, verdict.float32) == ("float32", None)
    assert str(verdict).startswith(f"{outcome} x")
    assert str(verdict).endswith("\n        in float32, while all is exact in float64: why")
