"""DeepSeek-V2 and V3: presets are the published models, and counts are what torch counts."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models import claims, counts, fit
from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek.attention import LatentAttention
from composer3d.models.deepseek.model import Deepseek
from composer3d.models.deepseek.plan import sharding_plan
from composer3d.models.deepseek.shape import PRESETS, DeepseekShape
from composer3d.models.deepseek.table import table
from composer3d.models.layers.attention import attend_sdpa
from composer3d.models.layers.rope import Rope

DEBUG = PRESETS["debug-deepseek"]

# ``total_size`` of model.safetensors.index.json of the published files, in bfloat16, over 2; of
# Moonlight without 27 tables of 32 rotary frequencies in float32. The FP8 files of DeepSeek-V3 and
# Kimi K2 hold scales as well: the sums are those of the shapes in their headers. The reports name
# 16B, 236B, 671B and 1.04T.
PUBLISHED = {
    "deepseek-v2-lite": 31_412_968_448 // 2,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "moonlight-16b-a3b": (31_920_223_872 - 27 * 32 * 4) // 2,
    "kimi-k2": 1_026_408_232_448,
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-deepseek"}
    for preset, numel in PUBLISHED.items():
        assert counts.parameters(table(PRESETS[preset])) == numel, preset


def test_multi_token_prediction_is_the_rest_of_deepseek_v3() -> None:
    """The report: 671B, of which 37B compute a token. Its files hold one block more, a projection
    of two streams to one and three norms, of which README_WEIGHTS says 11.5B.
    """
    shape = PRESETS["deepseek-v3"]
    deeper = replace(shape, n_layers=shape.n_layers + 1)
    main = counts.parameters(table(shape))
    of_block = counts.parameters(table(deeper)) - main
    of_prediction = of_block + 2 * shape.dim**2 + 3 * shape.dim
    assert (round(main / 1e9), of_prediction) == (671, 11_610_068_224)
    # Without the lookup of the embedding.
    active = counts.active_parameters(table(shape), shape) - shape.vocab * shape.dim
    assert round(active / 1e9) == 37


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = Deepseek(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    claims.check(Deepseek(DEBUG), sharding_plan(DEBUG))


def random_model(shape: DeepseekShape) -> Deepseek:
    model = Deepseek(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def test_flops_are_what_torch_counts() -> None:
    """Of values without their padding, which the model does not need."""
    for shape in (DEBUG, replace(DEBUG, query_rank=0, value_dim=DEBUG.head_width, dense_layers=2)):
        model, batch, seq_len = random_model(shape), 2, 20

        def attend(q: Tensor, k: Tensor, v: Tensor, *, seq: SequenceInfo, window: int) -> Tensor:
            padding = shape.head_width - shape.value_dim
            out = attend_sdpa(q, k, v[..., : shape.value_dim], seq=seq, window=window)
            return F.pad(out, (0, padding))

        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.attend = attend
        tokens_BT = torch.arange(batch * seq_len).view(batch, seq_len)
        positions_BT = torch.arange(seq_len).expand_as(tokens_BT)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(tokens_BT, tokens_BT, positions_BT).backward()
        expected = counts.flops_per_token(table(shape), shape, seq_len, causal=False)
        assert counter.get_total_flops() == batch * seq_len * expected


def test_the_epsilon_of_latents_is_not_that_of_the_stream() -> None:
    shape = replace(DEBUG, norm_eps=1e-3)
    attention = LatentAttention(shape, Rope(head_dim=shape.rope_dim))
    assert isinstance(attention.q_norm, nn.RMSNorm)
    assert (attention.q_norm.eps, attention.kv_norm.eps) == (1e-6, 1e-6)
    block = Deepseek(shape).blocks["0"]
    assert block.attn_norm.eps == 1e-3  # type: ignore[union-attr]


def attention_by_hand(attention: LatentAttention, x_TC: Tensor) -> Tensor:
    """Equations 9 to 19 of arXiv 2405.04434, one head after the other, with complex numbers."""
    shape, weights = attention.shape, dict(attention.named_parameters())
    tokens = len(x_TC)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    def turn(x_TR: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x_TR.unflatten(-1, (-1, 2)).contiguous())
        half = shape.rope_dim // 2
        speeds = attention.rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(tokens)[:, None] * speeds
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(1)

    c_query = norm(x_TC @ weights["wq_a.weight"].T, "q_norm.weight")
    down = x_TC @ weights["wkv_a.weight"].T
    c_key, k_rotated = down[:, : shape.kv_rank], turn(down[:, shape.kv_rank :])
    c_key = norm(c_key, "kv_norm.weight")
    heads = []
    up_q = weights["queries.wq.weight"].chunk(shape.n_heads)
    up_kv = weights["keys.wkv_b.weight"].chunk(shape.n_heads)
    for to_query, to_keys_and_values in zip(up_q, up_kv, strict=True):
        query, key_and_value = c_query @ to_query.T, c_key @ to_keys_and_values.T
        plain = shape.plain_dim
        scores = query[:, :plain] @ key_and_value[:, :plain].T
        scores = (scores + turn(query[:, plain:]) @ k_rotated.T) * shape.head_width**-0.5
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ key_and_value[:, plain:])
    return torch.cat(heads, 1) @ weights["wo.weight"].T


def test_attention_is_that_of_the_paper() -> None:
    attention = LatentAttention(DEBUG, Rope(head_dim=DEBUG.rope_dim, theta=100.0)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    x_BTC = torch.randn(2, 9, DEBUG.dim, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        out_BTC = attention(x_BTC, seq=SequenceInfo(torch.arange(9).expand(2, 9)))
        for x_TC, out_TC in zip(x_BTC, out_BTC, strict=True):
            torch.testing.assert_close(
                out_TC, attention_by_hand(attention, x_TC), rtol=1e-12, atol=1e-12
            )
