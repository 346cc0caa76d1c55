"""Translate between Hugging Face's config.json and a ``ModelShape``. No torch here.

Each key has the meaning and the default that it has in transformers 5.23. Rotary positions are read
in both forms: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.

Anybody may have written a config.json, so the type and the range of every value are checked before
anything is computed with it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from composer3d.models.llama.shape import ModelShape
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import read_json

# For each model_type, the defaults of keys for which other types have no default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}
# For each model_type, the keys that must be false, null or absent, in addition to _UNSUPPORTED.
# Qwen 2 ignores attention_bias: it always has biases of q, k and v. In the other types, the key
# also adds a bias of o, which our attention does not have.
_UNSUPPORTED_BY_TYPE = {
    "llama": ("attention_bias", "sliding_window"),
    "mistral": ("attention_bias",),
    "qwen2": (),
    "qwen3": ("attention_bias",),
}
_UNSUPPORTED = ("mlp_bias", "quantization_config", "per_layer_config")

# The fields of ModelShape and their keys in config.json.
_SIZE_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
_LLAMA3_ROPE_KEYS = {  # below rope_scaling or rope_parameters, of rope_type "llama3"
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
}
_KEYS = {
    **_SIZE_KEYS,
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
    "rope_theta": "rope_theta",
    **_LLAMA3_ROPE_KEYS,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"  # values in layer_types
_SHOWN_CHARACTERS = 60  # of a value in a message

# The name of a field's type in messages.
_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    int | None: "an integer or null",
}


def read_shape(folder: str | Path) -> ModelShape:
    """Return the shape that the config.json of ``folder`` describes.

    Raises CheckpointError if the file cannot be read or ``parse_config`` refuses its content.
    """
    file = Path(folder) / "config.json"
    try:
        return parse_config(read_json(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); give a folder in the format of Hugging Face"
        ) from None
    except CheckpointError as error:
        raise CheckpointError([f"{file}: {line}" for line in error.lines]) from None


class _Requirements:
    """Collects one line for each value of a config.json that is not supported."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def require(self, is_supported: bool, key: str, value: Any, rule: str) -> None:
        """Add a line about ``key`` if its value is not supported; ``rule`` says what it must be."""
        if not is_supported:
            self.problems.append(f"{key} = {short_json(value)} is not supported; it must be {rule}")


def parse_config(config: Any) -> ModelShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        raise CheckpointError(
            f"model_type = {short_json(model_type)} is not supported; "
            "it must be llama, mistral, qwen2 or qwen3"
        )
    config = _DEFAULTS[model_type] | config
    if config.get("tie_word_embeddings") is None:  # null counts as absent
        config.pop("tie_word_embeddings", None)

    checks = _Requirements()
    require, problems = checks.require, checks.problems

    values: dict[str, Any] = {name: config.get(key) for name, key in _SIZE_KEYS.items()}
    if values["n_kv_heads"] is None:
        values["n_kv_heads"] = values["n_heads"]
    for name, key in _SIZE_KEYS.items():
        require(_is_size(values[name]), key, values[name], "a positive integer")

    head_dim = config.get("head_dim")
    require(
        head_dim is None or _is_size(head_dim),
        "head_dim",
        head_dim,
        "a positive integer, null or absent",
    )
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", "hidden_act", activation, '"silu"')
    norm_eps = config.get("rms_norm_eps", 1e-6)
    require(_is_number(norm_eps), "rms_norm_eps", norm_eps, "a number")
    for key in ("tie_word_embeddings", "use_sliding_window"):
        is_bool = type(config.get(key, False)) is bool
        require(is_bool, key, config.get(key), "true, false or absent")
    for key in (*_UNSUPPORTED, *_UNSUPPORTED_BY_TYPE[model_type]):
        require(not config.get(key), key, config.get(key), "false, null or absent")
    values |= _parse_rope(config, checks)

    # The checks below compute with the values, so they run only if all checks above have passed.
    if not problems:
        values |= {
            "head_dim": head_dim,
            "norm_eps": norm_eps,
            "tied": config.get("tie_word_embeddings", False),
            "qk_norm": model_type == "qwen3",
            "qkv_bias": model_type == "qwen2",
        }
        problems += shape_problems(values, _KEYS)
    if not problems:
        values["window"] = _parse_window(config, checks)
    if not problems:
        problems += shape_problems(values, _KEYS)
    if problems:
        raise CheckpointError(problems)

    shape = make_shape(values, _KEYS)
    is_ratio = shape.dim % shape.n_heads == 0 and shape.head_dim == shape.dim // shape.n_heads
    return replace(shape, head_dim=None) if is_ratio else shape


