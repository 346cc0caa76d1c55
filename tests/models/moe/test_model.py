"""Llama with experts against the formulas of its papers, and presets against published models.

The formulas are written here again, for one sample and one token at a time.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.moe import MoE
from composer3d.models.llama.model import Last
from composer3d.models.moe import counts
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.plan import sharding_plan
from composer3d.models.moe.shape import PRESETS, MoeShape
from tests.models.llama.test_model import reference_block, rms_norm

SHAPE = MoeShape(24, 3, 4, 2, 40, 31, 100.0, 1e-3, experts=6, experts_per_token=2, expert_ffn=20)


def build(shape: MoeShape) -> MoeLlama:
    """A model with random parameters, norms and biases included."""
    model = MoeLlama(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return model


def reference_feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = w1 @ x
    return w2 @ (gate / (1 + torch.exp(-gate)) * (w3 @ x))


def reference_moe(weights: dict[str, Tensor], shape: MoeShape, x: Tensor) -> Tensor:
    """The mixture of one token ``x``; ``weights`` are those of the layer."""
    logits = (weights["router.weight"] @ x).tolist()
    if shape.router == "softmax":
        total = sum(map(math.exp, logits))
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    bias = weights["router.bias"].tolist() if shape.router_bias else [0.0] * shape.experts
    biased = [score + b for score, b in zip(scores, bias, strict=True)]

    size = shape.experts // shape.expert_groups
    groups = [range(first, first + size) for first in range(0, shape.experts, size)]
    groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
    allowed = [e for group in groups[: shape.groups_per_token] for e in group]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: shape.experts_per_token]

    divisor = sum(scores[e] for e in chosen) if shape.renormalise else 1.0
    out = torch.zeros_like(x)
    for e in chosen:
        w1, w2, w3 = (weights[f"experts.{name}"][e] for name in ("w1", "w2", "w3"))
        weight = shape.router_scale * scores[e] / divisor
        out = out + weight * reference_feed_forward(x, w1, w2, w3)
    if shape.shared_ffn:
        w1, w2, w3 = (weights[f"shared.{name}.weight"] for name in ("w1", "w2", "w3"))
        out = out + reference_feed_forward(x, w1, w2, w3)
    return out


def reference_logits(model: MoeLlama, shape: MoeShape, tokens_T: Tensor) -> Tensor:
    """The logits (T, V) of one row."""
    all_weights = {name: value.detach() for name, value in model.named_parameters()}
    positions_T = torch.arange(len(tokens_T))
    h_TC = all_weights["first.embed.weight"][tokens_T]
    for layer in range(shape.n_layers):
        weights = {
            name.split(".", 2)[2]: value
            for name, value in all_weights.items()
            if name.startswith(f"blocks.{layer}.")
        }
        if not shape.has_experts(layer):
            h_TC = reference_block(weights, shape, h_TC, positions_T)
            continue
        # A feed-forward layer of zeros leaves the attention alone.
        zeros = torch.zeros(shape.dim, shape.dim, dtype=torch.float64)
        weights |= {f"ffn.w{number}.weight": zeros for number in (1, 2, 3)}
        h_TC = reference_block(weights, shape, h_TC, positions_T)
        moe_weights = {
            name.removeprefix("moe."): value
            for name, value in weights.items()
            if name.startswith("moe.")
        }
        x_TC = rms_norm(h_TC, weights["ffn_norm.weight"], shape.norm_eps)
        h_TC = h_TC + torch.stack([reference_moe(moe_weights, shape, x) for x in x_TC])
    head = all_weights["last.head.weight"]
    return rms_norm(h_TC, all_weights["last.norm.weight"], shape.norm_eps) @ head.T


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"renormalise": False},
        {"router": "sigmoid", "router_scale": 2.5},
        {"dense_layers": 1},
        {"moe_every": 2},
        {"shared_ffn": 12},
        {"router": "sigmoid", "router_bias": True, "expert_groups": 3, "groups_per_token": 2},
        {"experts_per_token": 6, "expert_ffn": None},
    ],
    ids=lambda changed: " ".join(changed) or "plain",
)
def test_a_llama_with_experts_computes_the_formulas(changed: dict[str, Any]) -> None:
    shape = replace(SHAPE, **changed)
    model = build(shape)
    tokens_BT = torch.randint(shape.vocab, (2, 7), generator=torch.Generator().manual_seed(1))
    seq = SequenceInfo(torch.arange(7).expand_as(tokens_BT))
    assert isinstance(model.last, Last)
    with torch.no_grad():
        logits_BTV = model.last.logits(model.hidden(tokens_BT, seq))
    expected_BTV = torch.stack([reference_logits(model, shape, row) for row in tokens_BT])
    torch.testing.assert_close(logits_BTV, expected_BTV, rtol=1e-11, atol=1e-12)


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
        plan.check(model)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        last = f"blocks.{shape.n_layers - 1}"  # it has experts in every preset
        assert plan.style_of(f"{last}.moe.router") == "router"
        assert plan.holds_experts(f"{last}.moe.experts")
        assert not plan.holds_experts(f"{last}.moe")
        shared = plan.style_of(f"{last}.moe.shared.w1")
        assert shared == ("column" if shape.shared_ffn else None)
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
    assert counts.parameters(shape) == published.numel
    assert round(counts.active_parameters(shape) / 1e9, 1) == published.active_billions
