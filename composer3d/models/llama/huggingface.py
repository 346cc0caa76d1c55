"""Translate between Hugging Face's config.json and a ``ModelShape``. No torch here.

Each key has the meaning and the default that it has in transformers 5.23. ``huggingface_rope`` has
those of rotary positions.

Anybody may have written a config.json, so the type and the range of every value are checked before
anything is computed with it.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer3d.facts.errors import CheckpointError
from composer3d.facts.files import read_json
from composer3d.models import registry
from composer3d.models.llama.huggingface_rope import STRETCH_KEYS, parse_rope, rope_keys
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.untrusted import (
    Requirements,
    checked_shape,
    is_number,
    is_size,
    short_json,
)

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
KEYS = {
    **_SIZE_KEYS,
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
    "rope_theta": "rope_theta",
    **STRETCH_KEYS,
}

FULL, SLIDING = "full_attention", "sliding_attention"  # values in layer_types

MODEL_TYPES = tuple(_DEFAULTS)  # the values of model_type that this module reads

Shape = TypeVar("Shape", bound=RotaryShape)


def read_shape(folder: str | Path) -> ModelShape:
    """Return the shape that the config.json of ``folder`` describes.

    Raises CheckpointError if the file cannot be read or ``parse_config`` refuses its content.
    """
    return read_config(folder, parse_config)


def read_config(folder: str | Path, parse: Callable[[Any], Shape]) -> Shape:
    """Return what ``parse`` makes of the config.json of ``folder``.

    Raises CheckpointError if the file cannot be read or ``parse`` refuses its content.
    """
    file = Path(folder) / "config.json"
    try:
        return parse(read_json(file))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); give a folder in the format of Hugging Face"
        ) from None
    except CheckpointError as error:
        raise CheckpointError([f"{file}: {line}" for line in error.lines]) from None


def parse_config(config: Any) -> ModelShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS[model_type] | config
    checks = Requirements()
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED_BY_TYPE[model_type])
    values |= {"qk_norm": model_type == "qwen3", "qkv_bias": model_type == "qwen2"}
    checks.raise_problems()

    make_shape(values, KEYS)  # the window depends on the number of layers, which must be in range
    values["window"] = _parse_window(config, checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, KEYS))


def require_model_type(config: Any, supported: Collection[str]) -> str:
    """Return the model_type of the content of a config.json.

    Raises CheckpointError if it is not one of ``supported``. If another architecture of ours
    supports it, the error names that architecture.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(model_type, str) and model_type in supported:
        return model_type
    known = registry.huggingface_model_types()
    if isinstance(model_type, str) and model_type in known:
        raise CheckpointError(
            f'model_type = "{model_type}" needs another architecture; '
            f'set model.architecture = "{known[model_type]}"'
        )
    *others, last = known
    raise CheckpointError(
        f"model_type = {short_json(model_type)} is not supported; "
        f"it must be {', '.join(others)} or {last}"
    )


def parse_decoder(
    config: Mapping[str, Any],
    checks: Requirements,
    *,
    unsupported: Collection[str],
    rope_theta: float = 1e4,
) -> dict[str, Any]:
    """Check the keys that all decoders share, and return their values by the names of their fields.

    The types are checked, not the ranges. The window and the biases of attention are left out: they
    depend on the model_type.

    Args:
        config: the content of a config.json, with the defaults of its model_type.
        checks: collects a line for each value that is not supported.
        unsupported: further keys that must be false, null or absent.
        rope_theta: the default of that key.
    """
    require = checks.require
    values: dict[str, Any] = {name: config.get(key) for name, key in _SIZE_KEYS.items()}
    if values["n_kv_heads"] is None:
        values["n_kv_heads"] = values["n_heads"]
    for name, key in _SIZE_KEYS.items():
        require(is_size(values[name]), key, values[name], "a positive integer")

    head_dim = config.get("head_dim")
    require(
        head_dim is None or is_size(head_dim),
        "head_dim",
        head_dim,
        "a positive integer, null or absent",
    )
    activation = config.get("hidden_act", "silu")
    require(activation == "silu", "hidden_act", activation, '"silu"')
    norm_eps = config.get("rms_norm_eps", 1e-6)
    require(is_number(norm_eps), "rms_norm_eps", norm_eps, "a number")
    tied = config.get("tie_word_embeddings")
    tied = False if tied is None else tied  # null counts as absent
    uses_window = config.get("use_sliding_window", False)
    for key, value in (("tie_word_embeddings", tied), ("use_sliding_window", uses_window)):
        require(type(value) is bool, key, value, "true, false or absent")
    for key in (*_UNSUPPORTED, *unsupported):
        require(not config.get(key), key, config.get(key), "false, null or absent")
    values |= parse_rope(config, checks, rope_theta)
    return values | {"head_dim": head_dim, "norm_eps": norm_eps, "tied": tied}


def make_shape(values: Mapping[str, Any], keys: Mapping[str, str] | None = None) -> ModelShape:
    """Check plain values from an untrusted file, and make a ModelShape of them.

    Args:
        values: values by the names of their fields. Names that no field has are ignored.
        keys: for messages, the name of each field in the file, if the file uses another name.

    Raises:
        CheckpointError: as ``checked_shape``.
    """
    return checked_shape(ModelShape, values, keys or {}, decoder_problems)


