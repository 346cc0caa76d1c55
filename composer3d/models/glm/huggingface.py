"""Translate between Hugging Face's config.json and a ``GlmShape``. No torch here.

As ``models.deepseek.huggingface``, which has the keys of experts and of multi-token prediction.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import nextafter
from typing import Any

from composer3d.facts.errors import CheckpointError
from composer3d.models.deepseek.huggingface import (
    KEYS_WITH_EXPERTS,
    V3,
    expert_keys,
    parse_depths,
    parse_experts,
    unsupported_experts,
    with_depths,
)
from composer3d.models.glm.shape import GlmShape
from composer3d.models.llama import huggingface as llama
from composer3d.models.llama.huggingface import (
    complete_config,
    decoder_keys,
    describes,
    parse_decoder,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.moe.huggingface import (
    canonical_experts,
    expert_problems,
    parse_number_of_experts,
)
from composer3d.models.untrusted import Requirements, checked_shape, is_number

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

_GLM = "glm4_moe"
MODEL_TYPES = (_GLM,)  # the values of model_type that this module reads

_SHARE = "partial_rotary_factor"
_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",  # transformers knows no other
    "use_qk_norm": False,
    _SHARE: 0.5,
}
_DEFAULT_EXPERTS = 128
_UNSUPPORTED = ("sliding_window", "use_sliding_window")
_KEYS = {**KEYS_WITH_EXPERTS, "rope_share": _SHARE}


def _find_problems(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return a line for each rule on several values that is broken, as the rules of recipes do."""
    problems = expert_problems(values, labels, GlmShape)
    if not problems:
        shape = GlmShape(**values)
        if shape.rotated_width != int(shape.head_width * shape.rope_share):
            problems.append(
                f"{labels['rope_share']} of {shape.head_width}, the width of a head, must be an "
                "even number from 2"
            )
    return problems


# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, GlmShape, find_problems=_find_problems)


def parse_config(config: Any) -> GlmShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    share, config = _take_share(_DEFAULTS | config)
    checks = Requirements()
    checks.require(is_number(share), _SHARE, share, "a number")
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED)
    values |= parse_number_of_experts(config, checks, _DEFAULT_EXPERTS)
    values |= parse_experts(config, checks, V3)
    values |= parse_depths(config, checks)
    for name, key in (("qkv_bias", "attention_bias"), ("qk_norm", "use_qk_norm")):
        checks.require(type(config[key]) is bool, key, config[key], "true, false or absent")
        values[name] = config[key]
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values | {"rope_share": share}, _KEYS))


def _take_share(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the share of a head that is rotated, and a config.json without it.

    As in transformers, the object of positions has it before the top level. There may be two such
    objects, of which one is read.
    """
    share, rest = config[_SHARE], {key: config[key] for key in config if key != _SHARE}
    read = "rope_scaling" if rest.get("rope_scaling") else "rope_parameters"
    for place in ("rope_parameters", "rope_scaling"):
        positions = rest.get(place)
        if isinstance(positions, dict) and _SHARE in positions:
            share = positions[_SHARE] if place == read else share
            rest[place] = {key: positions[key] for key in positions if key != _SHARE}
    return share, rest


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def canonical(shape: GlmShape) -> GlmShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    shape = llama.canonical(canonical_experts(shape))
    return replace(
        shape,
        expert_ffn=shape.expert_width,
        rope_share=_written_share(shape),
    )


def _written_share(shape: GlmShape) -> float:
    """Return a share of a head of which transformers rotates as many numbers as this shape.

    It rounds the product with the width of a head down, which may be below the whole number.
    """
    share = shape.rotated_width / shape.head_width
    return share if int(shape.head_width * share) == shape.rotated_width else nextafter(share, 1)


def make_config(
    shape: GlmShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: transformers computes no such GLM-4.5. The error has a line for each field.
    """
    _require_supported(shape)
    own = decoder_keys(shape, _GLM) | {
        "attention_bias": shape.qkv_bias,
        "use_qk_norm": shape.qk_norm,
        **expert_keys(shape),
    }
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(
        with_depths(own, shape),
        shape,
        dtype,
        with_depths(carried or {}, shape),
        is_same,
        positions={_SHARE: canonical(shape).rope_share},
    )


def _require_supported(shape: GlmShape) -> None:
    """Raise CheckpointError if transformers computes no such shape as a GLM-4.5."""
    required: dict[str, Any] = {
        "router": "sigmoid",
        "router_bias": True,
        "moe_every": 1,
        "shared_gate": False,
        "window": 0,
        "nope_every": 0,
    }
    if shape.expert_groups > 1:
        required["group_best"] = "two"
    lines = unsupported_experts(shape, _GLM, required)
    if lines:
        raise CheckpointError(lines)
