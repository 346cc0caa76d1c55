"""Llama against the formulas of its papers, and presets against the published models."""

from dataclasses import fields
from typing import NamedTuple

import pytest
import torch

from composer3d.models import counts
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.granite.shape import GraniteShape
from composer3d.models.llama.model import First, Llama
from composer3d.models.llama.shape import PRESETS
from composer3d.models.llama.table import table
from composer3d.models.moe.shape import MoeShape
from tests.reference import llama as plain


@pytest.mark.parametrize(
    "name", [name for name, shape in plain.SHAPES.items() if not isinstance(shape, MoeShape)]
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_llama_and_its_kin_compute_the_formulas(name: str, is_packed: bool) -> None:
    """Logits, loss and gradients are those of a model that is written from the papers."""
    assert plain.compare(name, is_packed=is_packed) == []


def test_every_option_of_a_shape_is_judged() -> None:
    """The plain model would not see that a model ignores an option which always has its default."""
    kinds = (MoeShape, GraniteShape, Gemma3Shape)
    options = {field.name: field for kind in kinds for field in fields(kind)}
    for name, field in options.items():
        values = {getattr(shape, name, field.default) for shape in plain.SHAPES.values()}
        # Training alone reads the rate of biases.
        assert values - {field.default} or name == "bias_rate", name


def test_bfloat16_has_a_float32_loss() -> None:
    model = Llama(PRESETS["debug-tiny"], dtype=torch.bfloat16, device="cpu")
    assert torch.get_default_dtype() == torch.float32  # building leaves the default as it was
    assert isinstance(model.first, First)
    assert model.first.embed.weight.dtype == torch.bfloat16
    tokens_BT = torch.arange(12)[None]
    assert model(tokens_BT, tokens_BT, tokens_BT).dtype == torch.float32


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
    n_kv_heads: int = 8
    rope_scaling: str = "llama3"


PUBLISHED: dict[str, Published] = {
    # numel, rope_theta, norm_eps, window, rope_factor, tied, qk_norm
    "llama3-8b": Published(8_030_261_248, 5e5, 1e-5, 0, 1.0, False, False),
    "llama3-70b": Published(70_553_706_496, 5e5, 1e-5, 0, 1.0, False, False),
    "llama3-405b": Published(405_853_388_800, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.1-8b": Published(8_030_261_248, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.1-70b": Published(70_553_706_496, 5e5, 1e-5, 0, 8.0, False, False),
    "llama3.2-1b": Published(1_235_814_400, 5e5, 1e-5, 0, 32.0, True, False),
    "llama3.2-3b": Published(3_212_749_824, 5e5, 1e-5, 0, 32.0, True, False),
    "deepseek-coder-6.7b": Published(
        6_740_512_768, 1e5, 1e-6, 0, 4.0, False, False, n_kv_heads=32, rope_scaling="linear"
    ),
    "deepseek-coder-33b": Published(
        33_342_991_360, 1e5, 1e-6, 0, 4.0, False, False, rope_scaling="linear"
    ),
    "mistral-7b": Published(7_241_732_096, 1e4, 1e-5, 4096, 1.0, False, False),
    "mistral-7b-v0.3": Published(7_248_023_552, 1e6, 1e-5, 0, 1.0, False, False),
    "smollm3-3b": Published(3_075_098_624, 5e6, 1e-6, 0, 1.0, True, False, n_kv_heads=4),
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
    for field in published._fields[1:]:
        assert getattr(shape, field) == getattr(published, field), field
    model = Llama(shape)
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == published.numel
    assert counts.parameters(table(shape)) == published.numel
    assert all(tensor.is_meta for tensor in (*parameters.values(), *model.buffers()))
    wk = parameters[f"blocks.{shape.n_layers - 1}.attn.wk.weight"]
    assert wk.shape == (published.n_kv_heads * shape.head_width, shape.dim)
