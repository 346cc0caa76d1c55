"""What a proof does for experts: one without tokens, and no choice that rounding could change."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from composer3d.models.layers.moe import Router
from composer3d.models.registry import architecture
from composer3d.parallel import init
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.verify import worker
from composer3d.verify.judge import ReferenceStats
from composer3d.verify.proof import choose_seed
from composer3d.verify.shrink import shrink
from tools.prove.paths import MOE_RECIPE, ROOT


def small_recipe(*sets: str) -> Recipe:
    (small,) = shrink(load(MOE_RECIPE, list(sets), check_files=False).recipe)
    return small


@pytest.mark.parametrize(
    "sets", [(), ("model.router=sigmoid", "model.router_bias=true", "model.dense_layers=1")]
)
def test_the_first_expert_of_each_layer_gets_no_token(sets: tuple[str, ...]) -> None:
    small = small_recipe(*sets)
    chosen = architecture("moe")
    model = chosen.build(small.model, dtype=torch.float64, device="cpu")
    from composer3d.models.moe.plan import sharding_plan

    init.initialise(model, sharding_plan(cast(Any, small.model)), seed=0)
    for name, parameter in model.named_parameters():
        worker._starve_first_expert(name, parameter, True)
    tokens = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
    with worker._record_routers(model) as routers:
        model(tokens, tokens, torch.arange(16).expand_as(tokens)).backward()
    assert len(routers.tokens) == small.model.n_layers - len(sets[2:])
    for tokens_E in routers.tokens.values():
        assert tokens_E[0] == 0
        assert (tokens_E > 0).sum() >= 2
        assert tokens_E.sum() == 8 * 16 * 2


def test_closest_scores_are_those_at_the_border_of_the_choice() -> None:
    router = Router(dim=6, experts=6, per_token=2, scores="sigmoid").double()
    router.weight.data = torch.eye(6, dtype=torch.float64)
    logits = torch.tensor([[0.9, 0.1, 0.5, 0.45, 0.2, 0.3], [2.0, 1.9, 0.0, 0.0, 0.0, 0.0]])
    scores = logits.double().sigmoid()
    expected = (scores[0, 2] - scores[0, 3]).item()
    assert worker._closest_scores(router, logits.double()[None]) == pytest.approx(expected)

    router.groups, router.groups_per_token = 3, 1
    # Groups of two: 1.0, 0.95 and 0.5 in the first row.
    sums = scores[0].view(3, 2).sum(-1)
    assert worker._closest_scores(router, logits.double()[None, :1]) == pytest.approx(
        (sums[0] - sums[1]).item()
    )


def test_a_proof_takes_weights_without_a_near_tie() -> None:
    """Where rounding in the dtype could choose another expert, the proof takes the next seed."""
    closest_of_seed = {0: 0.0, 1: 9e-7, 2: 1e-4}

    def make(small: Recipe) -> tuple[str, ReferenceStats]:
        closest = closest_of_seed[small.run.seed]
        return "path", ReferenceStats([], [], {}, {}, [], closest)

    small = small_recipe()
    for dtype, seed in (("float64", 1), ("float32", 2)):
        seeded, _, stats = choose_seed(small, dtype, make)
        assert seeded == replace(small, run=replace(small.run, seed=seed))
        assert stats.closest_scores == closest_of_seed[seed]


@pytest.mark.parametrize("recipe", ["mixtral-8x7b-64-4d", "moe-64e-1024-4d"])
def test_small_meshes_keep_what_ep_relates_to(recipe: str) -> None:
    """The ranks of ep are those of tp and some of data; experts are sharded as in the recipe."""
    full = load(ROOT / "recipes" / f"{recipe}.toml", check_files=False).recipe
    shards_experts = full.mesh.efsdp > 1
    meshes = [small.mesh for small in shrink(full)]
    assert any(mesh.ep > mesh.tp > 1 and (mesh.efsdp > 1) == shards_experts for mesh in meshes)
    for small in shrink(full):
        model: Any = small.model
        assert model.experts % small.mesh.ep == 0
        assert model.dim % small.mesh.efsdp == 0
        assert small.world_size <= 16
