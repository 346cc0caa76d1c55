"""Translate between Hugging Face's config.json and a ``MoeShape``: Mixtral, Qwen MoE. No torch.

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
from typing import Any, TypeVar

from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import short_json
from composer3d.models.llama.huggingface import (
    FULL,
    SLIDING,
    Shape,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    layer_types_of,
    parse_decoder,
    parse_layer_types,
    parse_window_of_all,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.llama.huggingface import KEYS as DECODER_KEYS
from composer3d.models.llama.huggingface import canonical as canonical_decoder
from composer3d.models.llama.shape import RotaryShape
from composer3d.models.moe.shape import ExpertsShape, MoeShape
from composer3d.models.untrusted import Requirements, checked_shape, is_size

# For each model_type, the defaults of keys. All types have others than Llama.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "sliding_window": 4096,
    },
}
_DEFAULT_EXPERTS = {"mixtral": 8, "qwen2_moe": 60, "qwen3_moe": 128}
_DEFAULT_THETAS = {"mixtral": 1e6, "qwen2_moe": 1e4, "qwen3_moe": 1e4}
# For each model_type, the keys that must be false, null or absent. Qwen 2 ignores attention_bias.
_UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "mixtral": ("attention_bias",),
    "qwen2_moe": (),
    "qwen3_moe": ("attention_bias",),
}

# All names of the number of experts. Versions of transformers read and write different ones.
_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")

_KEYS = {
    **DECODER_KEYS,
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "renormalise": "norm_topk_prob",
}

WithExperts = TypeVar("WithExperts", bound=ExpertsShape)

MODEL_TYPES = tuple(_DEFAULTS)  # the values of model_type that this module reads


def parse_config(config: Any) -> MoeShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS[model_type] | config
    checks = Requirements()
    values = parse_decoder(
        config,
        checks,
        unsupported=_UNSUPPORTED[model_type],
        rope_theta=_DEFAULT_THETAS[model_type],
    )
    values["qk_norm"] = model_type == "qwen3_moe"
    values |= _parse_experts(config, checks)
    if model_type == "qwen2_moe":
        values |= _parse_qwen_2(config, checks)
    checks.raise_problems()

    keys = _KEYS | {"experts": _experts_key(config)}
    make_shape(values, keys)  # the checks below loop over layers, so their number must be in range
    if model_type != "mixtral":
        values |= _parse_layers(config, checks)
    values |= _parse_window(config, checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, keys))


def parse_number_of_experts(
    config: Mapping[str, Any], checks: Requirements, default: int | None
) -> dict[str, Any]:
    """Return the field ``experts``. Each of the keys that give it must have the same value.

    A ``default`` of None: one of them must be there.
    """
    first_key = _experts_key(config)
    experts = config.get(first_key)
    experts = default if experts is None else experts
    checks.require(is_size(experts), first_key, experts, "a positive integer")
    for key in _EXPERTS_KEYS:
        value = config.get(key)
        is_same = value is None or value == experts
        checks.require(is_same, key, value, f"{first_key} = {short_json(experts)}")
    return {"experts": experts}


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def _experts_key(config: Mapping[str, Any]) -> str:
    """Return the key that gives the number of experts: the first that is there."""
    if config["model_type"] == "qwen2_moe":  # transformers reads no other one
        return "num_experts"
    given = (key for key in _EXPERTS_KEYS if config.get(key) is not None)
    return next(given, _EXPERTS_KEYS[0])


def _parse_experts(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields of experts that are the same in all layers."""
    require, model_type = checks.require, config["model_type"]
    values = parse_number_of_experts(config, checks, _DEFAULT_EXPERTS[model_type])
    per_token = config["num_experts_per_tok"]
    require(is_size(per_token), "num_experts_per_tok", per_token, "a positive integer")
    values["experts_per_token"] = per_token
    if model_type == "mixtral":  # its experts are intermediate_size wide
        return values

    width = config["moe_intermediate_size"]
    require(is_size(width), "moe_intermediate_size", width, "a positive integer")
    renormalise = config.get("norm_topk_prob", False)
    require(type(renormalise) is bool, "norm_topk_prob", renormalise, "true, false or absent")
    return values | {"expert_ffn": width, "renormalise": renormalise}


