"""Translate between Hugging Face's config.json and a ``DeepseekShape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked. Where transformers ignores a key of the published files, the value must be the one
that changes nothing.

Keys that matter in training alone are not read: ``aux_loss_alpha``, ``seq_aux`` and
``output_router_logits``. The number of layers of multi-token prediction is read, with which
transformers only drafts text; where it is absent, there are none. The keys of experts and of these
layers are those of GLM-4.5 as well.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import ulp
from typing import Any

from composer3d.facts.errors import CheckpointError
from composer3d.models.deepseek.shape import DeepseekShape, PredictingShape
from composer3d.models.llama import huggingface as llama
from composer3d.models.llama.huggingface import KEYS as DECODER_KEYS
from composer3d.models.llama.huggingface import (
    complete_config,
    decoder_keys,
    describes,
    parse_decoder,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.llama.huggingface_rope import rope_keys
from composer3d.models.moe.huggingface import (
    canonical_experts,
    expert_problems,
    parse_number_of_experts,
)
from composer3d.models.rotary import yarn_attention_factor, yarn_mscale
from composer3d.models.untrusted import Requirements, checked_shape, is_number, is_size

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

# Kimi K2 is a DeepSeek-V3 with a model_type of its own, which transformers does not know: its
# config.json names the authors' copy of DeepSeek's code. What is written is a deepseek_v3.
V3 = "deepseek_v3"
_V2, _KIMI = "deepseek_v2", "kimi_k2"
MODEL_TYPES = (_V2, V3, _KIMI)  # the values of model_type that this module reads

# For each model_type, the defaults of keys.
_DEFAULTS: dict[str, dict[str, Any]] = {
    _V2: {
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
    },
    V3: {
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "topk_method": "noaux_tc",
    },
}
# The published files have all of them. So null is refused, and no default of that code is guessed.
_DEFAULTS[_KIMI] = dict.fromkeys(_DEFAULTS[V3])
_DEFAULT_EXPERTS = {_V2: 64, V3: 256, _KIMI: None}
_DEFAULT_RANK_OF_QUERIES = 1536
_DEFAULT_WIDTHS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_SCORES = {_V2: "softmax", V3: "sigmoid", _KIMI: "sigmoid"}
# How groups are chosen: of V2, the second method alone looks at groups.
_GROUP_BEST = {"greedy": None, "group_limited_greedy": "one", "noaux_tc": "two"}
_METHODS = {_V2: ("greedy", "group_limited_greedy"), V3: ("noaux_tc",), _KIMI: ("noaux_tc",)}

KEYS_WITH_EXPERTS = {
    **DECODER_KEYS,
    "dense_layers": "first_k_dense_replace",
    "expert_ffn": "moe_intermediate_size",
    "expert_groups": "n_group",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "groups_per_token": "topk_group",
    "mtp_layers": "num_nextn_predict_layers",
    "renormalise": "norm_topk_prob",
    "router_scale": "routed_scaling_factor",
    "shared_ffn": "moe_intermediate_size * n_shared_experts",
}
_KEYS = {
    **KEYS_WITH_EXPERTS,
    "head_dim": "qk_nope_head_dim + qk_rope_head_dim",
    "kv_rank": "kv_lora_rank",
    "query_rank": "q_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_DEPTHS = "num_nextn_predict_layers"
_OTHER_NAME = "num_mtp_layers"  # which transformers 5 has for the same
_UNSUPPORTED = ("attention_bias", "sliding_window", "use_sliding_window")

# How far ``_mscale`` looks. In 20,000 random cases, the number was 5 steps away at most.
_MOST_STEPS = 100
_FEW_DIGITS = 6


def parse_config(config: Any) -> DeepseekShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS[model_type] | config
    checks = Requirements()
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED)
    values |= _parse_latents(config, checks)
    values |= _parse_scores(config)
    values |= parse_number_of_experts(config, checks, _DEFAULT_EXPERTS[model_type])
    values |= parse_experts(config, checks, model_type)
    if model_type == V3:
        values |= parse_depths(config, checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, _KEYS))


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def _parse_latents(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the fields of latent attention."""
    require = checks.require
    widths = {key: config.get(key, default) for key, default in _DEFAULT_WIDTHS.items()}
    for key, width in widths.items():
        require(is_size(width), key, width, "a positive integer")
    rotated, width = widths["qk_rope_head_dim"], config.get("head_dim")
    # transformers takes the number of rotated pairs from head_dim.
    require(width in (None, rotated), "head_dim", width, f"{rotated}, null or absent")
    query_rank = config.get("q_lora_rank", _DEFAULT_RANK_OF_QUERIES)
    rule = "a positive integer or null"
    require(query_rank is None or is_size(query_rank), "q_lora_rank", query_rank, rule)
    # In files of V2, pairs are always neighbours.
    interleaves = config.get("rope_interleave", True)
    require(interleaves is True, "rope_interleave", interleaves, "true or absent")
    if checks.problems:
        return {}
    return {
        "head_dim": widths["qk_nope_head_dim"] + widths["qk_rope_head_dim"],
        "kv_rank": widths["kv_lora_rank"],
        "query_rank": query_rank or 0,
        "rope_dim": widths["qk_rope_head_dim"],
        "value_dim": widths["v_head_dim"],
    }


