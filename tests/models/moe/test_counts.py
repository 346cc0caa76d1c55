"""The ledger of counts with experts: parameters against modules, FLOPs against torch's counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models.llama import counts as llama_counts
from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe import counts
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.shape import PRESETS, MoeShape

UNEVEN = MoeShape(48, 3, 6, 2, 100, 77, experts=5, experts_per_token=3, expert_ffn=28)
SMALL_SHAPES = {
    "uneven": UNEVEN,
    "width of a dense layer": replace(UNEVEN, expert_ffn=None),
    "shared": replace(UNEVEN, shared_ffn=20),
    "dense": replace(UNEVEN, dense_layers=2),
    "every second": replace(UNEVEN, moe_every=2),
    "bias": replace(UNEVEN, router="sigmoid", router_bias=True),
    "losses": replace(UNEVEN, balance_loss=0.1, z_loss=0.1),
    "all": replace(
        UNEVEN,
        head_dim=10,
        tied=True,
        qk_norm=True,
        qkv_bias=True,
        shared_ffn=20,
        dense_layers=1,
        router_bias=True,
    ),
}
SHAPES = {**PRESETS, **SMALL_SHAPES}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_module(name: str) -> None:
    shape = SHAPES[name]
    parameters = dict(MoeLlama(shape, device="meta").named_parameters())
    assert counts.parameters(shape) == sum(w.numel() for w in parameters.values())

    # Of the experts, a token uses some; it uses all other parameters.
    active = sum(
        w.numel() // shape.experts * shape.experts_per_token if ".experts." in key else w.numel()
        for key, w in parameters.items()
    )
    assert counts.active_parameters(shape) == active


@pytest.mark.parametrize("name", ["debug-moe", "debug-moe-shared", *SMALL_SHAPES])
def test_flops_are_what_torch_counts(name: str) -> None:
    shape, batch, seq_len = SHAPES[name], 2, 20
    model = MoeLlama(shape, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    tokens_BT = torch.arange(batch * seq_len).view(batch, seq_len) % shape.vocab
    # With the math backend, torch counts masked products too, and backward recomputes no scores.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, torch.arange(seq_len).expand_as(tokens_BT)).backward()
    expected = batch * seq_len * counts.flops_per_token(shape, seq_len, causal=False)
    assert counter.get_total_flops() == expected


def test_a_token_costs_its_experts_and_not_the_others() -> None:
    shape = PRESETS["mixtral-8x7b"]
    more_experts = replace(shape, experts=16)
    difference = counts.flops_per_token(more_experts, 20) - counts.flops_per_token(shape, 20)
    assert difference == 6 * shape.n_layers * shape.dim * 8  # the rows of the router
    one_expert = replace(shape, experts=1, experts_per_token=1)
    dense = ModelShape(shape.dim, shape.n_layers, shape.n_heads, 8, shape.ffn, shape.vocab)
    router = shape.dim * shape.n_layers
    assert counts.flops_per_token(one_expert, 20) == (
        llama_counts.flops_per_token(dense, 20) + 6 * router
    )
    assert counts.parameters(one_expert) == llama_counts.parameters(dense) + router
    assert counts.active_parameters(one_expert) == counts.parameters(one_expert)


def test_a_causal_mask_reduces_attention_and_nothing_else() -> None:
    full = counts.flops_per_token(UNEVEN, 20, causal=False)
    causal = counts.flops_per_token(UNEVEN, 20)
    assert full - causal == 12 * UNEVEN.n_layers * (20 - 10.5) * UNEVEN.dim