def make_shape(values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> ModelShape:
    """Check plain values from a file that anybody may have written, and make a ModelShape of them.

    Args:
        values: values by the names of their fields. Names that no field has are ignored.
        keys: for messages, the name of each field in the file, if the file uses another name.

    Raises:
        CheckpointError: a value is missing, or a ModelShape may not have it. The error has the
            lines of ``shape_problems``.
    """
    problems = shape_problems(values, keys or {})
    if problems:
        raise CheckpointError(problems)
    plain: dict[str, Any] = {}
    for entry in fields(ModelShape):
        if entry.name in values:
            value = values[entry.name]
            plain[entry.name] = float(value) if entry.type is float else value
    return ModelShape(**plain)


def shape_problems(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """Return a line for each value that is missing, or that a ModelShape may not have.

    A value must have the type of its field and lie in its range, which is the same as in recipes.
    Rules on several values are checked only if each value is right by itself.

    Args:
        values: values by the names of their fields. An absent field has its default.
        keys: for messages, the name of each field in the file, if the file uses another name.
    """
    all_values = {entry.name: values.get(entry.name, entry.default) for entry in fields(ModelShape)}
    labels = {
        name: f"{keys.get(name, name)} = {short_json(value)}" for name, value in all_values.items()
    }

    problems = []
    for entry in fields(ModelShape):
        value, allowed = all_values[entry.name], entry.metadata["range"]
        if value is MISSING:
            problems.append(f"{keys.get(entry.name, entry.name)} is missing; the model needs it")
        elif not _has_type(value, entry.type):
            problems.append(f"{labels[entry.name]} must be {_TYPE_NAMES[entry.type]}")
        elif value is not None and allowed and not allowed.accepts(value):
            problems.append(f"{labels[entry.name]} {allowed.requirement}")
    if problems:
        return problems

    if all_values["n_heads"] % all_values["n_kv_heads"]:
        problems.append(f"{labels['n_kv_heads']} must divide {labels['n_heads']}")
    if all_values["head_dim"] is None and all_values["dim"] % (2 * all_values["n_heads"]):
        problems.append(
            f"{labels['n_heads']} and {labels['dim']}: without head_dim, the width of a head is "
            "their ratio, which must be an even integer"
        )
    is_stretched = all_values["rope_factor"] != 1
    if is_stretched and all_values["rope_low_freq"] >= all_values["rope_high_freq"]:
        problems.append(f"{labels['rope_low_freq']} must be below {labels['rope_high_freq']}")
    return problems


def _has_type(value: Any, wanted: Any) -> bool:
    if wanted is float:
        return _is_number(value)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _is_size(value: Any) -> bool:
    """Return whether ``value`` is a positive integer, and not a bool."""
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number.

    The bounds also refuse integers with hundreds of digits, which no float can hold.
    """
    return type(value) in (int, float) and -1e300 < value < 1e300


def short_json(value: Any) -> str:
    """Return ``value`` as JSON, cut to a length that fits into a message.

    A value that is not JSON becomes the name of its type in parentheses.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"({type(value).__name__})"
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _parse_rope(config: Mapping[str, Any], checks: _Requirements) -> dict[str, Any]:
    """Return the fields ``rope_*`` of the shape that ``config`` describes."""
    require = checks.require
    # As in transformers, rope_scaling is read if it is not empty, else rope_parameters. A
    # rope_theta in either of them overrides one at the top level.
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    written = config.get(place)
    if written is not None and not isinstance(written, dict):
        require(False, place, written, "an object, null or absent")
        return {}
    # Every key that is read is removed from these. A key that is left is not supported.
    unread = dict(written or {})

    thetas = (unread.pop("rope_theta", None), config.get("rope_theta"), 1e4)
    theta = next(value for value in thetas if value is not None)
    require(_is_number(theta), "rope_theta", theta, "a number")
    values: dict[str, Any] = {"rope_theta": theta}

    partial = unread.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    require(partial in (None, 1), "partial_rotary_factor", partial, "1")

    older_key = unread.pop("type", "default")
    rope_type = unread.pop("rope_type", older_key)
    is_known = rope_type in ("default", "llama3")
    require(is_known, f"{place}.rope_type", rope_type, '"default" or "llama3"')

    if rope_type == "llama3":
        for name, key in _LLAMA3_ROPE_KEYS.items():
            values[name] = unread.pop(key, None)
        for name in ("rope_factor", "rope_low_freq", "rope_high_freq"):
            key = _LLAMA3_ROPE_KEYS[name]
            require(_is_number(values[name]), f"{place}.{key}", values[name], "a number")
        context, key = values["rope_context"], _LLAMA3_ROPE_KEYS["rope_context"]
        require(_is_size(context), f"{place}.{key}", context, "a positive integer")
        # The key may also be at the top level. If the two differ, transformers is not consistent:
        # its config uses one, and its model the other.
        at_top = config.get(key, context)
        require(at_top == context, key, at_top, f"{place}.{key} = {short_json(context)}")

    require(
        not unread or not is_known,
        place,
        unread,
        f"without these keys, because its rope_type is {rope_type}",
    )
    # A factor of 1 stretches nothing, so the other values do not matter.
    return values if values.get("rope_factor") != 1 else {"rope_theta": theta}


def _parse_window(config: Mapping[str, Any], checks: _Requirements) -> int:
    """Return the sliding window, or 0 if there is none.

    In transformers and in composer3d, a token sees itself and the ``sliding_window`` - 1 tokens
    before it.
    """
    require = checks.require
    is_qwen = config["model_type"].startswith("qwen")
    n_layers = config["num_hidden_layers"]
    window = config.get("sliding_window")
    if is_qwen and not config.get("use_sliding_window"):
        window = None

    layer_types = config.get("layer_types")
    if layer_types is not None:
        is_valid = (
            isinstance(layer_types, list)
            and len(layer_types) == n_layers
            and all(layer_type in (_FULL, _SLIDING) for layer_type in layer_types)
        )
        rule = f"one of {_FULL} and {_SLIDING} for each layer"
        require(is_valid, "layer_types", layer_types, rule)
        used = sorted(set(layer_types)) if is_valid else [_FULL]
    else:
        # The first max_window_layers layers of a Qwen have full attention.
        n_full = 0 if window is not None else n_layers
        if is_qwen and window is not None:
            n_full = config["max_window_layers"]
            is_valid = type(n_full) is int and n_full >= 0
            require(is_valid, "max_window_layers", n_full, "an integer from 0")
            n_full = n_full if is_valid else 0
        used = []
        if n_full > 0:
            used.append(_FULL)
        if n_full < n_layers:
            used.append(_SLIDING)

    if used == [_FULL]:
        return 0
    rule = "the same for all layers (max_window_layers = 0)"
    require(used == [_SLIDING], "layer_types", used, rule)
    require(_is_size(window), "sliding_window", window, "a positive integer")
    return window or 0


def make_config(
    shape: ModelShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of a config.json for ``shape`` with weights of ``dtype``.

    Rotary positions are written in the older form, which transformers 4 and 5 both read.

    Args:
        shape: the shape of the model.
        dtype: the name of the dtype of the weights, such as "bfloat16".
        carried: the config.json that came with the model. If it describes this shape, all its other
            keys are kept. Otherwise only the ids of special tokens and ``max_position_embeddings``
            are kept.

    Raises:
        CheckpointError: no architecture of transformers computes this shape.
    """
    if shape.qk_norm and shape.qkv_bias:
        raise CheckpointError(
            "no architecture of transformers has both qk_norm and qkv_bias; convert to torch or dcp"
        )
    longest = int(shape.rope_context * shape.rope_factor)
    config: dict[str, Any] = {"max_position_embeddings": longest, **(carried or {})}
    # The first three are written below in their older form. auto_map names Python files of the
    # model's author, which are never copied.
    for key in ("dtype", "rope_parameters", "rope_scaling", "auto_map"):
        config.pop(key, None)

    written: dict[str, Any] = {"torch_dtype": dtype, "rope_theta": shape.rope_theta}
    if shape.rope_factor != 1:
        stretch = {key: getattr(shape, name) for name, key in _LLAMA3_ROPE_KEYS.items()}
        written["rope_scaling"] = {"rope_type": "llama3", **stretch}
    if _describes(config | written, shape):
        return config | written

    model_type = _model_type_of(shape)
    kept = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") or key == "max_position_embeddings"
    }
    written |= {key: getattr(shape, name) for name, key in _SIZE_KEYS.items()}
    written |= {
        "model_type": model_type,
        "hidden_act": "silu",
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
        "architectures": [model_type.capitalize() + "ForCausalLM"],
        "tie_word_embeddings": shape.tied,
    }
    if model_type != "llama":
        written["sliding_window"] = shape.window or None
    if model_type in ("qwen2", "qwen3"):
        written["use_sliding_window"] = shape.window > 0
        written["max_window_layers"] = 0 if shape.window else shape.n_layers
    return kept | written


def _describes(config: dict[str, Any], shape: ModelShape) -> bool:
    """Return whether ``config`` describes ``shape``. A head_dim of dim / n_heads may be absent."""
    with suppress(CheckpointError):
        described = parse_config(config)
        return replace(described, head_dim=described.head_width) == replace(
            shape, head_dim=shape.head_width
        )
    return False


def _model_type_of(shape: ModelShape) -> str:
    """Return the model_type with which transformers computes ``shape``."""
    if shape.qk_norm:
        return "qwen3"
    if shape.qkv_bias:
        return "qwen2"
    # Mistral is a Llama with a window. It also serves if n_heads does not divide dim, which
    # transformers refuses for a Llama.
    if shape.window or shape.dim % shape.n_heads:
        return "mistral"
    return "llama"
