"""DeepSeek-V2 and V3: presets are the published models, and counts are what torch counts."""

from dataclasses import replace
from functools import partial

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
from composer3d.models.deepseek.shape import PRESETS
from composer3d.models.deepseek.table import table
from composer3d.models.layers.attention import attend_sdpa
from composer3d.models.layers.rope import Rope
from tests.reference import latent

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


def attend_without_padding(
    width: int, q: Tensor, k: Tensor, v: Tensor, *, seq: SequenceInfo, window: int
) -> Tensor:
    out = attend_sdpa(q, k, v[..., :width], seq=seq, window=window)
    return F.pad(out, (0, v.shape[-1] - width))


def test_flops_are_what_torch_counts() -> None:
    """Of values without their padding, which the model does not need."""
    for shape in (DEBUG, replace(DEBUG, query_rank=0, value_dim=DEBUG.head_width, dense_layers=2)):
        model, batch, seq_len = latent.random_model(shape), 2, 20

        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.attend = partial(attend_without_padding, shape.value_dim)
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


def test_attention_and_its_cache_are_those_of_the_paper() -> None:
    assert latent.compare() == []
