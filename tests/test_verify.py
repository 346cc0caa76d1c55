"""Twin tests: every layout against one process in float64, and planted faults that must be seen."""

import json
from collections.abc import Callable
from pathlib import Path

import faults
import pytest

from composer3d import cli
from composer3d.launch import Pool
from composer3d.recipe.load import load
from composer3d.recipe.rules import violations
from composer3d.verify import shrink, verify_layout

RECIPE = str(Path(__file__).with_name("verify.toml"))
LAYOUTS = [
    line.strip()
    for line in Path(__file__).with_name("layouts.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_exact(pool: Pool, references: Path, layout: str) -> None:
    verdict = verify_layout(pool, references, RECIPE, layout.split(), dtype="float64", steps=2)
    assert verdict.passed, verdict
    errors = (
        verdict.loss_rel_err,
        verdict.grad_norm_rel_err,
        verdict.max_grad_rel_err,
        verdict.max_weight_rel_err,
    )
    assert all(error is not None and error <= 1e-9 for error in errors), verdict


@pytest.mark.parametrize("layout", ["mesh.tp=2", "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2", "mesh.dp_replicate=2"])
def test_layout_is_exact_in_float32(pool: Pool, references: Path, layout: str) -> None:
    verdict = verify_layout(pool, references, RECIPE, layout.split(), dtype="float32", steps=3)
    assert verdict.passed, verdict
    assert verdict.max_grad_rel_err is not None
    assert verdict.max_grad_rel_err > 1e-9  # it did run in float32


FAULTS: list[tuple[Callable[[], None], str, str]] = [
    # the fault, a layout that it harms, what must be among the words about the worst parameter
    (faults.drop_reduce_scatter, "mesh.dp_shard=2", ""),
    (faults.drop_reduce_scatter, "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2", ""),
    (faults.drop_all_reduce_of_replicas, "mesh.dp_replicate=2 mesh.dp_shard=2", ""),
    (faults.drop_reduction_of_norms, "mesh.tp=2", "norm"),
    (faults.lose_a_gradient_between_stages, "mesh.pp=2", "first|blocks.[01]."),
    (faults.double_the_divisor, "mesh.dp_shard=2", ""),
    (faults.divide_by_own_tokens, "mesh.dp_shard=2", ""),
    (faults.shift_positions, "mesh.pp=2", "blocks|first"),
    (faults.clip_by_own_norm, "mesh.dp_shard=2", ""),
    (faults.clip_by_own_norm, "mesh.pp=2", ""),
    (faults.forget_a_micro_batch, "mesh.tp=2", ""),
    (faults.same_weights_on_every_shard, "mesh.dp_shard=2", ""),
    (faults.train_on_the_same_rows, "mesh.dp_shard=2", ""),
    (faults.drop_reduce_scatter, "mesh.cp=2", ""),
    (faults.attend_to_own_tokens, "mesh.cp=2", ""),
    (faults.cut_the_sequence_contiguously, "mesh.cp=2", ""),
    (faults.label_before_the_cut_is_lost, "mesh.cp=2", ""),
    (faults.lose_what_other_ranks_owe_the_keys, "mesh.cp=4", "w[kv]|norm|embed|blocks"),
    (faults.untie_the_head, "mesh.tp=2 model.tied=true", "embed|head"),
    (faults.swap_the_middle_stages, "mesh.pp=2 parallel.schedule=Interleaved1F1B model.n_layers=4", ""),
    (faults.recompute_with_other_positions, "memory.activation_checkpoint=full", "blocks|first"),
    (faults.reduce_only_the_last_micro_batch, "mesh.dp_shard=2 parallel.zero=2", ""),
]


@pytest.mark.parametrize(("fault", "layout", "touched"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_planted_fault_is_seen(
    pool: Pool, references: Path, fault: Callable[[], None], layout: str, touched: str
) -> None:
    verdict = verify_layout(pool, references, RECIPE, layout.split(), dtype="float64", steps=2, fault=fault)
    assert not verdict.passed
    assert not verdict.refused
    assert verdict.worst_parameter is not None
    import re

    assert re.search(touched, verdict.worst_parameter), verdict
    assert verdict.error is not None
    assert verdict.worst_parameter in verdict.error
    assert "rank" in verdict.error


def test_factor_of_an_axis_names_the_axis(pool: Pool, references: Path) -> None:
    verdict = verify_layout(
        pool, references, RECIPE, ["mesh.dp_shard=2"], dtype="float64", steps=1, fault=faults.double_the_divisor
    )
    assert verdict.error is not None
    assert "0.5 times the reference, suspect dp_shard" in verdict.error


@pytest.mark.parametrize(
    ("fault", "layout", "field"),
    [
        (faults.count_replicas_in_the_norm, "mesh.tp=2", "grad_norm_rel_err"),
        (faults.evaluate_one_micro_batch_less, "mesh.pp=2", "loss_rel_err"),
    ],
    ids=["norm", "validation"],
)
def test_fault_of_a_scalar_is_seen(
    pool: Pool, references: Path, fault: Callable[[], None], layout: str, field: str
) -> None:
    verdict = verify_layout(pool, references, RECIPE, [layout], dtype="float64", steps=2, fault=fault)
    assert not verdict.passed
    assert getattr(verdict, field) > 1e-3


def test_refused_layout_says_why(pool: Pool, references: Path) -> None:
    verdict = verify_layout(pool, references, RECIPE, ["mesh.tp=3"], dtype="float64", steps=1)
    assert verdict.refused
    assert not verdict.passed
    assert verdict.error is not None
    assert "mesh.tp = 3 must divide model.n_heads = 8" in verdict.error


def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = tmp_path / "layouts.txt"
    layouts.write_text("# two\nmesh.dp_shard=2 data.global_batch=4\n\nmesh.tp=3\n")
    status = cli.main(["verify", RECIPE, "--steps", "1", "--layouts", str(layouts), "--json"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 1
    assert not answer["passed"]
    assert [(r["passed"], r["refused"], r["world_size"]) for r in answer["results"]] == [
        (True, False, 2),
        (False, True, 0),
    ]
    keys = "passed world_size layout dtype loss_rel_err grad_norm_rel_err max_grad_rel_err max_weight_rel_err"
    assert set(answer["results"][0]) == {*keys.split(), "worst_parameter", "refused", "error"}


def test_shrinking_keeps_what_matters(root: Path) -> None:
    for path in sorted((root / "recipes").glob("*.toml")):
        full = load(path).recipe
        for small in shrink(full):
            assert small.world_size <= 16
            assert not violations(small)
            assert small.model.dim <= 512
            assert (small.model.n_kv_heads < small.model.n_heads) == (full.model.n_kv_heads < full.model.n_heads)
            assert (small.model.n_layers % small.mesh.pp > 0) == (full.model.n_layers % full.mesh.pp > 0)
            for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
                assert (getattr(small.mesh, axis) > 1) <= (getattr(full.mesh, axis) > 1)
