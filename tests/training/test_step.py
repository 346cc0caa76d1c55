"""One step: what an update changes, and what it leaves alone."""

from typing import Any

import pytest
import torch

from composer3d.checkpoint.optimizer_state import optimizer_state
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.recipe.resolve import load
from composer3d.reliability.bad_steps import NO_LIMITS, Limits
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.optimizers import build_optimizer
from composer3d.training.step import compute_gradients, update, update_rule
from composer3d.verify.worker import local_batch, random_batch
from tools.prove.paths import ROOT

RECIPE = str(ROOT / "recipes" / "quickstart-moe.toml")
SIZES = ["model.n_layers=2", "data.seq_len=16", "data.micro_batch=1", "data.global_batch=4"]


def update_around_a_gap(sets: list[str], poison: str) -> dict[str, Any]:
    """Three updates, the second with a value that is not finite on the last rank only.

    Returns:
        ``values``: of the second update. ``changed``: names of what it changed. ``moved``: whether
        the third one changed everything.
    """
    with pool_world() as device:
        recipe = load(RECIPE, [*SIZES, *sets], check_files=False).recipe
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)

        def state() -> dict[str, torch.Tensor]:
            tensors = dict(stages.named_parameters()) | optimizer_state(
                optimizer, stages.named_parameters()
            )
            return {name: local_shard(x).detach().clone() for name, x in tensors.items()}

        def changed(before: dict[str, torch.Tensor]) -> list[str]:
            return [name for name, x in state().items() if not torch.equal(x, before[name])]

        finish = stages.finish_gradients
        for step in range(3):
            before = state()

            def finish_with_poison(is_poisoned: bool = step == 1) -> None:
                finish()
                if is_poisoned and mesh.rank == mesh.sizes.world_size - 1:
                    (gradient, *_) = (p.grad for p in stages.parameters() if p.grad is not None)
                    local_shard(gradient).flatten()[0] = float(poison)

            stages.finish_gradients = finish_with_poison  # type: ignore[method-assign]
            sums = compute_gradients(stages, local_batch(random_batch(recipe, step), stages))
            values = update(stages, optimizer, sums, max_norm=0.1, lr=1e-3)
            if step == 1:
                poisoned_values, changed_by_poison = values, changed(before)
        return {
            "norm": str(poisoned_values.norm),
            "changed": changed_by_poison,
            "moved": len(changed(before)) == len(before),
            "names": sorted(before),
        }


@pytest.mark.parametrize(("dtype", "poison"), [("float64", "inf"), ("float32", "nan")])
def test_an_update_with_a_value_that_is_not_finite_changes_nothing(
    pool: Pool, dtype: str, poison: str
) -> None:
    sets = [
        "mesh.dp_shard=2",
        "mesh.pp=1",
        "mesh.tp=1",
        "mesh.ep=2",
        f'precision.params="{dtype}"',
        "model.router_bias=true",
    ]
    for rank in pool.run(update_around_a_gap, {"sets": sets, "poison": poison}, world_size=2):
        assert rank["norm"] == poison
        assert rank["changed"] == []
        assert any("router.bias" in name for name in rank["names"])
        assert rank["moved"]


def test_the_rule_of_a_step_is_that_of_its_recipe() -> None:
    sets = ["optim.clip=0.5", "optim.lr=1e-3", "optim.warmup=10"]
    recipe = load(ROOT / "tools" / "prove" / "verify.toml", sets).recipe
    assert update_rule(recipe, 4) == (0.5, 5e-4, NO_LIMITS)
    assert update_rule(recipe, 9, Limits(3.0, 2.0)) == (0.5, 1e-3, Limits(3.0, 2.0))
