"""Translate between Hugging Face's config.json and a ``MoeShape``: Mixtral, Qwen 3 MoE. No torch.

As ``models.llama.huggingface``, for the keys of experts.

Keys that matter in training alone are not read: ``router_jitter_noise``, ``output_router_logits``
and ``router_aux_loss_coef``. The last one is no ``balance_loss``, because the two losses differ.
transformers pools the tokens of all layers and of the whole micro-batch into one loss, which is
``num_experts_per_tok`` at best. Ours is a loss of each layer and each sequence, which is 1 at best.
With one layer and one sequence, its coefficient would be ``router_aux_loss_coef`` times
``num_experts_per_tok``; otherwise no factor makes them equal. So ``balance_loss`` is 0 unless the
recipe sets it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import short_json
from composer3d.models.llama.huggingface import (
    FULL,
    SLIDING,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    parse_decoder,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.llama.huggingface import KEYS as DECODER_KEYS
from composer3d.models.llama.huggingface import canonical as canonical_decoder
from composer3d.models.moe.shape import MoeShape
from composer3d.models.untrusted import Requirements, checked_shape, is_size

# For each model_type, the defaults of keys. Both types have others than Llama.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
}
_DEFAULT_EXPERTS = {"mixtral": 8, "qwen3_moe": 128}
_DEFAULT_THETAS = {"mixtral": 1e6, "qwen3_moe": 1e4}

# All names of the number of experts. Versions of transformers read and write different ones.
_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")

_KEYS = {
    **DECODER_KEYS,
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "renormalise": "norm_topk_prob",
}

MODEL_TYPES = tuple(_DEFAULTS)  # the values of model_type that this module reads


def read_shape(folder: str | Path) -> MoeShape:
    """Return the shape that the config.json of ``folder`` describes.

    Raises CheckpointError if the file cannot be read or ``parse_config`` refuses its content.
    """
    return read_config(folder, parse_config)


def parse_config(config: Any) -> MoeShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS[model_type] | config
    is_qwen = model_type == "qwen3_moe"
    checks = Requirements()
    values = parse_decoder(
        config,
        checks,
        unsupported=("attention_bias",),
        rope_theta=_DEFAULT_THETAS[model_type],
    )
    values["qk_norm"] = is_qwen
    values |= _parse_experts(config, checks)
    checks.raise_problems()

    keys = _KEYS | {"experts": _experts_key(config)}
    make_shape(values, keys)  # the checks below loop over layers, so their number must be in range
    if is_qwen:
        values |= _parse_layers(config, checks)
    values["window"] = _parse_window(config, checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, keys))


def _experts_key(config: Mapping[str, Any]) -> str:
    """Return the key that gives the number of experts: the first that is there."""
    given = (key for key in _EXPERTS_KEYS if config.get(key) is not None)
    return next(given, _EXPERTS_KEYS[0])


def _parse_experts(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields of experts that are the same in all layers."""
    require, model_type = checks.require, config["model_type"]
    first_key = _experts_key(config)
    experts = config.get(first_key)
    experts = _DEFAULT_EXPERTS[model_type] if experts is None else experts
    require(is_size(experts), first_key, experts, "a positive integer")
    for key in _EXPERTS_KEYS:
        value = config.get(key)
        is_same = value is None or value == experts
        require(is_same, key, value, f"{first_key} = {short_json(experts)}")

    per_token = config["num_experts_per_tok"]
    require(is_size(per_token), "num_experts_per_tok", per_token, "a positive integer")
    values = {"experts": experts, "experts_per_token": per_token}
    if model_type == "mixtral":  # its experts are intermediate_size wide
        return values

    width = config["moe_intermediate_size"]
    require(is_size(width), "moe_intermediate_size", width, "a positive integer")
    renormalise = config.get("norm_topk_prob", False)
    require(type(renormalise) is bool, "norm_topk_prob", renormalise, "true, false or absent")
    return values | {"expert_ffn": width, "renormalise": renormalise}


