"""Granite 3: its presets are the published models, and each multiplier is where it should be."""

from dataclasses import replace

import torch
from torch import Tensor

from composer3d.models import counts, fit
from composer3d.models.granite.model import Granite
from composer3d.models.granite.plan import sharding_plan
from composer3d.models.granite.shape import PRESETS, GraniteShape
from composer3d.models.granite.table import table

# Counted by hand from the sizes in the published config.json files.
PUBLISHED = {"granite3-2b": 2_533_531_648, "granite3-8b": 8_170_848_256}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-granite"}
    for preset, numel in PUBLISHED.items():
        assert counts.parameters(table(PRESETS[preset])) == numel, preset


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = Granite(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def loss_of(shape: GraniteShape) -> Tensor:
    model = Granite(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    tokens_BT = torch.arange(12)[None]
    with torch.no_grad():
        return model(tokens_BT, tokens_BT, tokens_BT)


def test_no_multiplier_is_lost() -> None:
    """The tests of all families compare with transformers where each of them is."""
    shape = replace(PRESETS["debug-granite"], n_layers=2)
    found = {"all": loss_of(shape)}
    for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        found[name] = loss_of(replace(shape, **{name: 1.0}))
    found["attention_multiplier"] = loss_of(replace(shape, attention_multiplier=None))
    assert len({round(loss.item(), 6) for loss in found.values()}) == len(found)
    usual = loss_of(replace(shape, attention_multiplier=shape.head_width**-0.5))
    torch.testing.assert_close(usual, found["attention_multiplier"], rtol=1e-13, atol=0)
