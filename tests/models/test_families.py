"""Families of transformers in float64: shape, names, logits, loss and gradients agree with ours."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from composer3d.convert.convert import convert
from composer3d.facts.errors import CheckpointError
from composer3d.models.contract import SequenceInfo
from composer3d.models.gemma3 import huggingface as gemma3
from composer3d.models.glm import huggingface as glm
from composer3d.models.gpt_oss import huggingface as gpt_oss
from composer3d.models.granite import huggingface as granite
from composer3d.models.llama import huggingface as llama
from composer3d.models.moe.huggingface import untrained
from composer3d.models.olmo2 import huggingface as olmo2
from composer3d.models.phi3 import huggingface as phi3
from composer3d.models.registry import architecture, huggingface_model_types
from tests.models.moe.transformers_models import SMALL, compute_in_float64, take, transformers

TOKENS = (3, 40)  # batch and length
MINIMAL = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}


class Family(NamedTuple):
    """A model_type of transformers.

    Attributes:
        architecture: the name of ours.
        hf: reads and writes its config.json.
        kinds: keys of random models; each option has another value than its default in one.
        refused: a config.json that asks for something else, and the line about it.
    """

    architecture: str
    hf: ModuleType
    kinds: dict[str, dict[str, Any]]
    refused: dict[str, tuple[dict[str, Any], str]]


*_TYPES, _LAST_TYPE = huggingface_model_types()
_WIDE_HEADS = {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
_TIED = {"num_key_value_heads": 4, "tie_word_embeddings": True}
_WINDOWS: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5}


def _layers(count: int, every: int) -> dict[str, Any]:
    """Windows in all of ``count`` layers but every so many."""
    kinds = {True: "full_attention", False: "sliding_attention"}
    layer_types = [kinds[layer % every == every - 1] for layer in range(count)]
    return {"num_hidden_layers": count, "layer_types": layer_types}


_YARN: dict[str, Any] = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
    }
}


def _by_kind(local_theta: float = 2e4, **stretch: Any) -> dict[str, Any]:
    """Positions with another base by the kind of layer; ``stretch`` is that of full layers."""
    plain = {"rope_type": "default", "rope_theta": 2e4}
    windowed = plain | {"rope_theta": local_theta}
    return {"full_attention": plain | stretch, "sliding_attention": windowed}


_GEMMA = {"head_dim": 32, "sliding_window": 5}
_STRETCHES: list[dict[str, Any]] = [
    {"rope_type": "linear"},
    {"rope_type": "dynamic"},
    {"rope_type": "yarn", "original_max_position_embeddings": 16},
    {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]
_NO_BIASES = (
    {"attention_bias": True},
    "attention_bias = true is not supported; it must be false, null or absent",
)
_SILU = ({"hidden_act": "gelu"}, 'hidden_act = "gelu" is not supported; it must be "silu"')
_TOO_DEEP = (
    {"num_hidden_layers": 10**9},
    "num_hidden_layers = 1000000000 must be from 1 to 10_000",
)
*_TYPES, _LAST_TYPE = huggingface_model_types()
_GPT_OSS_YARN = {
    **{"rope_type": "yarn", "rope_theta": 2e4, "factor": 8.0, "truncate": False},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64},
}
_GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
}
# ``num_mtp_layers`` is transformers' own name; it saves no layer of multi-token prediction.
_GLM: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        "llama",
        llama,
        {"windows in two of three layers": {**_WINDOWS, "head_dim": 32, **_layers(5, 3)}},
        {},
    ),
    "smollm3": Family(
        "llama",
        llama,
        {
            "grouped": {"num_hidden_layers": 5},
            "positions in every second layer, untied": {
                "no_rope_layer_interval": 2,
                "tie_word_embeddings": False,
                **_WIDE_HEADS,
            },
            "windows in every second layer": {**_WINDOWS, **_layers(4, 2)},
            "windows in layers without positions": {
                **_WINDOWS,
                "no_rope_layers": [0, 0, 0],
                "num_key_value_heads": 4,
            },
        },
        {},
    ),
    "olmo3": Family(
        "olmo2",
        olmo2,
        {
            "grouped": {"rms_norm_eps": 1e-6, "num_hidden_layers": 5, "sliding_window": 7},
            "windows in every second layer": {**_TIED, **_layers(4, 2), "sliding_window": 5},
            "windows in all layers": {
                "num_hidden_layers": 2,
                "sliding_window": 3,
                "head_dim": 32,
                "rope_parameters": _by_kind(),
            },
            "another base, and a stretch of full layers": {
                **_layers(6, 3),
                "sliding_window": 5,
                "rope_parameters": _by_kind(
                    rope_type="llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=16,
                ),
            },
            "yarn, in its older form": {**_layers(4, 2), "sliding_window": 5, **_YARN},
            "yarn with another base, bounds and factor": {
                **_layers(4, 4),
                "sliding_window": 9,
                "rope_parameters": _by_kind(
                    rope_type="yarn",
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=8.0,
                    beta_slow=2.0,
                    attention_factor=1.5,
                ),
            },
        },
        {
            "biases": _NO_BIASES,
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
            "a stretch that transformers would round": (
                {"rope_scaling": _YARN["rope_scaling"] | {"truncate": False}},
                "truncate = false is not supported; it must be true or absent",
            ),
            "no width": (
                {"sliding_window": None, "num_hidden_layers": 4},
                "sliding_window = null is not supported; it must be a positive integer",
            ),
            "full layers first": (
                {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
                'layer_types = ["full_attention", "sliding_attention", "sliding_attention"] is not '
                "supported; it must be sliding_attention, and full_attention in every N-th layer: "
                "N, 2N, 3N ... counted from 1",
            ),
            "a layer too few": (
                {"layer_types": ["sliding_attention"] * 2},
                'layer_types = ["sliding_attention", "sliding_attention"] is not supported; it '
                "must be one of full_attention and sliding_attention for each layer",
            ),
            "a base that transformers has in full layers alone": (
                {"rope_theta": 1e4},
                'rope_parameters.sliding_attention = {"rope_type": "default", "rope_theta": '
                '500000.0} is not supported; it must be {"rope_type": "default", "rope_theta": '
                "10000.0}: the base of full_attention, without a stretch",
            ),
            "positions of all layers": (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
                'rope_parameters = {"rope_type": "default", "rope_theta": 500000.0} is not '
                "supported; it must be an object with objects full_attention and "
                "sliding_attention, null or absent",
            ),
            "an older name, which transformers does not read": (
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                'rope_parameters = {"factor": 2.0} is not supported; it must be without these '
                "keys, because its rope_type is default",
            ),
        },
    ),
    "olmo2": Family(
        "olmo2",
        olmo2,
        {"grouped": {"rms_norm_eps": 1e-6}, "tied": _TIED, "wide heads": _WIDE_HEADS},
        {
            "biases": _NO_BIASES,
            "the clipping of the first OLMo": (
                {"clip_qkv": 8.0},
                "clip_qkv = 8.0 is not supported; it must be false, null or absent",
            ),
            "the windows of OLMo 3": (
                {"sliding_window": 4096},
                "sliding_window = 4096 is not supported; it must be false, null or absent",
            ),
            "layers with windows": (
                {"layer_types": ["sliding_attention"]},
                'layer_types = ["sliding_attention"] is not supported; it must be '
                '"full_attention" for each layer, or absent',
            ),
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
            "another OLMo": (
                {"model_type": "olmo"},
                'model_type = "olmo" is not supported; composer3d reads '
                f"{', '.join(_TYPES)} and {_LAST_TYPE}",
            ),
        },
    ),
    "granite": Family(
        "granite",
        granite,
        {
            "all multipliers": {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.3,
                "residual_multiplier": 0.22,
                "logits_scaling": 2.5,
            },
            "tied": {**_TIED, "attention_multiplier": 1, "embedding_multiplier": 12},
            "none, wide heads": {**_WIDE_HEADS, "rms_norm_eps": 1e-5},
        },
        {
            "biases": _NO_BIASES,
            "a multiplier of text": (
                {"residual_multiplier": "0.22"},
                'residual_multiplier = "0.22" is not supported; it must be a number',
            ),
            "no number": (
                {"attention_multiplier": None},
                "attention_multiplier = null is not supported; it must be a number",
            ),
            "no logits": (
                {"logits_scaling": 0},
                "logits_scaling = 0 must be above 0 and at most 1_000_000",
            ),
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
        },
    ),
    "gpt_oss": Family(
        "gpt_oss",
        gpt_oss,
        {
            "grouped": {**_GPT_OSS, "num_hidden_layers": 4},
            "tied, clamped, full layers only": {
                **_GPT_OSS,
                **_TIED,
                "swiglu_alpha": 1.2,
                "swiglu_limit": 0.5,
                "sliding_window": 128,
                "layer_types": ["full_attention"] * 3,
            },
            "windows in two of three layers": {
                **_GPT_OSS,
                **_layers(5, 3),
                "sliding_window": 5,
                "num_experts_per_tok": 2,
                "rms_norm_eps": 1e-3,
                "rope_parameters": _GPT_OSS_YARN,
            },
        },
        {
            "all tokens see all": (
                {"is_causal": False},
                "is_causal = false is not supported; it must be true or absent",
            ),
            "no biases": (
                {"attention_bias": False},
                "attention_bias = false is not supported; it must be true or absent",
            ),
            "another quantization": (
                {"quantization_config": {"quant_method": "fp8"}},
                'quantization_config = {"quant_method": "fp8"} is not supported; it must be '
                "false, null or absent",
            ),
            "a bound of text": (
                {"swiglu_limit": "7"},
                'swiglu_limit = "7" is not supported; it must be a number',
            ),
            "too many experts": (
                {"num_local_experts": 2, "num_key_value_heads": 2},
                "num_experts_per_tok = 4 must be at most num_local_experts = 2",
            ),
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
        },
    ),
    "glm4_moe": Family(
        "glm",
        glm,
        {
            "biases and norms": {**_GLM, "attention_bias": True, "use_qk_norm": True},
            "norms, groups, tied": {
                **_GLM,
                **_TIED,
                "first_k_dense_replace": 2,
                "n_group": 4,
                "topk_group": 2,
                "use_qk_norm": True,
                "rms_norm_eps": 1e-3,
                "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.25},
            },
            "biases, all dense but one, three shared, yarn": {
                **_GLM,
                "attention_bias": True,
                "first_k_dense_replace": 2,
                "n_shared_experts": 3,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.5,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 50.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "heads of the width of the stream, all rotated": {
                **_GLM,
                "first_k_dense_replace": 0,
                "head_dim": 16,
                "partial_rotary_factor": 1.0,
            },
        },
        {
            "windows": (
                {"sliding_window": 4096},
                "sliding_window = 4096 is not supported; it must be false, null or absent",
            ),
            "biases in words": (
                {"attention_bias": "yes"},
                'attention_bias = "yes" is not supported; it must be true, false or absent',
            ),
            "an odd part of a head": (
                {"head_dim": 10, "num_key_value_heads": 2},
                "partial_rotary_factor = 0.5 of 10, the width of a head, must be an even number "
                "from 2",
            ),
            "no part of a head": (
                {"rope_parameters": {"partial_rotary_factor": 0}},
                "partial_rotary_factor = 0 must be above 0 and at most 1",
            ),
            "a part in words": (
                {"partial_rotary_factor": "half"},
                'partial_rotary_factor = "half" is not supported; it must be a number',
            ),
            "more than a head": (
                {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.5}},
                "partial_rotary_factor = 1.5 must be above 0 and at most 1",
            ),
            "another choice of experts": (
                {"topk_method": "greedy"},
                'topk_method = "greedy" is not supported; it must be "noaux_tc"',
            ),
            "no shared expert": (
                {"n_shared_experts": 0},
                "n_shared_experts = 0 is not supported; it must be a positive integer",
            ),
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
            "the dense GLM-4": (
                {"model_type": "glm4"},
                'model_type = "glm4" is not supported; composer3d reads '
                f"{', '.join(_TYPES)} and {_LAST_TYPE}",
            ),
        },
    ),
    "phi3": Family(
        "phi3",
        phi3,
        {
            "window": {"sliding_window": 7, "rms_norm_eps": 1e-6},
            "tied": _TIED,
            "wide heads": {"head_dim": 32, "rope_parameters": {"rope_theta": 5e5}},
        },
        {
            "biases": _NO_BIASES,
            "another activation": _SILU,
            "a size out of range": _TOO_DEEP,
            "dropout": (
                {"resid_pdrop": 0.1},
                "resid_pdrop = 0.1 is not supported; it must be false, null or absent",
            ),
            "a window of nothing": (
                {"sliding_window": 0},
                "sliding_window = 0 is not supported; it must be a positive integer, null or "
                "absent",
            ),
            "the parts of heads that Phi-4-mini turns": (
                {"partial_rotary_factor": 0.75},
                "partial_rotary_factor = 0.75 is not supported; it must be 1",
            ),
            "what transformers takes for longrope": (
                {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 256},
                'rope_scaling.rope_type = "yarn" is not supported; it must be "default"',
            ),
            "the long texts of Phi-3-mini-128k": (
                {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
                'rope_scaling.rope_type = "longrope" is not supported; it must be "default", '
                '"llama3", "linear", "dynamic" or "yarn"',
            ),
        },
    ),
    "gemma3_text": Family(
        "gemma3",
        gemma3,
        {
            "grouped": {**_GEMMA, "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
            "windows in two of three layers, another scale": {
                **_GEMMA,
                "num_hidden_layers": 4,
                "sliding_window_pattern": 3,
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 50,
                "tie_word_embeddings": False,
                "rms_norm_eps": 1e-5,
            },
            "other bases by the kind of layer": {
                **_GEMMA,
                **_layers(5, 2),
                "rope_parameters": _by_kind(local_theta=30.0),
            },
            **{
                f"full layers stretched, {scaling['rope_type']}": {
                    **_GEMMA,
                    **_layers(4, 2),
                    "rope_parameters": _by_kind(local_theta=50.0, factor=8.0, **scaling),
                }
                for scaling in _STRETCHES
            },
            "windows in all layers": {
                "sliding_window": 3,
                "layer_types": ["sliding_attention"] * 3,
            },
            "no windows": {"layer_types": ["full_attention"] * 3, "head_dim": 16},
        },
        {
            "biases": _NO_BIASES,
            "another activation": (
                {"hidden_activation": "gelu"},
                'hidden_activation = "gelu" is not supported; it must be "gelu_pytorch_tanh"',
            ),
            "a size out of range": _TOO_DEEP,
            "capped logits": (
                {"final_logit_softcapping": 30.0},
                "final_logit_softcapping = 30.0 is not supported; it must be false, null or absent",
            ),
            "capped scores": (
                {"attn_logit_softcapping": 50.0},
                "attn_logit_softcapping = 50.0 is not supported; it must be false, null or absent",
            ),
            "attention both ways": (
                {"use_bidirectional_attention": True},
                "use_bidirectional_attention = true is not supported; it must be false, null or "
                "absent",
            ),
            "no scale": (
                {"query_pre_attn_scalar": 0},
                "query_pre_attn_scalar = 0 is not supported; it must be a positive integer",
            ),
            "no width of a head": (
                {"head_dim": None},
                "head_dim = null is not supported; it must be a positive integer",
            ),
            "no pattern": (
                {"sliding_window_pattern": None},
                "sliding_window_pattern = null is not supported; it must be a positive integer",
            ),
            "a base of text": (
                {"rope_local_base_freq": "1e4"},
                'rope_local_base_freq = "1e4" is not supported; it must be a number',
            ),
            "a stretch of layers with windows": (
                {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
                'rope_parameters.sliding_attention = {"rope_type": "linear", "rope_theta": '
                '10000.0, "factor": 2.0} is not supported; it must be a rope_theta with the '
                "rope_type default",
            ),
            "positions of all layers": (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
                'rope_parameters = {"rope_type": "default", "rope_theta": 500000.0} is not '
                "supported; it must be an object with objects full_attention and "
                "sliding_attention, null or absent",
            ),
            "vision": (
                {"model_type": "gemma3", "vision_config": {}},
                'model_type = "gemma3" is not supported: its config.json has a vision_config, and '
                "composer3d computes models of text alone",
            ),
        },
    ),
}
CASES = [(family, kind) for family, entry in FAMILIES.items() for kind in entry.kinds]


class Saved(NamedTuple):
    """A random model that transformers has saved: its family, and its folder."""

    family: str
    folder: Path

    @property
    def hf(self) -> ModuleType:
        return FAMILIES[self.family].hf


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A random model in float64, saved by transformers. No norm has the ones that it starts with.

    A norm of ones could be missing, or stand in the place of another, and no logit would tell.
    Nor would a bias of the choice of experts that is 0.
    """
    family, kind = request.param
    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(1)
    settings = SMALL | FAMILIES[family].kinds[kind]
    # The embedding of a token for padding would have no gradient.
    config = transformers.AutoConfig.for_model(family, **settings, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [bias for name, bias in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(torch.float64).save_pretrained(folder)
    return Saved(family, folder)


def load_theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def load_ours(saved: Saved) -> Any:
    """Return our model with the weights of a folder."""
    # transformers names a layer of multi-token prediction, and saves none.
    shape = saved.hf.read_shape(saved.folder).without_mtp
    ours = architecture(FAMILIES[saved.family].architecture)
    tensors = load_file(saved.folder / "model.safetensors")
    places = ours.hf_locations(shape, tensors)
    assert tensors.keys() == {name for place in places.values() for name in place.names}
    model = ours.build(shape, device="cpu", dtype=torch.float64)
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
    compute_in_float64(monkeypatch, saved.family)
    ours, theirs = load_ours(saved), load_theirs(saved.folder)
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
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
    # Experts are packed, as transformers has them in memory.
    places = architecture(FAMILIES[saved.family].architecture).hf_locations(ours.shape, grads)
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            assert relative_error(parameter.grad, take(places[name], grads)) < 1e-11, name


def test_logits_are_those_of_transformers_as_it_ships(saved: Saved) -> None:
    """It computes norms and positions in float32, whatever the model is in."""
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    seq = SequenceInfo(torch.arange(TOKENS[1]).expand(TOKENS))
    with torch.no_grad():
        expected = load_theirs(saved.folder)(tokens_BT).logits
        assert relative_error(load_ours(saved).logits(tokens_BT, seq), expected) < 1e-6


@pytest.mark.parametrize("carries", [False, True])
def test_transformers_loads_our_config(saved: Saved, tmp_path: Path, carries: bool) -> None:
    folder, hf = saved.folder, saved.hf
    shape = hf.read_shape(folder).without_mtp
    before = json.loads((folder / "config.json").read_text())
    config = hf.make_config(shape, "float64", before | {"notes": "mine"} if carries else None)
    assert hf.parse_config(config) == shape
    assert config["architectures"] == before["architectures"]
    for key in ("layer_types", "no_rope_layers", "sliding_window"):
        assert config.get(key) == before.get(key)
    assert config.get("notes") == ("mine" if carries else None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokens_BT = torch.randint(SMALL["vocab_size"], TOKENS)
    with torch.no_grad():
        assert torch.equal(
            load_theirs(tmp_path)(tokens_BT).logits, load_theirs(folder)(tokens_BT).logits
        )


def test_files_come_back_with_the_same_bits(saved: Saved, tmp_path: Path) -> None:
    convert(saved.folder, tmp_path / "ours", "dcp")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    before = load_file(saved.folder / "model.safetensors")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again, first = (saved.hf.read_shape(folder) for folder in (tmp_path / "again", saved.folder))
    assert again == first.without_mtp


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    # Of 32 heads, the default of key-value heads is a divisor.
    sizes = {"hidden_size": 128, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | sizes | {"model_type": family}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    shape = FAMILIES[family].hf.read_shape(tmp_path)
    assert shape.n_kv_heads == theirs.num_key_value_heads
    assert (shape.norm_eps, shape.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    positions = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if family in ("olmo3", "gemma3_text"):
        windowed = {"rope_theta": getattr(shape, "rope_local_theta", shape.rope_theta)}
        positions = {"full_attention": positions, "sliding_attention": positions | windowed}
    elif family == "phi3":
        positions["partial_rotary_factor"] = 1.0
    elif family == "glm4_moe":
        positions["partial_rotary_factor"] = shape.rope_share
    elif family == "gpt_oss":
        positions = {
            "rope_type": shape.rope_scaling,
            "rope_theta": shape.rope_theta,
            "factor": shape.rope_factor,
            "beta_fast": shape.rope_beta_fast,
            "beta_slow": shape.rope_beta_slow,
            "truncate": shape.rope_truncate,
            "original_max_position_embeddings": shape.rope_context,
        }
    assert theirs.rope_parameters == positions
    if family != "granite":
        windows = [shape.window_of(layer) for layer in range(shape.n_layers)]
        kinds = ["sliding_attention" if window else "full_attention" for window in windows]
        assert kinds == getattr(theirs, "layer_types", kinds)
    if family == "glm4_moe":
        assert (shape.qkv_bias, shape.qk_norm) == (theirs.attention_bias, theirs.use_qk_norm)
        experts = (shape.experts, shape.experts_per_token, shape.expert_width, shape.dense_layers)
        router = (shape.renormalise, shape.router_scale, shape.expert_groups)
        assert (*experts, *router, shape.groups_per_token) == (
            *(theirs.n_routed_experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size),
            *(theirs.first_k_dense_replace, theirs.norm_topk_prob, theirs.routed_scaling_factor),
            *(theirs.n_group, theirs.topk_group),
        )
        assert shape.shared_ffn == theirs.moe_intermediate_size * theirs.n_shared_experts
    if family == "gemma3_text":  # None: the width of a head
        assert (shape.head_width, shape.query_pre_attn_scalar) == (theirs.head_dim, None)
        assert theirs.query_pre_attn_scalar == theirs.head_dim
    for name in ("embedding_multiplier", "attention_multiplier", "logits_scaling"):
        assert getattr(shape, name, None) == getattr(theirs, name, None)


@pytest.mark.parametrize(
    ("family", "case"), [(name, case) for name, entry in FAMILIES.items() for case in entry.refused]
)
def test_what_is_not_computed_is_refused(family: str, case: str) -> None:
    changes, line = FAMILIES[family].refused[case]
    with pytest.raises(CheckpointError) as caught:
        FAMILIES[family].hf.parse_config(MINIMAL | {"model_type": family} | changes)
    assert caught.value.lines == (line,)


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        (name, preset)
        for name in ("olmo2", "granite", "gemma3_text", "glm4_moe")
        for preset in architecture(FAMILIES[name].architecture).presets
    ],
)
def test_presets_survive_a_config(family: str, preset: str) -> None:
    hf, ours = FAMILIES[family].hf, architecture(FAMILIES[family].architecture)
    shape = ours.presets[preset]
    assert hf.parse_config(hf.make_config(shape, "bfloat16")) == untrained(shape)


def test_a_gpt_oss_with_empty_positions_is_not_stretched(tmp_path: Path) -> None:
    config = MINIMAL | {"model_type": "gpt_oss", "num_key_value_heads": 2, "rope_parameters": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_type"] == "default"
    assert gpt_oss.read_shape(tmp_path).rope_factor == 1


def test_a_granite_that_divides_scores_as_usual_says_so_in_its_config() -> None:
    """A config.json without the multiplier would mean 1."""
    shape = architecture("granite").shape(64, 2, 4, 2, 96, 131)
    config = granite.make_config(shape, "float32")
    assert config["attention_multiplier"] == 16**-0.5
    assert granite.canonical(granite.parse_config(config)) == granite.canonical(shape)
