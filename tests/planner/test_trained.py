"""What ``optim.train`` leaves of gradients and optimizer state, as the planner counts it."""

from typing import Any, cast

import pytest
import torch

from composer3d.models.registry import architecture
from composer3d.parallel.freeze import freeze_others
from composer3d.planner.memory import predict_memory
from composer3d.planner.predict import of_recipe
from composer3d.planner.setup import Setup
from composer3d.planner.traffic import traffic
from composer3d.planner.trained import EVERYTHING, trained_of
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from tests.dryrun.jobs import dry_run_of, traffic_of
from tests.planner import setups
from tests.planner.setups import device

GLOBS = '["blocks.*.attn.w*", "blocks.1.ffn.w2.*"]'
LAYOUTS = {
    "hsdp, tp": ("mesh.dp_replicate=2", "mesh.dp_shard=2", "mesh.tp=2", "parallel.zero=3"),
    "pp": ("mesh.pp=2", "mesh.dp_shard=4"),
}


def recipe_of(*sets: str) -> Recipe:
    return setups.recipe_of("debug-1-single", "data.global_batch=16", *sets)


def setup_of(recipe: Recipe) -> Setup:
    return of_recipe(recipe, device("H100"))


def model_of(recipe: Recipe) -> torch.nn.Module:
    """Return the whole model, whose frozen parameters require no gradient."""
    model: Any = architecture(recipe.model.architecture).build(
        recipe.model, dtype=torch.float32, device="meta"
    )
    assert recipe.optim.train is not None
    freeze_others(model, recipe.optim.train)
    return cast(torch.nn.Module, model)


@pytest.mark.parametrize(
    "sets",
    [
        ('model.preset="debug-tiny"', 'optim.train=["blocks.1.*", "last.head.*"]'),
        ('model.preset="debug-tiny"', "model.tied=true", 'optim.train=["first.*"]'),
        (
            'model.architecture="moe"',
            'model.preset="debug-moe-shared"',
            'optim.train=["*.moe.experts.w[12]", "*router*"]',
        ),
    ],
)
def test_the_names_are_those_of_the_model(sets: tuple[str, ...]) -> None:
    recipe = recipe_of(*sets)
    matrices = [parameter for parameter in model_of(recipe).parameters() if parameter.dim() > 1]
    trained = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)

    sizes, shares = setup_of(recipe).sizes, trained_of(recipe)
    counted = shares.first * sizes.embedding_parameters
    counted += 0.0 if sizes.tied else shares.last * sizes.head_parameters
    for layer in range(sizes.layers):
        share = shares.of_block(layer)
        if sizes.has_experts(layer) and sizes.expert_blocks:
            counted += share.dense * (sizes.attention_parameters + sizes.shared_parameters)
            counted += share.experts * sizes.expert_parameters
        else:
            counted += share.dense * (sizes.attention_parameters + sizes.dense_parameters)
    assert counted == pytest.approx(trained, rel=1e-12)


def test_without_globs_everything_trains() -> None:
    assert trained_of(recipe_of()) == EVERYTHING


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_and_reductions_are_those_that_a_step_has(name: str, pool: Pool) -> None:
    recipe = recipe_of(*LAYOUTS[name], f"optim.train={GLOBS}")
    for pp_rank, predicted in enumerate(predict_memory(setup_of(recipe))):
        report = dry_run_of(pool, recipe, pp_rank)
        # A step counter of 4 bytes for each parameter, and the padding of shards.
        assert 0 <= report.memory.optimizer - predicted.optimizer < 200
        counted, planned = traffic_of(report), traffic(recipe, pp_rank)
        for axis in ("fsdp", "dp_replicate"):
            operations: dict[Any, Any] = dict(planned.get(axis, {}))  # type: ignore[call-overload]
            for operation in ("reduce_scatter", "all_reduce"):
                flow = operations.get(operation)
                expected = None if flow is None else (flow.count, round(flow.bytes))
                assert counted.get(axis, {}).get(operation) == expected


def test_the_sums_of_gradients_are_those_of_the_trained_parameters() -> None:
    def gradients(*sets: str) -> float:
        # Several micro-batches, whose gradients are summed whole.
        recipe = recipe_of("mesh.dp_replicate=8", "parallel.zero=0", "data.global_batch=32", *sets)
        return predict_memory(setup_of(recipe))[0].gradients

    recipe = recipe_of(f"optim.train={GLOBS}")
    frozen = sum(
        parameter.numel()
        for parameter in model_of(recipe).parameters()
        if parameter.dim() > 1 and not parameter.requires_grad
    )
    assert gradients() - gradients(f"optim.train={GLOBS}") == pytest.approx(4 * frozen, rel=1e-12)
