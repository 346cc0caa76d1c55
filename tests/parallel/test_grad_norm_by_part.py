"""The norm of each part of a model is that of one process, on every layout."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer3d.facts.flags import StepFlags
from composer3d.models.deepseek.shape import PredictingShape
from composer3d.models.registry import OURS, architecture
from composer3d.parallel.grad_norm import PARTS, part_of
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.step import compute_gradients
from composer3d.verify.worker import local_batch, random_batch
from tools.prove.paths import ROOT

RECIPE = str(ROOT / "recipes" / "quickstart-moe.toml")
SIZES = [
    "model.n_layers=2",
    "data.seq_len=16",
    "data.micro_batch=1",
    "data.global_batch=8",
    'precision.params="float64"',
]
ONE = ["mesh.dp_shard=1", "mesh.pp=1", "mesh.tp=1", "mesh.ep=1"]
LAYOUTS = {
    "fsdp 2, ep 2": (2, ["mesh.dp_shard=2", "mesh.pp=1", "mesh.tp=1", "mesh.ep=2"]),
    "pp 2, tp 2": (
        4,
        ["mesh.dp_shard=1", "mesh.pp=2", "mesh.tp=2", "mesh.ep=1", "parallel.schedule=1F1B"],
    ),
    "replicas 2, cp 2": (
        4,
        [
            "mesh.dp_replicate=2",
            "mesh.dp_shard=1",
            "mesh.cp=2",
            "mesh.pp=1",
            "mesh.ep=1",
            "mesh.tp=1",
        ],
    ),
}


def test_only_projections_of_multi_token_prediction_are_other_parameters_of_our_models() -> None:
    for model_of in map(architecture, OURS):
        for shape in model_of.presets.values():
            expected = []
            if isinstance(shape, PredictingShape):
                shape = replace(shape, mtp_layers=1)
                expected = [f"blocks.{shape.n_layers}.project.weight"]
            names = model_of.table_of(shape).shapes()
            assert [name for name in names if part_of(name) == "other"] == expected


def raise_a_flag() -> StepFlags:
    return StepFlags(save_failed=True)


def norms(sets: list[str], seed: int = 0) -> dict[str, Any]:
    """A task: the norms of a step, asked for by part or not, and directly from the gradients."""
    with pool_world() as device:
        recipe = load(RECIPE, [*SIZES, *sets], check_files=False).recipe
        stages = build_stages(recipe, Mesh.build(recipe.mesh, device))
        batch = local_batch(random_batch(recipe, seed), stages)
        without = compute_gradients(stages, batch, raise_a_flag).await_values()
        values = compute_gradients(stages, batch, raise_a_flag, by_part=True).await_values()
        assert (values.loss, values.norm, values.flags) == (
            without.loss,
            without.norm,
            without.flags,
        )
        assert without.norm_by_part == {}
        direct: dict[str, float] = {}
        if recipe.world_size == 1:
            for name, parameter in stages.named_parameters():
                if parameter.grad is not None:
                    grad = parameter.grad
                    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                    square = grad.double().square().sum().item()
                    direct[part_of(name)] = direct.get(part_of(name), 0.0) + square
        return {"norm": values.norm, "parts": dict(values.norm_by_part), "direct": direct}


@pytest.fixture(scope="module")
def one(pool: Pool) -> dict[str, Any]:
    (found,) = pool.run(norms, {"sets": ONE}, world_size=1)
    return found


def test_the_parts_are_those_of_the_gradients(one: dict[str, Any]) -> None:
    assert set(one["parts"]) >= {"embedding", "attention", "experts", "routers", "norms", "head"}
    expected = {part: math.sqrt(square) for part, square in one["direct"].items()}
    assert one["parts"] == pytest.approx(expected, rel=1e-12)
    total = math.sqrt(sum(norm**2 for norm in one["parts"].values()))
    assert one["norm"] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_norms_of_one_process(
    pool: Pool, one: dict[str, Any], layout: str
) -> None:
    world_size, sets = LAYOUTS[layout]
    for rank in pool.run(norms, {"sets": sets}, world_size=world_size):
        assert rank["parts"] == pytest.approx(one["parts"], rel=1e-9)


@pytest.mark.parametrize("preset", ["debug-small", "debug-moe"])
def test_every_parameter_of_our_models_has_a_part(preset: str) -> None:
    name = "quickstart-moe" if preset == "debug-moe" else "quickstart"
    recipe = load(str(ROOT / "recipes" / f"{name}.toml"), check_files=False).recipe
    model = architecture(recipe.model.architecture).build(
        recipe.model, dtype=torch.float32, device="meta"
    )
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    assert set(parts.values()) <= set(PARTS) - {"other"}
    assert parts["first.embed.weight"] == "embedding"
    assert parts["last.norm.weight"] == "norms"
    assert parts["last.head.weight"] == "head"
    assert all(part == "norms" for name, part in parts.items() if "norm" in name)


@pytest.mark.parametrize(
    ("name", "part"),
    [("gate", "other"), ("moe.shared.w1", "ffn"), ("moe.router", "routers"), ("ffn.w2", "ffn")],
)
def test_the_part_of_a_parameter_is_that_of_its_module(name: str, part: str) -> None:
    assert part_of(f"blocks.0.{name}.weight") == part