def decoder_problems(values: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """Return a line for each rule on several values that a RotaryShape would break.

    The arguments are those of ``find_problems`` in ``checked_shape``.
    """
    problems = []
    if values["n_heads"] % values["n_kv_heads"]:
        problems.append(f"{labels['n_kv_heads']} must divide {labels['n_heads']}")
    if values["head_dim"] is None and values["dim"] % (2 * values["n_heads"]):
        problems.append(
            f"{labels['n_heads']} and {labels['dim']}: without head_dim, the width of a head is "
            "their ratio, which must be an even integer"
        )
    scaling = values["rope_scaling"] if values["rope_factor"] != 1 else None
    if scaling == "llama3" and values["rope_low_freq"] >= values["rope_high_freq"]:
        problems.append(f"{labels['rope_low_freq']} must be below {labels['rope_high_freq']}")
    if scaling == "yarn" and values["rope_beta_slow"] > values["rope_beta_fast"]:
        problems.append(f"{labels['rope_beta_slow']} must be at most {labels['rope_beta_fast']}")
    elif scaling == "yarn" and not problems:
        shape = RotaryShape(**{entry.name: values[entry.name] for entry in fields(RotaryShape)})
        if shape.yarn_ramp is None:
            problems.append(
                f"{labels['rope_theta']} with {labels['rope_context']} leaves YaRN no pair to "
                "stretch from"
            )
    return problems


def without_usual_head_dim(shape: Shape) -> Shape:
    """Return the shape with None as ``head_dim`` if it equals dim / n_heads."""
    is_ratio = shape.dim % shape.n_heads == 0 and shape.head_dim == shape.dim // shape.n_heads
    return replace(shape, head_dim=None) if is_ratio else shape


def canonical(shape: Shape) -> Shape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    return replace(
        shape,
        head_dim=shape.head_width,
        rope_attention_factor=shape.attention_factor if shape.rope_scaling == "yarn" else None,
    )


def _parse_window(config: Mapping[str, Any], checks: Requirements) -> int:
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
            and all(layer_type in (FULL, SLIDING) for layer_type in layer_types)
        )
        rule = f"one of {FULL} and {SLIDING} for each layer"
        require(is_valid, "layer_types", layer_types, rule)
        used = sorted(set(layer_types)) if is_valid else [FULL]
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
            used.append(FULL)
        if n_full < n_layers:
            used.append(SLIDING)

    if used == [FULL]:
        return 0
    rule = "the same for all layers (max_window_layers = 0)"
    require(used == [SLIDING], "layer_types", used, rule)
    require(is_size(window), "sliding_window", window, "a positive integer")
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
    model_type = _model_type_of(shape)
    own = decoder_keys(shape, model_type)
    if model_type != "llama":
        own["sliding_window"] = shape.window or None
    if model_type in ("qwen2", "qwen3"):
        own["use_sliding_window"] = shape.window > 0
        own["max_window_layers"] = 0 if shape.window else shape.n_layers
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)


def decoder_keys(shape: RotaryShape, model_type: str) -> dict[str, Any]:
    """Return the keys of a config.json that all decoders share, except those of positions."""
    class_name = "".join(part.capitalize() for part in model_type.split("_"))
    return {
        **{key: getattr(shape, name) for name, key in _SIZE_KEYS.items()},
        "model_type": model_type,
        "hidden_act": "silu",
        "head_dim": shape.head_width,
        "rms_norm_eps": shape.norm_eps,
        "architectures": [class_name + "ForCausalLM"],
        "tie_word_embeddings": shape.tied,
    }


def complete_config(
    own: Mapping[str, Any],
    shape: RotaryShape,
    dtype: str,
    carried: Mapping[str, Any],
    describes: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    """Return a config.json of the keys ``own`` or ``carried``, with rotary positions and dtype.

    Args:
        own: the keys that describe the shape, except those of positions.
        shape: the shape of the model.
        dtype: the name of the dtype of the weights.
        carried: the config.json that came with the model, or an empty dict.
        describes: whether the content of a config.json describes the shape. If the carried one
            does, it replaces ``own``. Otherwise only its ids of special tokens and its
            ``max_position_embeddings`` are kept.
    """
    longest = shape.stretched_context or shape.rope_context
    config: dict[str, Any] = {"max_position_embeddings": longest, **carried}
    # The first three are written below in their older form. auto_map names Python files of the
    # model's author, which are never copied.
    for key in ("dtype", "rope_parameters", "rope_scaling", "auto_map"):
        config.pop(key, None)

    written: dict[str, Any] = {"torch_dtype": dtype, **rope_keys(shape)}
    if describes(config | written):
        return config | written

    kept = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") or key == "max_position_embeddings"
    }
    return {**kept, **written, **own}


def describes(
    config: dict[str, Any],
    *,
    shape: Shape,
    parse: Callable[[Any], Shape],
    canonical: Callable[[Shape], Shape],
) -> bool:
    """Return whether ``config`` describes ``shape``, with the functions of its architecture."""
    with suppress(CheckpointError):
        return canonical(parse(config)) == canonical(shape)
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
