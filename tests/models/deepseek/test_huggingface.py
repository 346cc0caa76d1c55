"""DeepSeek-V2 and V3: our shapes, names, logits and gradients agree with transformers."""

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.deepseek import huggingface as hf
from composer3d.models.deepseek.model import Deepseek
from composer3d.models.deepseek.names import hf_locations, left_out
from composer3d.models.deepseek.shape import PRESETS, DeepseekShape
from composer3d.models.registry import huggingface_model_types
from tests.models.moe.transformers_models import (
    compute_in_float64,
    load_folder,
    take,
    transformers,
)

TOKENS = (3, 40)  # batch and length
VOCAB = 131
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "routed_scaling_factor": 1.5, "rope_parameters": _YARN},
    ),
    "v2, groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "tie_word_embeddings": True,
        },
    ),
    "v3": (
        "deepseek_v3",
        {
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
        },
    ),
    "v3, odd": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "n_shared_experts": 3,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,  # which latents do not have
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "routed_scaling_factor": 0.7,
            "topk_group": 1,
            "v_head_dim": 24,  # as wide as keys
        },
    ),
}


class Saved(NamedTuple):
    """A random model that transformers has saved: its model_type, and its folder."""

    model_type: str
    folder: Path


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A random model in float64. Neither norms nor biases of routers have the values of a start."""
    model_type, settings = KINDS[request.param]
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **SMALL | settings, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [bias for name, bias in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(torch.float64).save_pretrained(folder)
    return Saved(model_type, folder)


def load_ours(folder: Path) -> Deepseek:
    # transformers names a layer of multi-token prediction, and saves none.
    shape, tensors = hf.read_shape(folder).without_mtp, load_file(folder / "model.safetensors")
    places = hf_locations(shape, tensors)
    assert tensors.keys() == {name for place in places.values() for name in place.names}
    model = Deepseek(shape, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(take(places[name], tensors))
    return model


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return ((ours - theirs).norm() / theirs.norm()).item()


def test_logits_loss_and_gradients_equal_those_of_transformers(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch, saved.model_type)
    ours, theirs = load_ours(saved.folder), load_folder(saved.folder, torch.float64)
    tokens_BT = torch.randint(VOCAB, TOKENS)
    # transformers shifts the labels itself.
    labels_BT = torch.cat((tokens_BT[:, 1:], torch.full((len(tokens_BT), 1), -100)), 1)
    positions_BT = torch.arange(TOKENS[1]).expand(TOKENS)

    expected = theirs(tokens_BT, labels=tokens_BT, use_cache=False)
    logits = ours.logits(tokens_BT, SequenceInfo(positions_BT))
    assert relative_error(logits, expected.logits) < 1e-12
    loss = ours(tokens_BT, labels_BT, positions_BT) / (labels_BT != -100).sum()
    assert relative_error(loss, expected.loss) < 1e-12

    loss.backward()
    expected.loss.backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    places = hf_locations(ours.shape, grads)  # packed, as transformers has them in memory
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert relative_error(parameter.grad, take(places[name], grads)) < 1e-11, name


def test_logits_are_those_of_transformers_as_it_ships(saved: Saved) -> None:
    """It computes norms, positions and routers in float32, whatever the model is in."""
    tokens_BT = torch.randint(VOCAB, TOKENS)
    seq = SequenceInfo(torch.arange(TOKENS[1]).expand(TOKENS))
    with torch.no_grad():
        expected = load_folder(saved.folder, torch.float64)(tokens_BT).logits
        assert relative_error(load_ours(saved.folder).logits(tokens_BT, seq), expected) < 1e-5


def test_two_scales_of_yarn_are_a_ratio_and_a_factor_of_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No published file has two of them. Both survive a config.json of ours, as they were."""
    positions = _YARN | {"mscale": 0.5, "mscale_all_dim": 1.5}
    config = transformers.DeepseekV3Config(
        **SMALL, n_group=1, topk_group=1, rope_parameters=positions, pad_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.float64).save_pretrained(tmp_path)
    compute_in_float64(monkeypatch, "deepseek_v3")
    tokens_BT = torch.randint(VOCAB, TOKENS)
    seq = SequenceInfo(torch.arange(TOKENS[1]).expand(TOKENS))
    ours = load_ours(tmp_path)
    with torch.no_grad():
        expected = load_folder(tmp_path, torch.float64)(tokens_BT).logits
        assert relative_error(ours.logits(tokens_BT, seq), expected) < 1e-12
    assert ours.shape.attention_factor < 1 < ours.shape.query_scale
    written = hf.make_config(ours.shape, "float64")
    assert hf.parse_config(written) == ours.shape
    scaling = written["rope_scaling"]
    assert (scaling["mscale"], scaling["mscale_all_dim"]) == (0.5, 1.5)
    assert "attention_factor" not in scaling


