"""Llama against the formulas of its papers, and presets against the published models."""

from dataclasses import fields, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from composer3d.models import counts
from composer3d.models.contract import IGNORE_INDEX, SequenceInfo
from composer3d.models.llama.model import First, Last, Llama
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.llama.table import table
from composer3d.models.moe.shape import MoeShape
from tests.reference import llama as plain

# The rotary base and the epsilon are such that they matter at 12 positions.
SHAPE = ModelShape(
    dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn=40, vocab=31, rope_theta=100.0, norm_eps=1e-3
)


def build(shape: ModelShape = SHAPE, seed: int = 0) -> Llama:
    """A model with random parameters, norms included: a norm of 1 could be missing unnoticed."""
    model = Llama(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return model


def rows(n_rows: int = 2, length: int = 12, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions, each (B, T).

    Some labels are ignored. Each row's positions start at another number and have gaps.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, labels_BT = (
        torch.randint(SHAPE.vocab, (n_rows, length), generator=generator) for _ in range(2)
    )
    labels_BT[0, :3] = IGNORE_INDEX
    labels_BT[1, 5] = IGNORE_INDEX
    positions_BT = torch.randint(1, 4, (n_rows, length), generator=generator).cumsum(1)
    return tokens_BT, labels_BT, positions_BT


def logits_of(model: Llama, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
    seq = SequenceInfo(positions_BT)
    h_BTC = model.first(tokens_BT, seq)
    for block in model.blocks.values():
        h_BTC = block(h_BTC, seq)
    assert isinstance(model.last, Last)
    return model.last.logits(h_BTC)


@pytest.mark.parametrize(
    "name", [name for name, shape in plain.SHAPES.items() if not isinstance(shape, MoeShape)]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_llama_computes_the_formulas(name: str, is_packed: bool) -> None:
    """Logits, loss and gradients are those of a Llama that is written from the papers."""
    assert plain.compare(name, is_packed=is_packed) == []


def test_every_option_of_a_shape_is_judged() -> None:
    """The plain model would not see that a model ignores an option which always has its default."""
    for field in fields(MoeShape):
        values = {getattr(shape, field.name, field.default) for shape in plain.SHAPES.values()}
        # Training alone reads the rate of biases.
        assert values - {field.default} or field.name == "bias_rate", field.name


def test_ignored_labels_add_nothing_to_the_loss() -> None:
    model = build()
    tokens_BT, labels_BT, positions_BT = rows()
    everything_ignored = torch.full_like(labels_BT, IGNORE_INDEX)
    assert model(tokens_BT, everything_ignored, positions_BT).item() == 0
    # The loss is a sum over tokens: the losses of two halves add up to the whole loss.
    half = torch.arange(12) < 6
    parts = [
        model(tokens_BT, labels_BT.masked_fill(mask, IGNORE_INDEX), positions_BT).item()
        for mask in (half, ~half)
    ]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(model(tokens_BT, labels_BT, positions_BT).item(), rel=1e-12)


@pytest.mark.parametrize("changed", [1, 6, 11])
def test_a_token_reads_no_later_one(changed: int) -> None:
    model = build()
    tokens_BT, _, positions_BT = rows()
    other_BT = tokens_BT.clone()
    other_BT[:, changed] = (other_BT[:, changed] + 1) % SHAPE.vocab
    with torch.no_grad():
        before = logits_of(model, tokens_BT, positions_BT)
        after = logits_of(model, other_BT, positions_BT)
    difference_BT = (before - after).abs().amax(-1)
    assert difference_BT[:, :changed].max().item() < 1e-13
    # Every later token reads the changed one.
    assert difference_BT[:, changed:].min().item() > 1e-6


def test_rotary_positions_are_relative() -> None:
    model = build()
    tokens_BT, _, positions_BT = rows()
    with torch.no_grad():
        base = logits_of(model, tokens_BT, positions_BT)
        moved = logits_of(model, tokens_BT, positions_BT + 7)
        stretched = logits_of(model, tokens_BT, 2 * positions_BT)
    torch.testing.assert_close(moved, base, rtol=1e-11, atol=1e-11)
    assert (stretched - base).abs().max().item() > 1e-3


def test_bfloat16_has_a_float32_loss() -> None:
    model = Llama(SHAPE, dtype=torch.bfloat16, device="cpu")
    assert torch.get_default_dtype() == torch.float32  # building leaves the default as it was
    assert isinstance(model.first, First)
    assert model.first.embed.weight.dtype == torch.bfloat16
    assert model(*rows()).dtype == torch.float32


def test_tied_embedding_and_head_are_one_parameter() -> None:
    model = build(replace(SHAPE, tied=True))
    assert [name for name, _ in model.named_parameters() if "embed" in name or "head" in name] == [
        "first.embed.weight"
    ]
    untied = build()
    weights = {**model.state_dict(), "last.head.weight": model.get_parameter("first.embed.weight")}
    untied.load_state_dict(weights)
    model(*rows()).backward()
    untied(*rows()).backward()
    embedding_grad = untied.get_parameter("first.embed.weight").grad
    head_grad = untied.get_parameter("last.head.weight").grad
    assert embedding_grad is not None
    assert head_grad is not None
    torch.testing.assert_close(
        model.get_parameter("first.embed.weight").grad,
        embedding_grad + head_grad,
        rtol=1e-12,
        atol=1e-12,
    )


class Published(NamedTuple):
    """The parameters of a published checkpoint, and entries of its config.json.

    A tied pair counts once in ``numel``. The entries are those on which it does not depend.
    """

    numel: int
    rope_theta: float
    norm_eps: float
    window: int
    rope_factor: float
    tied: bool
    qk_norm: bool


PUBLISHED: dict[str, Published] = {
    # numel, rope_theta, norm_eps, window, rope_factor, tied, qk_norm
    "llama3-8b": Published(8_030_261_248, 5e5, 1e-5, 0, 1.0, False, False),
    "llama3-70b": Published(70_553_706_496, 5e5, 1e-5, 0, 1.0, False, False),
    "llama3-405b": Published(405_853_388_800, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.1-8b": Published(8_030_261_248, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.1-70b": Published(70_553_706_496, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.2-1b": Published(1_235_814_400, 5e5, 1e-5, 0, 32.0, True, False),
    "llama3.2-3b": Published(3_212_749_824, 5e5, 1e-5, 0, 32.0, True, False),
    "mistral-7b": Published(7_241_732_096, 1e4, 1e-5, 4096, 1.0, False, False),
    "mistral-7b-v0.3": Published(7_248_023_552, 1e6, 1e-5, 0, 1.0, False, False),
    "qwen3-0.6b": Published(596_049_920, 1e6, 1e-6, 0, 1.0, True, True),
    "qwen3-1.7b": Published(1_720_574_976, 1e6, 1e-6, 0, 1.0, True, True),
    "qwen3-4b": Published(4_022_468_096, 1e6, 1e-6, 0, 1.0, True, True),
    "qwen3-8b": Published(8_190_735_360, 1e6, 1e-6, 0, 1.0, False, True),
    "qwen3-14b": Published(14_768_307_200, 1e6, 1e-6, 0, 1.0, False, True),
    "qwen3-32b": Published(32_762_123_264, 1e6, 1e-6, 0, 1.0, False, True),
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {
        "debug-tiny",
        "debug-small",
        "debug-bench",
        "llama-175b",
    }
    assert round(counts.parameters(table(PRESETS["llama-175b"])) / 1e9, 1) == 175.2


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models_and_meta_allocates_nothing(preset: str) -> None:
    shape, published = PRESETS[preset], PUBLISHED[preset]
    assert (shape.rope_low_freq, shape.rope_high_freq, shape.rope_context) == (1, 4, 8192)
    for field in ("rope_theta", "norm_eps", "window", "rope_factor", "tied", "qk_norm"):
        assert getattr(shape, field) == getattr(published, field), field
    model = Llama(shape)
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == published.numel
    assert counts.parameters(table(shape)) == published.numel
    assert all(tensor.is_meta for tensor in (*parameters.values(), *model.buffers()))
    wk = parameters[f"blocks.{shape.n_layers - 1}.attn.wk.weight"]
    assert wk.shape == (8 * shape.head_width, shape.dim)
