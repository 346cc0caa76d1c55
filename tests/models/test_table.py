"""The table of parameters, compared with the real modules of every preset."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from composer3d.models import counts
from composer3d.models.contract import Decoder
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.moe.shape import PRESETS as MOE_PRESETS
from composer3d.models.moe.shape import MoeShape
from composer3d.models.registry import architecture
from composer3d.models.table import ParameterTable

_UNEVEN = ModelShape(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn=100, vocab=77)
_UNEVEN_MOE = MoeShape(48, 4, 6, 2, 100, 77, experts=5, experts_per_token=3, expert_ffn=28)
_ALL: dict[str, Any] = {"head_dim": 10, "tied": True, "qk_norm": True, "qkv_bias": True}
SHAPES: dict[str, ModelShape] = {
    **PRESETS,
    **MOE_PRESETS,
    "uneven": _UNEVEN,
    "uneven with all": replace(_UNEVEN, **_ALL),
    "uneven with experts": replace(_UNEVEN_MOE, dense_layers=1, moe_every=2),
    "uneven with experts and all": replace(_UNEVEN_MOE, **_ALL, shared_ffn=20, router_bias=True),
}


def architecture_of(shape: ModelShape) -> Any:
    return architecture("moe" if isinstance(shape, MoeShape) else "llama")


def table_of(shape: ModelShape) -> ParameterTable:
    return architecture_of(shape).table_of(shape)


@cache
def model_of(shape: ModelShape) -> Decoder:
    return architecture_of(shape).build(shape, dtype=torch.float32, device="meta")


@pytest.mark.parametrize("name", SHAPES)
def test_names_and_shapes_are_those_of_the_model_in_its_order(name: str) -> None:
    table, model = table_of(SHAPES[name]), model_of(SHAPES[name])
    found = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert list(found.items()) == [(name, row.shape) for name, row in table.parameters()]
    assert counts.parameters(table) == sum(weight.numel() for weight in model.parameters())

    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert [name for unit in table.trainable_names() for name in unit] == trainable

    listed = [f"{unit}.{row.name}" for unit, rows in table.units() for row in rows]
    assert listed == [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for unit, rows in table.units():
        for row in rows:
            if row.tied_to:
                tied, original = f"{unit}.{row.name}", row.tied_to
                assert model.get_parameter(tied) is model.get_parameter(original)
