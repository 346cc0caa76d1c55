"""The ledger of counts: parameters against modules, and FLOPs against torch's own counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models import counts
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.llama.table import table
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.shape import PRESETS as MOE_PRESETS
from composer3d.models.moe.shape import MoeShape
from composer3d.models.moe.table import table as moe_table

UNEVEN = ModelShape(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn=100, vocab=77)
SHAPES = {
    **{
        name: PRESETS[name]
        for name in ("debug-tiny", "debug-small", "llama3-8b", "llama3.2-1b", "qwen3-4b")
    },
    "uneven": UNEVEN,
    "wide heads": replace(UNEVEN, head_dim=10),
    "tied": replace(UNEVEN, tied=True),
    "qk_norm": replace(UNEVEN, qk_norm=True),
    "qkv_bias": replace(UNEVEN, qkv_bias=True),
    "windows in two of three blocks": replace(UNEVEN, window=7, full_every=3, nope_every=2),
    "all": replace(UNEVEN, head_dim=10, tied=True, qk_norm=True, qkv_bias=True),
}
UNEVEN_MOE = MoeShape(48, 3, 6, 2, 100, 77, experts=5, experts_per_token=3, expert_ffn=28)
SMALL_MOE_SHAPES = {
    "uneven": UNEVEN_MOE,
    "width of a dense layer": replace(UNEVEN_MOE, expert_ffn=None),
    "shared": replace(UNEVEN_MOE, shared_ffn=20),
    "gate": replace(UNEVEN_MOE, shared_ffn=20, shared_gate=True, qkv_bias=True),
    "dense": replace(UNEVEN_MOE, dense_layers=2),
    "every second": replace(UNEVEN_MOE, moe_every=2),
    "bias": replace(UNEVEN_MOE, router="sigmoid", router_bias=True),
    "losses": replace(UNEVEN_MOE, balance_loss=0.1, z_loss=0.1),
    "all": replace(
        UNEVEN_MOE,
        head_dim=10,
        tied=True,
        qk_norm=True,
        qkv_bias=True,
        shared_ffn=20,
        dense_layers=1,
        router_bias=True,
    ),
}


def flops_of(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    rows = moe_table(shape) if isinstance(shape, MoeShape) else table(shape)
    return counts.flops_per_token(rows, shape, seq_len, causal=causal)


@pytest.mark.parametrize("shape", [*MOE_PRESETS.values(), *SMALL_MOE_SHAPES.values()])
def test_a_token_uses_some_of_the_experts_and_all_other_parameters(shape: MoeShape) -> None:
    active = sum(
        w.numel() // shape.experts * shape.experts_per_token if ".experts." in key else w.numel()
        for key, w in MoeLlama(shape, device="meta").named_parameters()
    )
    assert counts.active_parameters(moe_table(shape), shape) == active


@pytest.mark.parametrize(
    ("name", "seq_len"),
    [*((name, 20) for name in SHAPES), ("debug-small", 96), ("llama3-8b", 8192)],
)
def test_flops_are_what_torch_counts(name: str, seq_len: int) -> None:
    shape, batch = SHAPES[name], 2
    model = Llama(shape, device="meta")
    tokens_BT = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    # With the math backend, torch counts masked products too, and backward recomputes no scores.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, tokens_BT).backward()
    assert counter.get_total_flops() == batch * seq_len * flops_of(shape, seq_len, causal=False)


@pytest.mark.parametrize(
    "shape",
    [MOE_PRESETS["debug-moe"], MOE_PRESETS["debug-moe-shared"], *SMALL_MOE_SHAPES.values()],
)
def test_flops_with_experts_are_what_torch_counts(shape: MoeShape) -> None:
    batch, seq_len = 2, 20
    model = MoeLlama(shape, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    tokens_BT = torch.arange(batch * seq_len).view(batch, seq_len) % shape.vocab
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, torch.arange(seq_len).expand_as(tokens_BT)).backward()
    assert counter.get_total_flops() == batch * seq_len * flops_of(shape, seq_len, causal=False)


def test_a_token_costs_its_experts_and_not_the_others() -> None:
    shape = MOE_PRESETS["mixtral-8x7b"]
    more_experts = replace(shape, experts=16)
    # The rows of the router.
    assert flops_of(more_experts, 20) - flops_of(shape, 20) == 6 * shape.n_layers * shape.dim * 8
    one_expert = replace(shape, experts=1, experts_per_token=1)
    dense = ModelShape(shape.dim, shape.n_layers, shape.n_heads, 8, shape.ffn, shape.vocab)
    router = shape.dim * shape.n_layers
    assert flops_of(one_expert, 20) == flops_of(dense, 20) + 6 * router
    of_one_expert = moe_table(one_expert)
    assert counts.parameters(of_one_expert) == counts.parameters(table(dense)) + router
    assert counts.active_parameters(of_one_expert, one_expert) == counts.parameters(of_one_expert)


@pytest.mark.parametrize(
    ("layers", "every", "full"), [(7, 3, 2), (7, 1, 7), (7, 0, 0), (7, 8, 0), (1, 2, 0), (6, 2, 3)]
)
def test_blocks_without_a_window_have_more_flops(layers: int, every: int, full: int) -> None:
    shape = replace(UNEVEN, n_layers=layers, window=10)
    mixed = replace(shape, full_every=every)
    windowed, unwindowed = flops_of(shape, 64), flops_of(replace(shape, window=0), 64)
    share = full / layers
    expected = windowed + share * (unwindowed - windowed)
    assert flops_of(mixed, 64) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("shape", [replace(UNEVEN, head_dim=10), UNEVEN_MOE])
def test_a_causal_mask_reduces_attention_and_nothing_else(shape: ModelShape) -> None:
    less = flops_of(shape, 20, causal=False) - flops_of(shape, 20)
    assert less == 12 * shape.n_layers * (20 - 10.5) * shape.n_heads * shape.head_width


@pytest.mark.parametrize(
    ("seq_len", "window"), [(64, 0), (64, 1), (64, 10), (65, 64), (64, 64), (64, 100), (1, 3)]
)
def test_keys_seen_are_those_that_the_mask_shows(seq_len: int, window: int) -> None:
    seen = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    if window:
        seen = seen.triu(1 - window)
    assert counts.keys_seen(seq_len, window) == pytest.approx(
        seen.sum().item() / seq_len, rel=1e-14
    )
    hidden = seq_len - seen.sum().item() / seq_len
    less = flops_of(UNEVEN, seq_len, causal=False) - flops_of(
        replace(UNEVEN, window=window), seq_len
    )
    assert less == pytest.approx(12 * UNEVEN.n_layers * hidden * UNEVEN.dim, rel=1e-9, abs=1e-6)