@pytest.mark.parametrize(
    ("factor", "most"),
    [(1.0 + 2e-16, 1000.0), (1.01, 3.0), (4.0, 3.0), (32.0, 3.0), (40.0, 3.0), (163.7, 3.0)],
)
def test_every_ratio_of_two_scales_is_written_exactly(factor: float, most: float) -> None:
    """The scales are random, so rounding moves many a solution by some steps."""
    scales = random.Random(1)
    for _ in range(200):
        stretch = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": 4096,
            "mscale": scales.uniform(0.01, most),
            "mscale_all_dim": scales.uniform(0.01, most),
        }
        shape = hf.parse_config(SMALL | {"model_type": "deepseek_v2", "rope_scaling": stretch})
        read = hf.parse_config(hf.make_config(shape, "float32"))
        assert hf.canonical(read) == hf.canonical(shape)


@pytest.mark.parametrize("carries", [False, True])
def test_transformers_loads_our_config(saved: Saved, tmp_path: Path, carries: bool) -> None:
    shape = hf.read_shape(saved.folder).without_mtp
    before = json.loads((saved.folder / "config.json").read_text())
    config = hf.make_config(shape, "float64", before | {"notes": "mine"} if carries else None)
    assert hf.parse_config(config) == shape
    version = saved.model_type[-1]
    assert config["architectures"] == [f"DeepseekV{version}ForCausalLM"]
    assert config.get("notes") == ("mine" if carries else None)
    # transformers would look for the layers of multi-token prediction.
    assert config.get("num_nextn_predict_layers") == (0 if version == "3" else None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(saved.folder / "model.safetensors")
    tokens_BT = torch.randint(VOCAB, TOKENS)
    with torch.no_grad():
        again, first = (
            load_folder(tmp_path, torch.float64),
            load_folder(saved.folder, torch.float64),
        )
        assert torch.equal(again(tokens_BT).logits, first(tokens_BT).logits)


LEAST = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
MINIMAL: dict[str, Any] = {key: SMALL[key] for key in (*LEAST, "vocab_size")} | {
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
}


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_absent_keys_have_the_defaults_of_transformers(model_type: str, tmp_path: Path) -> None:
    config = MINIMAL | {"model_type": model_type}
    if model_type == "deepseek_v3":
        config |= {"num_key_value_heads": 4}  # 128, which would not be the number of heads
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    shape = hf.read_shape(tmp_path)
    assert (shape.norm_eps, shape.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": shape.rope_theta}
    widths = (shape.query_rank, shape.kv_rank, shape.plain_dim, shape.rope_dim, shape.value_dim)
    assert widths == (
        theirs.q_lora_rank,
        theirs.kv_lora_rank,
        theirs.qk_nope_head_dim,
        theirs.qk_rope_head_dim,
        theirs.v_head_dim,
    )
    of_experts = (shape.experts, shape.experts_per_token, shape.expert_width, shape.dense_layers)
    assert of_experts == (
        theirs.n_routed_experts,
        theirs.num_experts_per_tok,
        theirs.moe_intermediate_size,
        theirs.first_k_dense_replace,
    )
    assert shape.shared_ffn == theirs.moe_intermediate_size * theirs.n_shared_experts
    assert (shape.renormalise, shape.router_scale) == (
        theirs.norm_topk_prob,
        theirs.routed_scaling_factor,
    )
    groups = (shape.expert_groups, shape.groups_per_token)
    assert groups == ((8, 4) if model_type == "deepseek_v3" else (1, 1))


def refusal(key: str, value: Any, rule: str) -> tuple[dict[str, Any], str]:
    return {key: value}, f"{key} = {json.dumps(value)} is not supported; it must be {rule}"


*_TYPES, _LAST_TYPE = huggingface_model_types()
_FALSE = "false, null or absent"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("v3", *refusal("attention_bias", True, _FALSE)),
    "quantized": (
        "v3",
        {"quantization_config": {"quant_method": "fp8"}},
        'quantization_config = {"quant_method": "fp8"} is not supported; it must be '
        "false, null or absent",
    ),
    "windows": ("v2", *refusal("sliding_window", 4096, _FALSE)),
    "pairs of halves": ("v3", *refusal("rope_interleave", False, "true or absent")),
    "no latent": ("v3", *refusal("kv_lora_rank", None, "a positive integer")),
    "a rank of 0": ("v3", *refusal("q_lora_rank", 0, "a positive integer or null")),
    "a rank in words": ("v2", *refusal("q_lora_rank", "1536", "a positive integer or null")),
    "other scores": ("v3", *refusal("scoring_func", "softmax", '"sigmoid" or absent')),
    "other scores of V2": ("v2", *refusal("scoring_func", "sigmoid", '"softmax" or absent')),
    "weights that are divided": ("v2", *refusal("norm_topk_prob", True, "false or absent")),
    "another choice": (
        "v2",
        *refusal("topk_method", "noaux_tc", '"greedy" or "group_limited_greedy"'),
    ),
    "a choice in a list": ("v3", *refusal("topk_method", ["noaux_tc"], '"noaux_tc"')),
    "every second layer": ("v2", *refusal("moe_layer_freq", 2, "1 or absent")),
    "no shared expert": ("v2", *refusal("n_shared_experts", None, "a positive integer")),
    "half a layer": ("v3", *refusal("first_k_dense_replace", 0.5, "an integer from 0")),
    "a factor in words": ("v3", *refusal("routed_scaling_factor", "2.5", "a number")),
    "no group": ("v3", *refusal("n_group", None, "a positive integer")),
    "two numbers of experts": (
        "v3",
        {"num_experts": 9},
        "n_routed_experts = 8 is not supported; it must be num_experts = 9",
    ),
    "fewer keys than heads": (
        "v3",
        {"num_key_value_heads": 2},
        "num_key_value_heads = 2 must be num_attention_heads = 4",
    ),
    "values wider than keys": (
        "v2",
        {"v_head_dim": 32},
        "v_head_dim = 32 must be at most 24, the width of a head",
    ),
    "no layer with experts": (
        "v3",
        {"first_k_dense_replace": 3},
        "first_k_dense_replace = 3 and moe_every = 1 leave none of num_hidden_layers = 3 with "
        "experts",
    ),
    "groups that do not divide": (
        "v3",
        {"n_group": 3},
        "n_group = 3 must divide n_routed_experts = 8",
    ),
    "a huge width": (
        "v2",
        {"kv_lora_rank": 10**9},
        "kv_lora_rank = 1000000000 must be from 1 to 1_048_576",
    ),
    "one scale of two": (
        "v3",
        {"rope_scaling": {key: value for key, value in _YARN.items() if key != "mscale"}},
        "rope_scaling.mscale = null is not supported; it must be both mscale and mscale_all_dim "
        "above 0, without attention_factor, or neither",
    ),
    "another model": (
        "v3",
        {"model_type": "deepseek_v32"},
        'model_type = "deepseek_v32" is not supported; '
        f"composer3d reads {', '.join(_TYPES)} and {_LAST_TYPE}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    kind, changes, line = REFUSED[case]
    config = SMALL | {"model_type": f"deepseek_{kind}", "n_group": 4, "topk_group": 2} | changes
    with pytest.raises(CheckpointError) as caught:
        hf.parse_config(config)
    assert caught.value.lines == (line,)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_survive_a_config(preset: str) -> None:
    shape = PRESETS[preset]
    read = hf.parse_config(hf.make_config(shape, "bfloat16"))
    assert hf.canonical(read) == hf.canonical(shape)


# The keys of the config.json of Kimi-K2-Base that say what is computed, without those of its
# quantization (block-wise float8, which is refused as in DeepSeek-V3).
KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_a_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    """transformers has no kimi_k2, so what is written is the deepseek_v3 that computes the same."""
    shape = hf.parse_config(KIMI_K2)
    assert hf.canonical(shape) == hf.canonical(PRESETS["kimi-k2"])
    assert shape == hf.parse_config(KIMI_K2 | {"model_type": "deepseek_v3"})

    for carried in (None, KIMI_K2):
        config = hf.make_config(shape, "bfloat16", carried)
        assert hf.canonical(hf.parse_config(config)) == hf.canonical(shape)
        assert config["model_type"] == "deepseek_v3"
        assert "auto_map" not in config
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert type(theirs) is transformers.DeepseekV3Config
        assert (theirs.n_routed_experts, theirs.routed_scaling_factor) == (384, 2.827)
    assert config["eos_token_id"] == 163585


@pytest.mark.parametrize(
    "key",
    [
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "topk_group",
        "topk_method",
    ],
)
def test_no_default_of_kimi_k2_is_guessed(key: str) -> None:
    """Its own code has other defaults than the deepseek_v3 of transformers."""
    config = {name: value for name, value in KIMI_K2.items() if name != key}
    # Several keys can give the number of experts; the message names the first one.
    named = "num_local_experts" if key == "n_routed_experts" else key
    with pytest.raises(CheckpointError, match=f"^{named} = null is not supported"):
        hf.parse_config(config)


V2, V3 = PRESETS["deepseek-v2"], PRESETS["deepseek-v3"]
NOT_THEIRS: dict[str, tuple[DeepseekShape, str]] = {
    "no bias": (replace(V3, router_bias=False), "deepseek_v3 has no router_bias = False"),
    "a bias of softmax": (replace(V2, router_bias=True), "deepseek_v2 has no router_bias = True"),
    "divided": (replace(V2, renormalise=True), "deepseek_v2 has no renormalise = True"),
    "groups of V2": (replace(V3, group_best="one"), "deepseek_v3 has no group_best = one"),
    "groups of V3": (replace(V2, group_best="two"), "deepseek_v2 has no group_best = two"),
    "every second": (replace(V3, moe_every=2), "deepseek_v3 has no moe_every = 2"),
    "no shared expert": (replace(V3, shared_ffn=0), "shared_ffn = 0 is no multiple of 2048"),
    "a narrow one": (replace(V3, shared_ffn=1000), "shared_ffn = 1000 is no multiple of 2048"),
    "groups of one": (replace(V3, expert_groups=256), "experts = 256 has one in each of 256"),
    "another factor of rotated parts": (
        replace(V3, rope_attention_factor=0.5),
        "no mscale above 0 for rope_attention_factor = 0.5 beside rope_score_mscale = 1",
    ),
    "a gate": (replace(V3, shared_gate=True), "deepseek_v3 has no shared_gate = True"),
    "odd heads": (replace(V2, n_heads=96, n_kv_heads=96), "n_heads = 96 that does not divide"),
}


@pytest.mark.parametrize("case", NOT_THEIRS)
def test_shapes_that_transformers_does_not_compute_have_no_config(case: str) -> None:
    shape, words = NOT_THEIRS[case]
    with pytest.raises(CheckpointError) as caught:
        hf.make_config(shape, "float32")
    (line,) = caught.value.lines
    assert words in line
    assert line.endswith("convert to torch or dcp")


def test_every_plain_value_is_checked() -> None:
    """The values of a manifest, which anybody may have written."""
    values = {entry.name: getattr(V3, entry.name) for entry in fields(DeepseekShape)}
    assert hf.make_shape(values) == V3
    for name, value, words in (
        ("kv_rank", "512", "must be an integer"),
        ("rope_dim", 7, "must be even"),
        ("rope_dim", 192, "must be below 192"),
        ("value_dim", 193, "must be at most 192"),
        ("n_kv_heads", 64, "must be n_heads = 128"),
        ("group_best", "three", 'must be "two" or "one"'),
    ):
        with pytest.raises(CheckpointError, match=words):
            hf.make_shape(values | {name: value})


def test_layers_of_multi_token_prediction_are_left_out() -> None:
    """Only where they are such: another layer too many is no part of the model, and refused."""
    shape = replace(PRESETS["debug-deepseek"], n_layers=2)
    own = {name for place in hf_locations(shape).values() for name in place.names}
    of_prediction = {f"model.layers.2.{name}.weight" for name in ("eh_proj", "enorm", "mlp.gate")}
    assert left_out(shape, own | of_prediction) == of_prediction
    assert left_out(shape, own | {"model.layers.2.mlp.gate.weight"}) == frozenset()
    assert left_out(shape, own | {"model.layers.1.eh_proj.weight"}) == frozenset()


def test_the_bias_of_a_router_has_no_gradient() -> None:
    model = Deepseek(PRESETS["debug-deepseek"], device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    tokens_BT = torch.arange(12)[None]
    model(tokens_BT, tokens_BT, tokens_BT).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {f"blocks.{block}.moe.router.bias" for block in (1, 2, 3)}
