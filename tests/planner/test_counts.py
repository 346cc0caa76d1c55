"""The ledger of counts: parameters and FLOPs against modules, torch's own counter and published sizes."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models import Llama
from composer3d.planner import counts
from composer3d.shape import PRESETS, ModelShape

UNEVEN = ModelShape(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn=100, vocab=77)
SHAPES = {**{name: PRESETS[name] for name in ("debug-tiny", "debug-small", "llama3-8b")}, "uneven": UNEVEN}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_module(name: str) -> None:
    shape = SHAPES[name]
    model = Llama(shape, device="meta")
    p = counts.parts(shape)

    def numel(prefix: str) -> int:
        return sum(w.numel() for key, w in model.named_parameters() if key.startswith(prefix))

    assert counts.parameters(shape) == numel("")
    assert p.embedding == numel("first.")
    assert (p.attention, p.ffn) == (numel("blocks.0.attn."), numel("blocks.0.ffn."))
    assert p.norms == numel("blocks.0.attn_norm.") + numel("blocks.0.ffn_norm.")
    assert (p.last_norm, p.head) == (numel("last.norm."), numel("last.head."))
    assert p.block == numel("blocks.0.")


@pytest.mark.parametrize(
    ("preset", "published"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_parameters_are_those_of_the_published_models(preset: str, published: int) -> None:
    assert counts.parameters(PRESETS[preset]) == published


@pytest.mark.parametrize(
    ("name", "seq_len"), [("debug-tiny", 32), ("debug-small", 96), ("uneven", 20), ("llama3-8b", 8192)]
)
def test_flops_are_what_torch_counts(name: str, seq_len: int) -> None:
    shape, batch = SHAPES[name], 2
    model = Llama(shape, device="meta")
    tokens_BT = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    # The math backend: torch counts its products in full, mask or not, and does not recompute scores in the backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, tokens_BT).backward()
    expected = batch * seq_len * counts.flops_per_token(shape, seq_len, causal=False)
    assert counter.get_total_flops() == expected


def test_a_causal_mask_halves_attention_and_nothing_else() -> None:
    full = counts.flops_per_token(UNEVEN, 20, causal=False)
    causal = counts.flops_per_token(UNEVEN, 20)
    assert full - causal == 6 * UNEVEN.n_layers * 20 * UNEVEN.dim
    # Products that do not depend on the sequence are the same: both meet where there is no sequence.
    assert counts.flops_per_token(UNEVEN, 0) == counts.flops_per_token(UNEVEN, 0, causal=False) > 0


def test_causal_half_is_the_triangle_up_to_its_diagonal() -> None:
    seq_len = 64
    pairs = torch.ones(seq_len, seq_len).tril().sum().item()
    exact = pairs * 4 * UNEVEN.dim
    stated = seq_len * counts.attention_flops_per_token(UNEVEN, seq_len)
    assert exact - stated == pytest.approx(2 * seq_len * UNEVEN.dim)  # half of the diagonal, 1 / (T + 1) of the whole