def _parse_qwen_2(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields of what Qwen 2 has and the other types do not."""
    width, has_bias = config["shared_expert_intermediate_size"], config["qkv_bias"]
    rule = "a positive integer"
    checks.require(is_size(width), "shared_expert_intermediate_size", width, rule)
    checks.require(type(has_bias) is bool, "qkv_bias", has_bias, "true, false or absent")
    return {"shared_ffn": width, "shared_gate": True, "qkv_bias": has_bias}


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


def _parse_window(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields ``window`` and ``full_every`` of the shape that ``config`` describes."""
    model_type, n_layers = config["model_type"], config["num_hidden_layers"]
    window = config.get("sliding_window")
    if model_type != "mixtral" and not config.get("use_sliding_window"):
        window = None
    if model_type != "qwen2_moe":
        return {"window": parse_window_of_all(config, window, checks)}

    layer_types = config.get("layer_types")
    if layer_types is None and window is None:
        layer_types = [FULL] * n_layers
    elif layer_types is None:
        # Against the name of the key, only the first layers have windows, and only every second.
        last = config["max_window_layers"]
        is_valid = type(last) is int and last >= 0
        checks.require(is_valid, "max_window_layers", last, "an integer from 0")
        layer_types = [
            SLIDING if layer % 2 == 0 and is_valid and layer < last else FULL
            for layer in range(n_layers)
        ]
    return parse_layer_types(layer_types, window, n_layers, checks)


def expert_problems(
    values: Mapping[str, Any],
    labels: Mapping[str, str],
    shape_type: type[RotaryShape] = RotaryShape,
) -> list[str]:
    """Return a line for each rule on several values that an ExpertsShape would break.

    The arguments are those of ``decoder_problems``.
    """
    problems = decoder_problems(values, labels, shape_type)
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
    if values["shared_gate"] and not values["shared_ffn"]:
        problems.append(
            f"{labels['shared_gate']} has no expert to weigh with {labels['shared_ffn']}"
        )
    last = values["n_layers"] // values["moe_every"] * values["moe_every"]  # counted from 1
    if last <= values["dense_layers"]:
        problems.append(
            f"{labels['dense_layers']} and {labels['moe_every']} leave none of "
            f"{labels['n_layers']} with experts"
        )
    return problems


# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, MoeShape, find_problems=expert_problems)


def untrained(shape: Shape) -> Shape:
    """Return a shape in which the fields that training alone reads have their defaults."""
    defaults = {entry.name: entry.default for entry in fields(shape)}
    changes: dict[str, Any] = {name: defaults[name] for name in shape.training_fields}
    return replace(shape, **changes)


def canonical_experts(shape: WithExperts) -> WithExperts:
    """Return the same shape for all whose experts compute the same, as far as a file tells."""
    shape = untrained(shape)
    if shape.expert_groups > 1:
        return shape
    return replace(shape, group_best=ExpertsShape.group_best)


def canonical(shape: MoeShape) -> MoeShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    shape = canonical_experts(shape)
    changes: dict[str, Any] = {"expert_ffn": shape.expert_width}
    if shape.model_type == "mixtral":  # it has one width only
        changes["ffn"] = shape.expert_width
    layers = _describe_layers([shape.has_experts(layer) for layer in range(shape.n_layers)])
    return replace(canonical_decoder(shape), **changes | (layers or {}))


def make_config(
    shape: MoeShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: no architecture of transformers that we support computes this shape. The
            error has a line for each field.
    """
    model_type = shape.model_type
    _require_supported(shape)
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
    if model_type == "qwen2_moe":
        own |= {"shared_expert_intermediate_size": shape.shared_ffn, "qkv_bias": shape.qkv_bias}
        if shape.window:
            own["layer_types"] = layer_types_of(shape)
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)


def _require_supported(shape: MoeShape) -> None:
    """Raise CheckpointError if transformers computes no such shape as its ``model_type``."""
    model_type = shape.model_type
    required: dict[str, Any] = {
        "router": "softmax",
        "router_scale": 1.0,
        "expert_groups": 1,
        "router_bias": False,
        "nope_every": 0,
    }
    if model_type == "qwen2_moe":
        required["qk_norm"] = False
    else:
        required |= {"shared_ffn": 0, "qkv_bias": False, "full_every": 0}
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
