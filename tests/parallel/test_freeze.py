"""``optim.train``: globs of the parameters that train."""

import pytest
import torch

from composer3d.facts.errors import PlanError
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import PRESETS
from composer3d.models.moe.model import MoeLlama
from composer3d.models.moe.shape import PRESETS as MOE_PRESETS
from composer3d.parallel.freeze import freeze_others


def trained(model: torch.nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_what_a_glob_matches_trains_and_nothing_else() -> None:
    model = Llama(PRESETS["debug-tiny"])
    freeze_others(model, ["blocks.1.attn.w[qk].*", "last.norm.weight"])
    assert trained(model) == [
        "blocks.1.attn.wq.weight",
        "blocks.1.attn.wk.weight",
        "last.norm.weight",
    ]


def test_what_no_run_trains_stays_frozen() -> None:
    model = MoeLlama(next(shape for shape in MOE_PRESETS.values() if shape.router_bias))
    biases = [name for name, _ in model.named_parameters() if name.endswith("router.bias")]
    assert biases
    freeze_others(model, ["*"])
    assert set(biases).isdisjoint(trained(model))
    with pytest.raises(PlanError, match=r"'\*router\.bias' matches no parameter of MoeLlama"):
        freeze_others(model, ["*router.bias"])


def test_each_glob_without_a_match_is_named() -> None:
    with pytest.raises(PlanError) as caught:
        freeze_others(Llama(PRESETS["debug-tiny"]), ["head.*", "blocks.0.*", "block.1"])
    first, second = caught.value.lines
    assert first.startswith("optim.train: 'head.*' matches no parameter of Llama; its parameters")
    assert first.endswith("blocks.0.attn.wo.weight, ...")
    assert "'block.1'" in second
