"""Gemma 3: its presets are the published models, and its parts do what those were trained with."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.facts.errors import CheckpointError
from composer3d.models import counts, fit
from composer3d.models.contract import SequenceInfo
from composer3d.models.gemma3 import huggingface as hf
from composer3d.models.gemma3.model import Gemma3, OffsetNorm
from composer3d.models.gemma3.plan import sharding_plan
from composer3d.models.gemma3.shape import PRESETS
from composer3d.models.gemma3.table import table

# From the metadata of the published weights.
PUBLISHED = {"gemma3-270m": 268_098_176, "gemma3-1b": 999_885_952}

# What the published config.json files say, each in the form of its time.
_BOTH: dict[str, Any] = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "sliding_window": 512,
    "vocab_size": 262144,
}
_SIX = ["sliding_attention"] * 5 + ["full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3-270m": {
        **_BOTH,
        "_sliding_window_pattern": 6,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": _SIX * 3,
        "num_hidden_layers": 18,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "use_bidirectional_attention": False,
    },
    "gemma3-1b": {
        **_BOTH,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window_pattern": 6,
    },
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-gemma3"}
    for preset, numel in PUBLISHED.items():
        assert counts.parameters(table(PRESETS[preset])) == numel, preset


@pytest.mark.parametrize("preset", CONFIGS)
def test_a_preset_is_what_the_published_config_describes(preset: str) -> None:
    assert hf.parse_config(CONFIGS[preset]) == PRESETS[preset]


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = Gemma3(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_flops_are_what_torch_counts() -> None:
    """With the math backend, torch counts masked products too."""
    shape, batch, seq_len = PRESETS["debug-gemma3"], 2, 40
    model = Gemma3(shape)
    tokens_BT = torch.zeros(batch, seq_len, dtype=torch.long, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, tokens_BT).backward()
    expected = counts.flops_per_token(table(shape), shape, seq_len, causal=False)
    assert counter.get_total_flops() == batch * seq_len * expected


def test_bases_and_windows_are_those_of_the_kind_of_block() -> None:
    model = Gemma3(replace(PRESETS["gemma3-1b"], rope_scaling="linear", rope_factor=8.0))
    for layer, block in enumerate(model.blocks.values()):
        rope = block.attn.rope
        kind = (block.attn.window, rope.theta, rope.factor)
        assert kind == ((0, 1e6, 8.0) if layer % 6 == 5 else (512, 1e4, 1.0)), layer
    without = Gemma3(replace(PRESETS["gemma3-1b"], window=0, full_every=0))
    assert {block.attn.rope.theta for block in without.blocks.values()} == {1e6}


@pytest.mark.parametrize(("scalar", "scale"), [(None, 1.0), (32, 1.0), (8, 2.0)])
def test_the_scale_of_scores(scalar: int | None, scale: float) -> None:
    shape = replace(PRESETS["debug-gemma3"], query_pre_attn_scalar=scalar)
    assert shape.query_scale == scale


def test_the_factor_of_the_embedding_is_rounded_as_the_published_one_was() -> None:
    """In bfloat16, the root of 1152 is 34; products with 33.94 would be other numbers."""
    shape = replace(PRESETS["gemma3-1b"], vocab=64, n_layers=1)
    tokens_BT = torch.arange(64)[None]
    for dtype, factor in ((torch.bfloat16, 34.0), (torch.float64, 1152**0.5)):
        first = Gemma3(shape, dtype=dtype, device="cpu").first
        torch.nn.init.normal_(first.embed.weight, std=0.02)
        found = first(tokens_BT, SequenceInfo(tokens_BT))
        assert found.dtype == dtype
        assert torch.equal(found[0], first.embed.weight * factor)


def test_a_small_weight_of_a_norm_counts_in_bfloat16() -> None:
    """1 + 0.002 is 1 in bfloat16, and so would be the norm's factor; its input is not near 1."""
    norm = OffsetNorm(512, eps=1e-6, dtype=torch.bfloat16)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(0.002)
        expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        expected *= 1 + norm.weight.double()
        found = norm(x)
        assert found.dtype == torch.bfloat16
        # Half a unit of the last place is 2**-9 at most; a factor of 1 would be off by more.
        assert ((found - expected) / expected).mean().abs() < 1e-4
        norm.weight.zero_()
        plain = torch.nn.functional.rms_norm(x, (512,), eps=1e-6)
        torch.testing.assert_close(norm(x), plain, rtol=1e-2, atol=0)


def test_what_transformers_does_not_compute_is_not_written() -> None:
    shape = replace(PRESETS["debug-gemma3"], dim=66)
    with pytest.raises(CheckpointError, match="n_heads = 4 does not divide dim = 66"):
        hf.make_config(shape, "float32")
