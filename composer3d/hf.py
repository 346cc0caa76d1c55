"""Hugging Face's config.json and a ``ModelShape``: what one says in the words of the other. No torch here.

Meanings, and the defaults of keys that are absent, are those of transformers 5.23. Both forms of its positions are
read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer3d.errors import CheckpointError
from composer3d.shape import ModelShape

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
_SIZES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
_SIZES |= {"n_kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size"}
# The keys of rope_type "llama3".
_LLAMA3 = {"rope_factor": "factor", "rope_low_freq": "low_freq_factor", "rope_high_freq": "high_freq_factor"}
_LLAMA3 |= {"rope_context": "original_max_position_embeddings"}
_KINDS = ("full_attention", "sliding_attention")
_Want = Callable[[bool, str, Any, str], None]


def read_shape(folder: str | Path) -> ModelShape:
    """The shape that the config.json of ``folder`` describes; a CheckpointError as of ``shape_of``, or without one."""
    file = Path(folder) / "config.json"
    try:
        return shape_of(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); give a folder in Hugging Face's form") from None
    except CheckpointError as error:
        raise CheckpointError([f"{file}: {line}" for line in error.lines]) from None


def shape_of(config: Any) -> ModelShape:
    """The shape that a config.json describes; ``head_dim`` is None where it is dim / n_heads.

    Raises CheckpointError, with a line for each key that asks for what composer3d does not compute.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in _DEFAULTS:
        known = "llama, mistral, qwen2 or qwen3"
        raise CheckpointError(f"model_type = {json.dumps(kind)} is not supported; it must be {known}")
    config = _DEFAULTS[kind] | config
    problems: list[str] = []

    def want(right: bool, key: str, value: Any, rule: str) -> None:
        if not right:
            problems.append(f"{key} = {json.dumps(value)} is not supported; it must be {rule}")

    found = {ours: config.get(key) for ours, key in _SIZES.items()}
    found["n_kv_heads"] = found["n_kv_heads"] or found["n_heads"]
    for ours, key in _SIZES.items():
        want(type(found[ours]) is int and found[ours] > 0, key, found[ours], "a positive integer")
    width = config.get("head_dim")
    want(width is None or (type(width) is int and width > 0), "head_dim", width, "a positive integer, null or absent")
    want(config.get("hidden_act", "silu") == "silu", "hidden_act", config.get("hidden_act"), '"silu"')
    # Qwen 2 has biases of q, k and v whatever it says; by this key the others have one of o as well.
    absent = {"llama": ("attention_bias", "sliding_window"), "qwen2": ()}.get(kind, ("attention_bias",))
    for key in ("mlp_bias", "quantization_config", "per_layer_config", *absent):
        want(not config.get(key), key, config.get(key), "false, null or absent")
    found |= _rope(config, want)
    found["window"] = 0 if problems else _window(config, want)
    if problems:
        raise CheckpointError(problems)
    eps = float(config.get("rms_norm_eps", 1e-6))
    found["head_dim"] = None if width == found["dim"] // found["n_heads"] else width
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelShape(**found, norm_eps=eps, tied=tied, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2")


def _rope(config: Mapping[str, Any], want: _Want) -> dict[str, Any]:
    # As there: rope_scaling, where it says anything, is rope_parameters; a theta in it counts more than one beside it.
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = dict(config.get(place) or {})
    found: dict[str, Any] = {"rope_theta": float(rope.pop("rope_theta", None) or config.get("rope_theta") or 1e4)}
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    want(partial in (None, 1), "partial_rotary_factor", partial, "1")
    old = rope.pop("type", "default")
    kind = rope.pop("rope_type", old)
    want(kind in ("default", "llama3"), f"{place}.rope_type", kind, '"default" or "llama3"')
    if kind == "llama3":
        found |= {ours: rope.pop(key, None) for ours, key in _LLAMA3.items()}
        for ours, key in _LLAMA3.items():
            want(type(found[ours]) in (int, float), f"{place}.{key}", found[ours], "a number")
        beside = config.get(key, found["rope_context"])  # their config and their model differ in which of two counts
        want(beside == found["rope_context"], key, beside, f"{place}.{key} = {found['rope_context']}")
    want(not rope or kind not in ("default", "llama3"), place, rope, f"without these keys, its rope_type is {kind}")
    return found if found.get("rope_factor") != 1 else {"rope_theta": found["rope_theta"]}


def _window(config: Mapping[str, Any], want: _Want) -> int:
    """There as here, a token sees itself and those before it, ``sliding_window`` in all."""
    qwen, layers = config["model_type"].startswith("qwen"), config["num_hidden_layers"]
    window = config.get("sliding_window") if not qwen or config.get("use_sliding_window") else None
    full = layers if window is None else config["max_window_layers"] if qwen else 0  # the first of the layers
    kinds = sorted({*(config.get("layer_types") or [_KINDS[i >= full] for i in range(layers)])})
    if kinds == ["full_attention"]:
        return 0
    want(kinds == ["sliding_attention"], "layer_types", kinds, "the same for all layers (max_window_layers = 0)")
    want(type(window) is int and window > 0, "sliding_window", window, "a positive integer")
    return window or 0


def config_of(shape: ModelShape, dtype: str, carried: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of ``shape`` with weights of ``dtype``, in the older form, which transformers 4 and 5 both read.

    ``carried`` is a config.json that came with the model. Where it describes this shape, it says all the rest; else
    only the ids of tokens and the longest sequence. Raises CheckpointError where no architecture of transformers
    computes this shape.
    """
    if shape.qk_norm and shape.qkv_bias:
        raise CheckpointError("no architecture of transformers has both qk_norm and qkv_bias; convert to torch or dcp")
    config = {"max_position_embeddings": int(shape.rope_context * shape.rope_factor), **(carried or {})}
    config = {key: config[key] for key in config if key not in ("dtype", "rope_parameters", "rope_scaling")}
    rest: dict[str, Any] = {"torch_dtype": dtype, "rope_theta": shape.rope_theta}
    if shape.rope_factor != 1:
        rest["rope_scaling"] = {"rope_type": "llama3"} | {key: getattr(shape, ours) for ours, key in _LLAMA3.items()}
    with suppress(CheckpointError):
        if shape_of(config | rest) == shape:
            return config | rest
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    if kind == "llama" and (shape.window or shape.dim % shape.n_heads):
        kind = "mistral"  # it computes what Llama does, within a window; and transformers refuses a Llama of such sizes
    kept = {key: config[key] for key in config if key.endswith("_token_id") or key == "max_position_embeddings"}
    rest |= {key: getattr(shape, ours) for ours, key in _SIZES.items()}
    rest |= {"model_type": kind, "hidden_act": "silu", "head_dim": shape.head_width, "rms_norm_eps": shape.norm_eps}
    rest |= {"architectures": [kind.capitalize() + "ForCausalLM"], "tie_word_embeddings": shape.tied}
    if kind != "llama":
        rest["sliding_window"] = shape.window or None
    if kind.startswith("qwen"):
        rest |= {"use_sliding_window": shape.window > 0, "max_window_layers": 0 if shape.window else shape.n_layers}
    return kept | rest