def _parse_scores(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the factor of scores, which ``parse_rope`` has checked, with the rest."""
    written = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(written, dict) or written.get("factor") == 1:
        return {}
    mscale = written.get("mscale_all_dim")
    return {} if mscale is None else {"rope_score_mscale": mscale}


def parse_depths(config: Mapping[str, Any], checks: Requirements) -> dict[str, Any]:
    """Return the field of the number of layers of multi-token prediction."""
    depths = config.get(_DEPTHS, config.get(_OTHER_NAME)) or 0
    is_count = type(depths) is int and depths >= 0
    checks.require(is_count, _DEPTHS, depths, "an integer from 0, null or absent")
    return {"mtp_layers": depths}


def parse_experts(
    config: Mapping[str, Any], checks: Requirements, model_type: str
) -> dict[str, Any]:
    """Return the fields of experts, but for their number, and those of their router.

    Args:
        config: the content of a config.json, with the defaults of its model_type.
        checks: collects a line for each value that is not supported.
        model_type: the one of DeepSeek whose router computes it.
    """
    require = checks.require
    for key in ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"):
        require(is_size(config[key]), key, config[key], "a positive integer")
    dense, scale = config["first_k_dense_replace"], config["routed_scaling_factor"]
    is_count = type(dense) is int and dense >= 0
    require(is_count, "first_k_dense_replace", dense, "an integer from 0")
    require(is_number(scale), "routed_scaling_factor", scale, "a number")
    every = config.get("moe_layer_freq", 1)
    require(every == 1, "moe_layer_freq", every, "1 or absent")
    scores, wanted = config.get("scoring_func"), _SCORES[model_type]
    require(scores in (None, wanted), "scoring_func", scores, f'"{wanted}" or absent')
    renormalise = config["norm_topk_prob"]
    if model_type == _V2:  # transformers never divides, the authors' own code does if this is true
        require(renormalise in (False, None), "norm_topk_prob", renormalise, "false or absent")
    else:
        require(type(renormalise) is bool, "norm_topk_prob", renormalise, "true, false or absent")
    groups = _parse_groups(config, checks, model_type)
    if checks.problems:
        return {}
    return groups | {
        "dense_layers": dense,
        "expert_ffn": config["moe_intermediate_size"],
        "experts_per_token": config["num_experts_per_tok"],
        "renormalise": bool(renormalise),
        "router": wanted,
        "router_bias": model_type != _V2,
        "router_scale": scale,
        "shared_ffn": config["moe_intermediate_size"] * config["n_shared_experts"],
    }


def _parse_groups(
    config: Mapping[str, Any], checks: Requirements, model_type: str
) -> dict[str, Any]:
    """Return the fields that say which groups of experts a token chooses from."""
    methods, method = _METHODS[model_type], config["topk_method"]
    rule = " or ".join(f'"{known}"' for known in methods)
    is_known = isinstance(method, str) and method in methods
    checks.require(is_known, "topk_method", method, rule)
    if not is_known:
        return {}
    best = _GROUP_BEST[method]
    if best is None:
        return {}
    for key in ("n_group", "topk_group"):
        checks.require(is_size(config[key]), key, config[key], "a positive integer")
    groups = {"expert_groups": config["n_group"], "groups_per_token": config["topk_group"]}
    return groups | ({"group_best": best} if config["n_group"] != 1 else {})


def _find_problems(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return a line for each rule on several values that is broken, as the rules of recipes do."""
    problems = expert_problems(values, labels, DeepseekShape)
    if values["n_kv_heads"] != values["n_heads"]:
        problems.append(f"{labels['n_kv_heads']} must be {labels['n_heads']}")
    width = values["head_dim"] or values["dim"] // values["n_heads"]
    if values["rope_dim"] >= width:
        problems.append(f"{labels['rope_dim']} must be below {width}, the width of a head")
    if values["value_dim"] > width:
        problems.append(f"{labels['value_dim']} must be at most {width}, the width of a head")
    return problems


# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, DeepseekShape, find_problems=_find_problems)


def canonical(shape: DeepseekShape) -> DeepseekShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    changes: dict[str, Any] = {"expert_ffn": shape.expert_width}
    if shape.query_scale == 1:
        changes["rope_score_mscale"] = DeepseekShape.rope_score_mscale
    return replace(llama.canonical(canonical_experts(shape)), **changes)


def make_config(
    shape: DeepseekShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: neither DeepSeek-V2 nor V3 has this shape. The error has a line for each
            field.
    """
    model_type = _V2 if shape.router == "softmax" else V3
    _require_supported(shape, model_type)
    method = "noaux_tc"
    if model_type == _V2:
        method = "greedy" if shape.expert_groups == 1 else "group_limited_greedy"
    own = decoder_keys(shape, model_type) | {
        "head_dim": shape.rope_dim,  # as transformers has it
        "q_lora_rank": shape.query_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.plain_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "moe_layer_freq": shape.moe_every,
        "scoring_func": shape.router,
        "topk_method": method,
        **expert_keys(shape),
    }
    kept = dict(carried or {})
    if kept.get("model_type") == _KIMI:
        kept["model_type"] = V3
    if model_type == V3:
        own, kept = with_depths(own, shape), with_depths(kept, shape)
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, kept, is_same, positions=_score_keys(shape))


def expert_keys(shape: PredictingShape) -> dict[str, Any]:
    """Return the keys of a config.json for the experts of a shape, and for their router."""
    return {
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_width,
        "n_shared_experts": shape.shared_ffn // shape.expert_width,
        "first_k_dense_replace": shape.dense_layers,
        "n_group": shape.expert_groups,
        "topk_group": shape.groups_per_token,
        "norm_topk_prob": shape.renormalise,
        "routed_scaling_factor": shape.router_scale,
    }


def with_depths(config: Mapping[str, Any], shape: PredictingShape) -> dict[str, Any]:
    """Return a config.json with the number of layers of multi-token prediction of a shape."""
    kept = {key: value for key, value in config.items() if key != _OTHER_NAME}
    return kept | {_DEPTHS: shape.mtp_layers}


def _score_keys(shape: DeepseekShape) -> dict[str, Any]:
    """Return the keys of positions with the factor of scores, if there is one.

    The factor of rotated parts is then the ratio of two factors, each with a scale of its own.
    """
    if shape.query_scale == 1:
        return {}
    stretch = dict(rope_keys(shape)["rope_scaling"])
    stretch.pop("attention_factor", None)
    scales = {"mscale": _mscale(shape), "mscale_all_dim": shape.rope_score_mscale}
    return {"rope_scaling": stretch | scales}


def _mscale(shape: DeepseekShape) -> float | None:
    """Return the ``mscale`` with which ``parse_rope`` reads the shape's factor of rotated parts.

    It solves that formula. The result is rounded, so the numbers next to it are tried as well, and
    before them the one of scores, and a short one. None: no number above 0 does.
    """
    factor, of_scores = shape.rope_factor, shape.rope_score_mscale
    denominator = yarn_attention_factor(factor, of_scores)
    nearest = yarn_mscale(factor, shape.attention_factor * denominator)
    step = ulp(nearest)
    around = (nearest + sign * number * step for number in range(_MOST_STEPS) for sign in (1, -1))
    for mscale in (of_scores, round(nearest, _FEW_DIGITS), *around):
        ratio = yarn_attention_factor(factor, mscale) / denominator
        if mscale > 0 and ratio == shape.attention_factor:
            return mscale
    return None


def _require_supported(shape: DeepseekShape, model_type: str) -> None:
    """Raise CheckpointError if transformers computes no such shape as a ``model_type``."""
    is_v3 = model_type == V3
    required: dict[str, Any] = {"router_bias": is_v3, "moe_every": 1, "shared_gate": False}
    if not is_v3:
        required |= {"renormalise": False, "mtp_layers": 0}
    if shape.expert_groups > 1:
        required["group_best"] = "two" if is_v3 else "one"
    lines = unsupported_experts(shape, model_type, required)
    if shape.query_scale != 1 and _mscale(shape) is None:
        lines.append(
            f"Hugging Face's {model_type} has no mscale above 0 for rope_attention_factor = "
            f"{shape.attention_factor:g} beside rope_score_mscale = {shape.rope_score_mscale:g}; "
            "convert to torch or dcp"
        )
    if not is_v3 and shape.dim % shape.n_heads:
        lines.append(
            f"Hugging Face's {model_type} has no n_heads = {shape.n_heads} that does not divide "
            f"dim = {shape.dim}; convert to torch or dcp"
        )
    if lines:
        raise CheckpointError(lines)


def unsupported_experts(
    shape: PredictingShape, model_type: str, required: Mapping[str, Any]
) -> list[str]:
    """Return a line for each field of a shape that transformers does not compute.

    Args:
        shape: a shape whose files are those of a ``model_type``.
        model_type: of DeepSeek, or of another model with its experts.
        required: the values that fields must have.
    """
    begin = f"Hugging Face's {model_type} has"
    lines = [
        f"{begin} no {name} = {getattr(shape, name)}; convert to torch or dcp"
        for name, value in required.items()
        if getattr(shape, name) != value
    ]
    if shape.shared_ffn == 0 or shape.shared_ffn % shape.expert_width:
        lines.append(
            f"{begin} shared experts as wide as the others, and shared_ffn = {shape.shared_ffn} is "
            f"no multiple of {shape.expert_width}; convert to torch or dcp"
        )
    if shape.router == "sigmoid" and shape.experts < 2 * shape.expert_groups:
        lines.append(
            f"{begin} two experts in a group at least, and experts = {shape.experts} has one in "
            f"each of {shape.expert_groups}; convert to torch or dcp"
        )
    return lines
