"""Phi-3 and Phi-4: presets are the published models, and files join projections."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from composer3d.facts.errors import CheckpointError
from composer3d.models import counts, fit
from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.locations import Location, hf_locations
from composer3d.models.phi3 import huggingface as hf
from composer3d.models.phi3.shape import PRESETS
from composer3d.models.phi3.table import table

# From the metadata of the published weights.
PUBLISHED = {
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "phi-4": 14_659_507_200,
}


def test_every_preset_of_a_published_model_is_counted() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"debug-phi3"}
    for preset, numel in PUBLISHED.items():
        assert counts.parameters(table(PRESETS[preset])) == numel, preset


def test_every_preset_has_a_plan_and_meta_allocates_nothing() -> None:
    for shape in PRESETS.values():
        model, plan = Llama(shape), sharding_plan(shape)
        fit.check(model, plan)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == table(
            shape
        ).shapes()


def test_files_join_what_reads_the_same_input() -> None:
    """The sizes of the tensors of the published Phi-4."""
    places = hf_locations(table(PRESETS["phi-4"]))
    qkv, gate_up = "model.layers.7.self_attn.qkv_proj.weight", "model.layers.7.mlp.gate_up_proj"
    expected = {
        "attn.wq": Location((qkv,), (7680, 5120), rows=(0, 5120)),
        "attn.wk": Location((qkv,), (7680, 5120), rows=(5120, 6400)),
        "attn.wv": Location((qkv,), (7680, 5120), rows=(6400, 7680)),
        "ffn.w1": Location((f"{gate_up}.weight",), (35840, 5120), rows=(0, 17920)),
        "ffn.w3": Location((f"{gate_up}.weight",), (35840, 5120), rows=(17920, 35840)),
        "attn.wo": Location(("model.layers.7.self_attn.o_proj.weight",), (5120, 5120)),
        "ffn.w2": Location(("model.layers.7.mlp.down_proj.weight",), (5120, 17920)),
    }
    assert {name: places[f"blocks.7.{name}.weight"] for name in expected} == expected
    assert all(places[name].whole_shape == size for name, size in table_sizes().items())


def table_sizes() -> dict[str, tuple[int, ...]]:
    return table(PRESETS["phi-4"]).shapes()


def test_flops_are_what_torch_counts() -> None:
    shape = replace(PRESETS["debug-phi3"], window=0)
    tokens_BT = torch.arange(20)[None]
    model = Llama(shape, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT, tokens_BT).backward()
    expected = 20 * counts.flops_per_token(table(shape), shape, 20, causal=False)
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"qk_norm": True}, "qk_norm = True"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"rope_scaling": "linear", "rope_factor": 2.0}, r"rope_factor = 2\.0"),
    ],
)
def test_what_transformers_lacks_is_named(values: dict[str, Any], field: str) -> None:
    shape = replace(PRESETS["debug-phi3"], **values)
    with pytest.raises(CheckpointError, match=f"phi3 has no {field}; convert to torch or dcp"):
        hf.make_config(shape, "float32")


def test_absent_ids_of_tokens_are_not_those_of_phi_3() -> None:
    config = hf.make_config(PRESETS["debug-phi3"], "float32", {"eos_token_id": 7})
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    assert ids == {"bos_token_id": None, "eos_token_id": 7, "pad_token_id": None}
