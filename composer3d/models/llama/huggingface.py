"""Hugging Face's config.json and a ``ModelShape``: what one says in the words of the other. No torch here.

Meanings, and the defaults of keys that are absent, are those of transformers 5.23. Both forms of its positions are
read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from composer3d.models.llama.shape import ModelShape
from composer3d.spec.errors import CheckpointError
from composer3d.spec.files import read_json

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
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}
# The keys of rope_type "llama3".
_LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_context": "original_max_position_embeddings",
}
# Where a field of the shape stands in config.json, for messages.
_KEYS = {
    **_SIZES,
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
    "rope_theta": "rope_theta",
    **_LLAMA3,
}
_KINDS = ("full_attention", "sliding_attention")
_SHOWN = 60  # characters of a value in a message
_Want = Callable[[bool, str, Any, str], None]


def read_shape(folder: str | Path) -> ModelShape:
    """Return the shape that the config.json of ``folder`` describes.

    Raises CheckpointError where it cannot be read, and as ``shape_of``.
    """
    file = Path(folder) / "config.json"
    try:
        return shape_of(read_json(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); give a folder in Hugging Face's form"
        ) from None
    except CheckpointError as error:
        raise CheckpointError([f"{file}: {line}" for line in error.lines]) from None


def shape_of(config: Any) -> ModelShape:
    """Return the shape that a config.json describes; ``head_dim`` is None where it is dim / n_heads.

    Raises CheckpointError, with a line for each key that has a wrong type, lies outside of the
    range of recipes, or asks for what composer3d does not compute.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        known = "llama, mistral, qwen2 or qwen3"
        raise CheckpointError(f"model_type = {shown(kind)} is not supported; it must be {known}")
    config = _DEFAULTS[kind] | config
    if config.get("tie_word_embeddings") is None:  # null counts as absent
        config.pop("tie_word_embeddings", None)
    problems: list[str] = []

    def want(right: bool, key: str, value: Any, rule: str) -> None:
        if not right:
            problems.append(f"{key} = {shown(value)} is not supported; it must be {rule}")

    found: dict[str, Any] = {ours: config.get(key) for ours, key in _SIZES.items()}
    if found["n_kv_heads"] is None:
        found["n_kv_heads"] = found["n_heads"]
    for ours, key in _SIZES.items():
        want(_is_size(found[ours]), key, found[ours], "a positive integer")
    width = config.get("head_dim")
    want(width is None or _is_size(width), "head_dim", width, "a positive integer, null or absent")
    activation = config.get("hidden_act", "silu")
    want(activation == "silu", "hidden_act", activation, '"silu"')
    eps = config.get("rms_norm_eps", 1e-6)
    want(_is_number(eps), "rms_norm_eps", eps, "a number")
    for key in ("tie_word_embeddings", "use_sliding_window"):
        want(type(config.get(key, False)) is bool, key, config.get(key), "true, false or absent")
    # Qwen 2 has biases of q, k and v whatever it says; by this key the others have one of o as well.
    absent = {"llama": ("attention_bias", "sliding_window"), "qwen2": ()}.get(
        kind, ("attention_bias",)
    )
    for key in ("mlp_bias", "quantization_config", "per_layer_config", *absent):
        want(not config.get(key), key, config.get(key), "false, null or absent")
    found |= _rope(config, want)
    if not problems:
        found |= {
            "head_dim": width,
            "norm_eps": eps,
            "tied": config.get("tie_word_embeddings", False),
            "qk_norm": kind == "qwen3",
            "qkv_bias": kind == "qwen2",
        }
        problems += faults(found, _KEYS)
    if not problems:
        found["window"] = _window(config, want)
        problems = problems or faults(found, _KEYS)
    if problems:
        raise CheckpointError(problems)
    shape = shape_from(found, _KEYS)
    plain = shape.dim % shape.n_heads == 0 and shape.head_dim == shape.dim // shape.n_heads
    return replace(shape, head_dim=None) if plain else shape


