"""OLMo 2: its presets are the published models, and its parts do what the paper says."""

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.models import counts, fit
from composer3d.models.olmo2.model import HeadsNorm, Olmo2
from composer3d.models.olmo2.plan import sharding_plan
from composer3d.models.olmo2.shape import PRESETS
from composer3d.models.olmo2.table import table

# OLMo 2: counted by hand from the sizes in the published config.json files. OLMo 3: the field
# total_parameters of the index of the published files.
PUBLISHED = {
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-olmo2", "debug-olmo3"}
    for preset, numel in PUBLISHED.items():
        assert counts.parameters(table(PRESETS[preset])) == numel, preset


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = Olmo2(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert plan.style_of("blocks.0.attn.q_norm") == "column_norm"
        assert plan.style_of("blocks.0.attn.k_norm") == "kv_column_norm"


def test_flops_of_an_olmo_3_are_what_torch_counts() -> None:
    """With the math backend, torch counts masked products too."""
    shape, batch, seq_len = PRESETS["debug-olmo3"], 2, 40
    model, tokens_BT = Olmo2(shape), torch.zeros(2, 40, dtype=torch.long, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, tokens_BT).backward()
    counted = counts.flops_per_token(table(shape), shape, seq_len, causal=False)
    assert counter.get_total_flops() == batch * seq_len * counted
    # Three blocks see 20 keys at most, and the fourth all before it.
    keys = torch.ones(seq_len, seq_len).tril()
    hidden = 4 * seq_len - (3 * keys.triu(1 - 20).sum() + keys.sum()).item() / seq_len
    causal = counts.flops_per_token(table(shape), shape, seq_len)
    assert counted - causal == 12 * hidden * shape.dim


def test_a_stretch_is_of_blocks_without_a_window() -> None:
    shape = replace(PRESETS["debug-olmo3"], n_layers=5, full_every=2, rope_factor=8.0)
    blocks = Olmo2(shape).blocks.values()
    assert [block.attn.window for block in blocks] == [20, 0, 20, 0, 20]
    assert [block.attn.rope.factor for block in blocks] == [1.0, 8.0, 1.0, 8.0, 1.0]
    without = Olmo2(replace(shape, window=0, full_every=0)).blocks.values()
    assert {block.attn.rope.factor for block in without} == {8.0}


def test_a_norm_spans_all_heads() -> None:
    """One large head makes all others small; a norm of each head would not see it."""
    norm = HeadsNorm(6, eps=0.0, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 7.0))
    x_BTHD = torch.tensor([[[[3.0, 3.0], [3.0, 3.0], [30.0, 30.0]]]], dtype=torch.float64)
    root = ((4 * 9.0 + 2 * 900.0) / 6) ** 0.5
    expected = x_BTHD * torch.arange(1.0, 7.0).view(3, 2) / root
    torch.testing.assert_close(norm(x_BTHD), expected, rtol=1e-14, atol=0)


def test_what_a_block_adds_has_been_normalised() -> None:
    """So the scale of the last projections does not matter, and that of the norms does."""
    model = Olmo2(PRESETS["debug-olmo2"], dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    tokens_BT = torch.arange(12)[None]
    inputs = (tokens_BT, tokens_BT, tokens_BT)
    with torch.no_grad():
        before = model(*inputs)
        for block in model.blocks.values():
            block.attn.wo.weight.mul_(1000)
            block.ffn.w2.weight.mul_(1000)
        torch.testing.assert_close(model(*inputs), before, rtol=1e-6, atol=0)
        model.blocks["3"].ffn_norm.weight.mul_(2)
        assert (model(*inputs) - before).abs() > 1e-3 * before
