"""Llama with experts against the formulas of its papers, and presets against published models."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from composer3d.models import counts, fit
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.moe import MoE
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import PRESETS, MoeShape
from composer3d.models.moe.table import table
from tests.reference import llama as plain

SHAPE = MoeShape(24, 3, 4, 2, 40, 31, 100.0, 1e-3, experts=6, experts_per_token=2, expert_ffn=20)


@pytest.mark.parametrize(
    "name", [name for name, shape in plain.SHAPES.items() if isinstance(shape, MoeShape)]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_llama_with_experts_computes_the_formulas(name: str, is_packed: bool) -> None:
    """Logits, loss and gradients, those of the routers' losses included."""
    assert plain.compare(name, is_packed=is_packed) == []


def test_blocks_with_experts_are_those_of_the_shape() -> None:
    for changed, expected in (
        ({}, [0, 1, 2]),
        ({"dense_layers": 1}, [1, 2]),
        ({"moe_every": 2}, [1]),
        ({"dense_layers": 2, "moe_every": 3}, [2]),
    ):
        shape = replace(SHAPE, **changed)
        model = MoeLlama(shape)
        found = [int(name) for name, block in model.blocks.items() if hasattr(block, "moe")]
        assert found == expected
        assert shape.moe_layers == len(expected)
        assert all(
            hasattr(block, "moe") != hasattr(block, "ffn") for block in model.blocks.values()
        )


def test_bfloat16_has_a_float32_loss_and_float32_weights_of_experts() -> None:
    model = MoeLlama(SHAPE, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    tokens_BT = torch.arange(12).view(2, 6)
    assert model(tokens_BT, tokens_BT, tokens_BT % 6).dtype == torch.float32
    moe = model.blocks["0"].moe
    assert isinstance(moe, MoE)
    x_BTC = torch.ones(2, 6, SHAPE.dim, dtype=torch.bfloat16)
    assert moe.router(x_BTC, SequenceInfo(tokens_BT)).weights_NK.dtype == torch.float32
    assert moe(x_BTC, SequenceInfo(tokens_BT)).dtype == torch.bfloat16


def small(shape: MoeShape) -> MoeShape:
    """A shape with all properties of ``shape`` and few parameters."""
    layers = max(shape.dense_layers + 1, shape.moe_every, 2)
    return replace(shape, dim=32, n_layers=layers, n_heads=2, n_kv_heads=2, head_dim=16, vocab=64)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_plan_and_meta_allocates_nothing(preset: str) -> None:
    for shape in (PRESETS[preset], small(PRESETS[preset])):
        model, plan = MoeLlama(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        last = f"blocks.{shape.n_layers - 1}"  # it has experts in every preset
        assert plan.style_of(f"{last}.moe.router") == "router"
        assert plan.holds_experts(f"{last}.moe.experts")
        assert not plan.holds_experts(f"{last}.moe")
        shared = plan.style_of(f"{last}.moe.shared.w1")
        assert shared == ("column" if shape.shared_ffn else None)
        gate = plan.style_of(f"{last}.moe.shared_gate")
        assert gate == ("router" if shape.shared_gate else None)
        dense = {name for name, _ in model.named_modules() if name.endswith(".ffn")}
        assert bool(dense) == (plan.style_of("blocks.0.ffn") == "gather")


def test_projections_into_the_residual_stream_start_smaller_with_depth() -> None:
    plan = sharding_plan(PRESETS["debug-moe-shared"])  # 4 blocks
    scaled = 0.02 / math.sqrt(8)
    deviations = {
        name: getattr(plan.init_of(f"blocks.3.moe.{name}"), "std", None)
        for name in ("experts.w1", "experts.w2", "experts.w3", "shared.w2.weight", "router.weight")
    }
    assert deviations == pytest.approx(
        {
            "experts.w1": 0.02,
            "experts.w2": scaled,
            "experts.w3": 0.02,
            "shared.w2.weight": scaled,
            "router.weight": 0.02,
        }
    )
    assert getattr(plan.init_of("blocks.3.moe.router.bias"), "value", None) == 0


class Published(NamedTuple):
    """The parameters of a published checkpoint, and those that compute a token, in billions."""

    numel: int
    active_billions: float


PUBLISHED = {
    "mixtral-8x7b": Published(46_702_792_704, 12.9),
    "mixtral-8x22b": Published(140_630_071_296, 39.2),
    "qwen1.5-moe-a2.7b": Published(14_315_784_192, 2.7),
    "qwen2-57b-a14b": Published(57_408_658_944, 14.2),
    "qwen3-30b-a3b": Published(30_532_122_624, 3.4),
    "qwen3-235b-a22b": Published(235_093_634_560, 22.2),
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {
        "debug-moe",
        "debug-bench-moe",
        "debug-small-moe",
        "debug-moe-shared",
        "deepseek-v3-gqa",
        "gshard-like-top2",
        "switch-like-top1",
    }


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_parameters_of_the_published_models(preset: str) -> None:
    shape, published = PRESETS[preset], PUBLISHED[preset]
    assert counts.parameters(table(shape)) == published.numel
    assert (
        round(counts.active_parameters(table(shape), shape) / 1e9, 1) == published.active_billions
    )