def shape_from(values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> ModelShape:
    """Make a ModelShape of plain values that anyone may have written, by the names of its fields.

    ``keys`` are the names of fields in the place where they were read, for messages.

    Raises CheckpointError with the lines of ``faults``.
    """
    if problems := faults(values, keys or {}):
        raise CheckpointError(problems)
    known = {entry.name: entry.type for entry in fields(ModelShape)}
    plain: dict[str, Any] = {name: value for name, value in values.items() if name in known}
    plain |= {name: float(value) for name, value in plain.items() if known[name] is float}
    return ModelShape(**plain)


def faults(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """Return a line for each value that no ModelShape may have: its type, its range, or beside another.

    The ranges are those of recipes, which stand in the fields of ModelShape.
    """
    problems = []
    for entry in fields(ModelShape):
        key = keys.get(entry.name, entry.name)
        value = values.get(entry.name, entry.default)
        if value is MISSING:
            problems.append(f"{key} is missing; the model needs it")
        elif not _has_type(value, entry.type):
            problems.append(f"{key} = {shown(value)} must be {_NOUNS[entry.type]}")
        elif value is not None and entry.metadata["range"]:
            inside, rule = entry.metadata["range"]
            if not inside(value):
                problems.append(f"{key} = {shown(value)} {rule}")
    if problems:
        return problems
    get = {entry.name: values.get(entry.name, entry.default) for entry in fields(ModelShape)}
    named = {name: f"{keys.get(name, name)} = {shown(value)}" for name, value in get.items()}
    if get["n_heads"] % get["n_kv_heads"]:
        problems.append(f"{named['n_kv_heads']} must divide {named['n_heads']}")
    if get["head_dim"] is None and get["dim"] % (2 * get["n_heads"]):
        width = "without head_dim, heads are their ratio wide, which must be an even integer"
        problems.append(f"{named['n_heads']} and {named['dim']}: {width}")
    if get["rope_factor"] != 1 and get["rope_low_freq"] >= get["rope_high_freq"]:
        problems.append(f"{named['rope_low_freq']} must be below {named['rope_high_freq']}")
    return problems


_NOUNS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    int | None: "an integer or null",
}


def _has_type(value: Any, wanted: Any) -> bool:
    if wanted is float:
        return _is_number(value)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    """Whether it is a finite number. The bounds keep integers of 400 digits out, which no float holds."""
    return type(value) in (int, float) and -1e300 < value < 1e300


def shown(value: Any) -> str:
    """Return ``value`` as JSON, cut to what a message can hold."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"({type(value).__name__})"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _rope(config: Mapping[str, Any], want: _Want) -> dict[str, Any]:
    # As there: rope_scaling, where it says anything, is rope_parameters; a theta in it counts more than one beside it.
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    written = config.get(place)
    if written is not None and not isinstance(written, dict):
        want(False, place, written, "an object, null or absent")
        return {}
    rope = dict(written or {})
    thetas = (rope.pop("rope_theta", None), config.get("rope_theta"), 1e4)
    theta = next(each for each in thetas if each is not None)
    want(_is_number(theta), "rope_theta", theta, "a number")
    found: dict[str, Any] = {"rope_theta": theta}
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    want(partial in (None, 1), "partial_rotary_factor", partial, "1")
    old = rope.pop("type", "default")
    kind = rope.pop("rope_type", old)
    want(kind in ("default", "llama3"), f"{place}.rope_type", kind, '"default" or "llama3"')
    if kind == "llama3":
        found |= {ours: rope.pop(key, None) for ours, key in _LLAMA3.items()}
        for ours, key in _LLAMA3.items():
            right = _is_size(found[ours]) if ours == "rope_context" else _is_number(found[ours])
            noun = "a positive integer" if ours == "rope_context" else "a number"
            want(right, f"{place}.{key}", found[ours], noun)
        # Their config and their model differ in which of two counts.
        beside = config.get(key, found["rope_context"])
        rule = f"{place}.{key} = {shown(found['rope_context'])}"
        want(beside == found["rope_context"], key, beside, rule)
    known = kind in ("default", "llama3")
    want(not rope or not known, place, rope, f"without these keys, its rope_type is {kind}")
    return found if found.get("rope_factor") != 1 else {"rope_theta": found["rope_theta"]}


def _window(config: Mapping[str, Any], want: _Want) -> int:
    """There as here, a token sees itself and those before it, ``sliding_window`` in all."""
    qwen, layers = config["model_type"].startswith("qwen"), config["num_hidden_layers"]
    window = config.get("sliding_window") if not qwen or config.get("use_sliding_window") else None
    if "layer_types" in config and config["layer_types"] is not None:
        given = config["layer_types"]
        right = isinstance(given, list) and len(given) == layers
        right = right and all(each in _KINDS for each in given)
        want(right, "layer_types", given, f"one of {' and '.join(_KINDS)} for each layer")
        kinds = sorted(set(given)) if right else ["full_attention"]
    else:
        full = 0 if window is not None else layers  # the first of the layers
        if qwen and window is not None:
            full = config["max_window_layers"]
            right = type(full) is int and full >= 0
            want(right, "max_window_layers", full, "an integer from 0")
            full = full if right else 0
        kinds = [kind for kind, some in zip(_KINDS, (full > 0, full < layers), strict=True) if some]
    if kinds == ["full_attention"]:
        return 0
    rule = "the same for all layers (max_window_layers = 0)"
    want(kinds == ["sliding_attention"], "layer_types", kinds, rule)
    want(_is_size(window), "sliding_window", window, "a positive integer")
    return window or 0


def config_of(
    shape: ModelShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of ``shape`` with weights of ``dtype``, in the older form, which transformers 4 and 5 both read.

    ``carried`` is a config.json that came with the model. Where it describes this shape, it says all the rest; else
    only the ids of tokens and the longest sequence. Raises CheckpointError where no architecture of transformers
    computes this shape.
    """
    if shape.qk_norm and shape.qkv_bias:
        raise CheckpointError(
            "no architecture of transformers has both qk_norm and qkv_bias; convert to torch or dcp"
        )
    longest = {"max_position_embeddings": int(shape.rope_context * shape.rope_factor)}
    config: dict[str, Any] = {**longest, **(carried or {})}
    # auto_map names Python files of the model's author, which are never carried along.
    ours = ("dtype", "rope_parameters", "rope_scaling", "auto_map")
    config = {key: config[key] for key in config if key not in ours}
    rest: dict[str, Any] = {"torch_dtype": dtype, "rope_theta": shape.rope_theta}
    if shape.rope_factor != 1:
        stretch = {key: getattr(shape, field) for field, key in _LLAMA3.items()}
        rest["rope_scaling"] = {"rope_type": "llama3"} | stretch
    with suppress(CheckpointError):
        described = shape_of(config | rest)
        if replace(described, head_dim=described.head_width) == replace(
            shape, head_dim=shape.head_width
        ):
            return config | rest
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    if kind == "llama" and (shape.window or shape.dim % shape.n_heads):
        kind = "mistral"  # it computes what Llama does, within a window; and transformers refuses a Llama of such sizes
    kept = {
        key: config[key]
        for key in config
        if key.endswith("_token_id") or key == "max_position_embeddings"
    }
    rest |= {key: getattr(shape, ours) for ours, key in _SIZES.items()}
    rest |= {
        "model_type": kind,
        "hidden_act": "silu",
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
    }
    rest |= {
        "architectures": [kind.capitalize() + "ForCausalLM"],
        "tie_word_embeddings": shape.tied,
    }
    if kind != "llama":
        rest["sliding_window"] = shape.window or None
    if kind.startswith("qwen"):
        rest |= {
            "use_sliding_window": shape.window > 0,
            "max_window_layers": 0 if shape.window else shape.n_layers,
        }
    return kept | rest