def _parse_layers(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields that say which layers have experts."""
    n_layers = config["num_hidden_layers"]
    step = config.get("decoder_sparse_step", 1)
    is_valid = is_size(step)
    checks.require(is_valid, "decoder_sparse_step", step, "a positive integer or absent")
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    is_list = isinstance(dense, list) and all(
        type(layer) is int and 0 <= layer < n_layers for layer in dense
    )
    rule = f"a list of integers from 0 to {n_layers - 1}, null or absent"
    checks.require(is_list, "mlp_only_layers", dense, rule)
    if not (is_valid and is_list):
        return {}

    dense_layers = set(dense)
    has_experts = [
        layer not in dense_layers and (layer + 1) % step == 0 for layer in range(n_layers)
    ]
    if not any(has_experts):
        checks.problems.append(
            f"mlp_only_layers = {short_json(dense)} and decoder_sparse_step = {short_json(step)} "
            "leave no layer with experts"
        )
        return {}
    described = _describe_layers(has_experts)
    rule = (
        "a list of the first layers: model.dense_layers and model.moe_every of a recipe describe "
        "no others"
    )
    checks.require(described is not None, "mlp_only_layers", dense, rule)
    return described or {}


def _describe_layers(has_experts: Sequence[bool]) -> dict[str, int] | None:
    """Return the smallest ``dense_layers``, and its ``moe_every``, that describe layers.

    Args:
        has_experts: whether each layer has experts.

    Returns:
        The fields of a MoeShape, or None if none describe these layers.
    """
    layers = [layer for layer, has in enumerate(has_experts) if has]
    if not layers:
        return None
    first = layers[0]
    every = layers[1] - first if len(layers) > 1 else first + 1
    dense = max(first - every + 1, 0)
    described = [layer >= dense and (layer + 1) % every == 0 for layer in range(len(has_experts))]
    return {"dense_layers": dense, "moe_every": every} if described == list(has_experts) else None


def _parse_window(config: Mapping[str, Any], checks: Requirements) -> int:
    """Return the sliding window of all layers, or 0 if there is none."""
    window = config.get("sliding_window")
    if config["model_type"] == "qwen3_moe" and not config.get("use_sliding_window"):
        window = None
    rule = "a positive integer, null or absent"
    checks.require(window is None or is_size(window), "sliding_window", window, rule)

    # transformers does not compute with layer_types here, so it must not say anything else.
    layer_types = config.get("layer_types")
    layer_type = FULL if window is None else SLIDING
    is_same = layer_types in (None, [layer_type] * config["num_hidden_layers"])
    checks.require(is_same, "layer_types", layer_types, f'"{layer_type}" for each layer, or absent')
    return window or 0


def make_shape(values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> MoeShape:
    """Check plain values from an untrusted file, and make a MoeShape of them.

    Args:
        values: values by the names of their fields. Names that no field has are ignored.
        keys: for messages, the name of each field in the file, if the file uses another name.

    Raises:
        CheckpointError: as ``checked_shape``.
    """
    return checked_shape(MoeShape, values, keys or {}, _find_problems)


def _find_problems(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return a line for each rule on several values that is broken, as the rules of recipes do."""
    problems = decoder_problems(values, labels)
    experts, groups = values["experts"], values["expert_groups"]
    if experts % groups:
        problems.append(f"{labels['expert_groups']} must divide {labels['experts']}")
    elif values["groups_per_token"] > groups:
        problems.append(f"{labels['groups_per_token']} must be at most {labels['expert_groups']}")
    elif values["experts_per_token"] > values["groups_per_token"] * (experts // groups):
        in_groups = "" if groups == 1 else f" in {labels['groups_per_token']}"
        problems.append(
            f"{labels['experts_per_token']} must be at most the experts{in_groups} of "
            f"{labels['experts']}"
        )
    last = values["n_layers"] // values["moe_every"] * values["moe_every"]  # counted from 1
    if last <= values["dense_layers"]:
        problems.append(
            f"{labels['dense_layers']} and {labels['moe_every']} leave none of "
            f"{labels['n_layers']} with experts"
        )
    return problems


def canonical(shape: MoeShape) -> MoeShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    changes: dict[str, Any] = {
        entry.name: entry.default for entry in fields(shape) if entry.name in shape.training_fields
    }
    changes["expert_ffn"] = shape.expert_width
    if not shape.qk_norm:  # a Mixtral has one width only
        changes["ffn"] = shape.expert_width
    layers = _describe_layers([shape.has_experts(layer) for layer in range(shape.n_layers)])
    return replace(canonical_decoder(shape), **changes | (layers or {}))


def make_config(
    shape: MoeShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of a config.json for ``shape`` with weights of ``dtype``.

    Args:
        shape: the shape of the model.
        dtype: the name of the dtype of the weights, such as "bfloat16".
        carried: the config.json that came with the model. If it describes this shape, all its other
            keys are kept. Otherwise only the ids of special tokens and ``max_position_embeddings``
            are kept.

    Raises:
        CheckpointError: no architecture of transformers that we support computes this shape. The
            error has a line for each field.
    """
    model_type = "qwen3_moe" if shape.qk_norm else "mixtral"
    _require_supported(shape, model_type)
    own = decoder_keys(shape, model_type)
    own |= {
        "sliding_window": shape.window or None,
        "num_experts_per_tok": shape.experts_per_token,
    }
    if model_type == "mixtral":
        own |= {"intermediate_size": shape.expert_width, "num_local_experts": shape.experts}
    else:
        own |= {
            "num_experts": shape.experts,  # transformers 4 does not read num_local_experts
            "moe_intermediate_size": shape.expert_width,
            "norm_topk_prob": shape.renormalise,
            "decoder_sparse_step": shape.moe_every,
            "mlp_only_layers": list(range(shape.dense_layers)),
            "use_sliding_window": shape.window > 0,
        }
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)


def _require_supported(shape: MoeShape, model_type: str) -> None:
    """Raise CheckpointError if transformers computes no such shape as a ``model_type``."""
    required: dict[str, Any] = {
        "router": "softmax",
        "router_scale": 1.0,
        "expert_groups": 1,
        "router_bias": False,
        "shared_ffn": 0,
        "qkv_bias": False,
    }
    if model_type == "mixtral":
        required["renormalise"] = True
    lines = [
        f"Hugging Face's {model_type} has no {name} = {getattr(shape, name)}; "
        "convert to torch or dcp"
        for name, value in required.items()
        if getattr(shape, name) != value
    ]
    if model_type == "mixtral" and shape.moe_layers < shape.n_layers:
        lines.append(
            f"Hugging Face's mixtral has experts in all layers, not in {shape.moe_layers} of "
            f"{shape.n_layers}; convert to torch or dcp"
        )
    if lines:
        raise CheckpointError(lines)
