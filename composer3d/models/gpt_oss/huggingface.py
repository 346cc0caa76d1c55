"""Translate between Hugging Face's config.json and a ``GptOssShape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked. ``router_aux_loss_coef`` is not read (see ``models.moe.huggingface``).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from composer3d.models.gpt_oss.shape import GptOssShape
from composer3d.models.llama import huggingface as llama
from composer3d.models.llama.huggingface import (
    FULL,
    SLIDING,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    layer_types_of,
    parse_decoder,
    parse_layer_types,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.moe.huggingface import parse_number_of_experts, untrained
from composer3d.models.shape import is_nth
from composer3d.models.untrusted import Requirements, checked_shape, is_number, is_size

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

MODEL_TYPES = ("gpt_oss",)  # the values of model_type that this module reads

_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_DEFAULT_EXPERTS = 128
_DEFAULT_THETA = 150_000.0
_DEFAULT_STRETCH = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_KEYS = {
    **llama.KEYS,
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "gate_limit": "swiglu_limit",
    "gate_slope": "swiglu_alpha",
}


def _find_problems(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return a line for each rule on several values that is broken, as the rules of recipes do."""
    problems = decoder_problems(values, labels)
    if values["experts_per_token"] > values["experts"]:
        problems.append(f"{labels['experts_per_token']} must be at most {labels['experts']}")
    return problems


# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, GptOssShape, find_problems=_find_problems)


def parse_config(config: Any) -> GptOssShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    config = _without_mxfp4(_DEFAULTS | config)
    if not config.get("rope_scaling") and config.get("rope_parameters") is None:
        config["rope_parameters"] = _DEFAULT_STRETCH
    checks = Requirements()
    values = parse_decoder(
        config, checks, unsupported=("use_sliding_window",), rope_theta=_DEFAULT_THETA
    )
    # The key stands for the biases of all four projections.
    has_bias = config.get("attention_bias", True)
    checks.require(has_bias is True, "attention_bias", has_bias, "true or absent")
    values |= parse_number_of_experts(config, checks, _DEFAULT_EXPERTS)
    per_token = config["num_experts_per_tok"]
    checks.require(is_size(per_token), "num_experts_per_tok", per_token, "a positive integer")
    values["experts_per_token"] = per_token
    for name, key in (("gate_slope", "swiglu_alpha"), ("gate_limit", "swiglu_limit")):
        checks.require(is_number(config[key]), key, config[key], "a number")
        values[name] = config[key]
    checks.raise_problems()

    make_shape(values, _KEYS)  # the list below has a value for each layer: not for too many
    n_layers = values["n_layers"]
    layer_types = config.get("layer_types")
    if layer_types is None:
        layer_types = [FULL if is_nth(layer, 2) else SLIDING for layer in range(n_layers)]
    values |= parse_layer_types(layer_types, config["sliding_window"], n_layers, checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, _KEYS))


def _without_mxfp4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the key that says that experts are in MXFP4.

    ``convert.mxfp4`` reads them, and the shape is the same.
    """
    quantization = config.get("quantization_config")
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return {key: config[key] for key in config if not is_mxfp4 or key != "quantization_config"}


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def canonical(shape: GptOssShape) -> GptOssShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    return llama.canonical(untrained(shape))


def make_config(
    shape: GptOssShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does."""
    own = decoder_keys(shape, "gpt_oss") | {
        "attention_bias": True,
        "layer_types": layer_types_of(shape),
        "num_experts_per_tok": shape.experts_per_token,
        "num_local_experts": shape.experts,
        # transformers wants a number even if all layers are full.
        "sliding_window": shape.window or _DEFAULTS["sliding_window"],
        "swiglu_alpha": shape.gate_slope,
        "swiglu_limit": shape.gate_limit,
    }
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    # Where a config.json says nothing of a stretch, positions are stretched.
    positions = {"rope_scaling": {"rope_type": "default"}} if shape.rope_factor == 1 else {}
    return complete_config(
        own, shape, dtype, _without_mxfp4(carried or {}), is_same, positions=positions
    )
