"""The ledger of counts: parameters against modules, and FLOPs against torch's own counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models.llama import counts
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import PRESETS, ModelShape
from tests.reference.attention import visible_keys

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
    "all": replace(UNEVEN, head_dim=10, tied=True, qk_norm=True, qkv_bias=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_module(name: str) -> None:
    shape = SHAPES[name]
    model = Llama(shape, device="meta")
    p = counts.parts(shape)

    def numel(prefix: str) -> int:
        return sum(w.numel() for key, w in model.named_parameters() if key.startswith(prefix))

    assert counts.parameters(shape) == numel("")
    assert p.embedding == numel("first.")
    assert (p.attention, p.ffn) == (numel("blocks.0.attn.w") - p.biases, numel("blocks.0.ffn."))
    assert p.biases == sum(
        w.numel() for key, w in model.blocks["0"].named_parameters() if key.endswith("bias")
    )
    assert p.norms == sum(
        w.numel() for key, w in model.blocks["0"].named_parameters() if "norm" in key
    )
    assert (p.last_norm, p.head) == (numel("last.norm."), numel("last.head."))
    assert p.block == numel("blocks.0.")


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
    expected = batch * seq_len * counts.flops_per_token(shape, seq_len, causal=False)
    assert counter.get_total_flops() == expected


def test_a_causal_mask_reduces_attention_and_nothing_else() -> None:
    shape = replace(UNEVEN, head_dim=10)
    full = counts.flops_per_token(shape, 20, causal=False)
    causal = counts.flops_per_token(shape, 20)
    assert full - causal == 12 * shape.n_layers * (20 - 10.5) * shape.n_heads * 10


@pytest.mark.parametrize(
    ("seq_len", "window"), [(64, 0), (64, 1), (64, 10), (65, 64), (64, 64), (64, 100), (1, 3)]
)
def test_keys_seen_are_those_that_the_mask_shows(seq_len: int, window: int) -> None:
    seen = visible_keys(seq_len, window=window)
    assert counts.keys_seen(seq_len, window) == pytest.approx(
        seen.sum().item() / seq_len, rel=1e-14
    )
    hidden = seq_len - seen.sum().item() / seq_len
    full = counts.flops_per_token(UNEVEN, seq_len, causal=False)
    less = full - counts.flops_per_token(replace(UNEVEN, window=window), seq_len)
    assert less == pytest.approx(12 * UNEVEN.n_layers * hidden * UNEVEN.dim, rel=1e-9, abs=1e-6)
