"""Translate between Hugging Face's config.json and a ``ModelShape``. No torch here.

Each key has the meaning and the default that it has in transformers 5.23. ``huggingface_rope`` has
those of rotary positions.

Anybody may have written a config.json, so the type and the range of every value are checked before
anything is computed with it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer3d.facts.errors import CheckpointError
from composer3d.facts.files import read_json
from composer3d.models import registry
from composer3d.models.llama.huggingface_rope import STRETCH_KEYS, parse_rope, rope_keys
from composer3d.models.llama.shape import ModelShape, RotaryShape, WindowedShape
from composer3d.models.shape import is_nth, period_of
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
    "smollm3": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
}
NO_TOKENS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_DEFAULT_THETAS = {"smollm3": 2e6}  # for others, as ``parse_decoder`` says
# The types of which transformers reads layer_types, and sliding_window if use_sliding_window says.
_WITH_LAYER_TYPES = ("qwen2", "qwen3", "smollm3")
# The names of classes, where they are not the capitalised words of the model_type.
_CLASS_PREFIXES = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}
# For each model_type, the keys that must be false, null or absent, in addition to _UNSUPPORTED.
# Qwen 2 ignores attention_bias: it always has biases of q, k and v. In the other types, the key
# also adds a bias of o, which our attention does not have.
_UNSUPPORTED_BY_TYPE = {
    "llama": ("attention_bias", "sliding_window"),
    "mistral": ("attention_bias",),
    "qwen2": (),
    "qwen3": ("attention_bias",),
    "smollm3": ("attention_bias",),
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

DEFAULT_THETA = 1e4  # of rope_theta in most types

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
    values = parse_decoder(
        config,
        checks,
        unsupported=_UNSUPPORTED_BY_TYPE[model_type],
        rope_theta=_DEFAULT_THETAS.get(model_type, DEFAULT_THETA),
    )
    values |= {"qk_norm": model_type == "qwen3", "qkv_bias": model_type == "qwen2"}
    checks.raise_problems()

    make_shape(values, KEYS)  # the lists below have a value for each layer: not for too many
    no_rope = _no_rope_layers(config, checks)
    every = period_of(no_rope)
    rule = "1, and 0 in every N-th layer: N, 2N, 3N ... counted from 1"
    checks.require(every is not None, "no_rope_layers", config.get("no_rope_layers"), rule)
    values["nope_every"] = every or 0
    values |= _parse_window(config, checks, no_rope)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, KEYS))


def require_model_type(config: Any, supported: Collection[str]) -> str:
    """Return the model_type of the content of a config.json.

    Raises CheckpointError if it is not one of ``supported``. If another architecture of ours
    supports it, the error names that architecture. If the model also sees pictures, it says so.
    Otherwise it lists what is read. ``docs/checkpoints.md`` has the reasons for what is not.
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
    if isinstance(config, dict) and "vision_config" in config:
        raise CheckpointError(
            f"model_type = {short_json(model_type)} is not supported: its config.json has a "
            "vision_config, and composer3d computes models of text alone"
        )
    *others, last = known
    raise CheckpointError(
        f"model_type = {short_json(model_type)} is not supported; "
        f"composer3d reads {', '.join(others)} and {last}"
    )


def parse_decoder(
    config: Mapping[str, Any],
    checks: Requirements,
    *,
    unsupported: Collection[str],
    rope_theta: float = DEFAULT_THETA,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """Check the keys that all decoders share, and return their values by the names of their fields.

    The types are checked, not the ranges. The window and the biases of attention are left out: they
    depend on the model_type.

    Args:
        config: the content of a config.json, with the defaults of its model_type.
        checks: collects a line for each value that is not supported.
        unsupported: further keys that must be false, null or absent.
        rope_theta: the default of that key.
        activation: the key of the activation, and the only value that it may have.
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
    activation_key, expected = activation
    written = config.get(activation_key, expected)
    require(written == expected, activation_key, written, f'"{expected}"')
    norm_eps = config.get("rms_norm_eps", 1e-6)
    require(is_number(norm_eps), "rms_norm_eps", norm_eps, "a number")
    tied = config.get("tie_word_embeddings")
    tied = False if tied is None else tied  # null counts as absent
    uses_window = config.get("use_sliding_window", False)
    for key, value in (("tie_word_embeddings", tied), ("use_sliding_window", uses_window)):
        require(type(value) is bool, key, value, "true, false or absent")
    is_causal = config.get("is_causal", True)
    require(is_causal is True, "is_causal", is_causal, "true or absent")
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
    return checked_shape(ModelShape, values, keys, find_problems=decoder_problems)


def decoder_problems(
    values: Mapping[str, Any],
    labels: Mapping[str, str],
    shape_type: type[RotaryShape] = RotaryShape,
) -> list[str]:
    """Return a line for each rule on several values that a RotaryShape would break.

    The first arguments are those of ``find_problems`` in ``checked_shape``. ``shape_type`` is the
    class of a shape that rotates a part of each head.
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
        shape = shape_type(**{entry.name: values[entry.name] for entry in fields(shape_type)})
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
    changes: dict[str, Any] = {"head_dim": shape.head_width}
    if shape.rope_scaling == "yarn":
        changes["rope_attention_factor"] = shape.attention_factor
    # A period that is longer than the model chooses no block of it.
    for name in ("full_every", "nope_every"):
        if getattr(shape, name, 0) > shape.n_layers:
            changes[name] = 0
    return replace(shape, **changes)


def _parse_window(
    config: Mapping[str, Any], checks: Requirements, no_rope: Sequence[bool]
) -> dict[str, Any]:
    """Return the fields ``window`` and ``full_every`` of the shape that ``config`` describes.

    ``no_rope`` says which layers have no rotary positions.
    """
    model_type, n_layers = config["model_type"], config["num_hidden_layers"]
    window = config.get("sliding_window")
    if model_type not in _WITH_LAYER_TYPES:
        return {"window": parse_window_of_all(config, window, checks)}
    if not config.get("use_sliding_window"):
        window = None

    layer_types = config.get("layer_types")
    if layer_types is None and window is None:
        layer_types = [FULL] * n_layers
    elif layer_types is None and model_type == "smollm3":
        layer_types = [SLIDING if is_chosen else FULL for is_chosen in no_rope]
    elif layer_types is None:
        # The first max_window_layers layers of a Qwen have full attention.
        n_full = config["max_window_layers"]
        is_valid = type(n_full) is int and n_full >= 0
        checks.require(is_valid, "max_window_layers", n_full, "an integer from 0")
        n_full = min(n_full, n_layers) if is_valid else 0
        layer_types = [FULL] * n_full + [SLIDING] * (n_layers - n_full)
    return parse_layer_types(layer_types, window, n_layers, checks)


def parse_window_of_all(config: Mapping[str, Any], window: Any, checks: Requirements) -> int:
    """Return the sliding window of all layers, or 0 if there is none.

    In transformers and in composer3d, a token sees itself and the ``sliding_window`` - 1 tokens
    before it.

    Args:
        config: the content of a config.json, of a model_type whose layers are alike.
        window: the value of ``sliding_window``, or None if it is not used.
        checks: collects a line for each value that is not supported.
    """
    rule = "a positive integer, null or absent"
    checks.require(window is None or is_size(window), "sliding_window", window, rule)
    # transformers does not compute with layer_types here, so it must not say anything else.
    layer_types = config.get("layer_types")
    layer_type = FULL if window is None else SLIDING
    is_same = layer_types in (None, [layer_type] * config["num_hidden_layers"])
    checks.require(is_same, "layer_types", layer_types, f'"{layer_type}" for each layer, or absent')
    return window or 0


def parse_layer_types(
    layer_types: Any, window: Any, n_layers: int, checks: Requirements
) -> dict[str, Any]:
    """Return the fields ``window`` and ``full_every`` that a list of layers describes.

    Args:
        layer_types: ``FULL`` or ``SLIDING`` for each layer.
        window: the value of ``sliding_window``, or None if it is not used.
        n_layers: the number of layers.
        checks: collects a line for each value that is not supported.
    """
    require = checks.require
    is_valid = (
        isinstance(layer_types, list)
        and len(layer_types) == n_layers
        and all(layer_type in (FULL, SLIDING) for layer_type in layer_types)
    )
    require(is_valid, "layer_types", layer_types, f"one of {FULL} and {SLIDING} for each layer")
    if not is_valid or SLIDING not in layer_types:
        return {}
    every = period_of([layer_type == FULL for layer_type in layer_types])
    rule = f"{SLIDING}, and {FULL} in every N-th layer: N, 2N, 3N ... counted from 1"
    require(every is not None, "layer_types", layer_types, rule)
    require(is_size(window), "sliding_window", window, "a positive integer")
    return {"window": window, "full_every": every or 0}


def layer_types_of(shape: WindowedShape) -> list[str]:
    """Return the value of ``layer_types``: the attention of each layer of ``shape``."""
    windows = map(shape.window_of, range(shape.n_layers))
    return [SLIDING if window else FULL for window in windows]


def positions_by_kind(
    config: Mapping[str, Any], checks: Requirements, *, theta: float, local_theta: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the positions of full layers and of layers with a window, where they differ.

    Both are an object with ``rope_type`` and ``rope_theta`` below ``rope_parameters``; the older
    ``rope_theta`` and ``rope_scaling`` at the top level are those of full layers.

    Args:
        config: the content of a config.json.
        checks: collects a line for what is not supported.
        theta: the default base of full layers.
        local_theta: the base of layers with a window, if ``rope_parameters`` does not have it.

    Returns:
        The keys of positions of full layers as other types have them, with which ``config`` is to
        be updated; and the object of layers with a window.
    """
    kinds = config.get("rope_parameters")
    kinds = {} if kinds is None else kinds
    is_valid = (
        isinstance(kinds, dict)
        and kinds.keys() <= {FULL, SLIDING}
        and all(isinstance(kind, dict) for kind in kinds.values())
    )
    rule = f"an object with objects {FULL} and {SLIDING}, null or absent"
    checks.require(is_valid, "rope_parameters", kinds, rule)
    usual = {"rope_type": "default"}
    windowed = usual | {"rope_theta": local_theta}
    scaling = config.get("rope_scaling") or {}
    if not is_valid or not isinstance(scaling, dict):
        return {"rope_parameters": None}, windowed

    at_top = config.get("rope_theta")
    full = usual | {"rope_theta": theta if at_top is None else at_top}
    full |= kinds.get(FULL, {}) | scaling
    windowed |= kinds.get(SLIDING, {})
    # transformers does not read this key of YaRN where positions go by the kind of layer.
    truncate = full.get("truncate", True)
    checks.require(truncate is True, "truncate", truncate, "true or absent")
    return {"rope_parameters": full, "rope_scaling": None, "rope_theta": None}, windowed


def _no_rope_layers(config: Mapping[str, Any], checks: Requirements) -> list[bool]:
    """Return whether each layer has no rotary positions.

    In ``no_rope_layers``, against its name, 1 is a layer that has them.
    """
    n_layers = config["num_hidden_layers"]
    if config["model_type"] != "smollm3":
        return [False] * n_layers
    written = config.get("no_rope_layers")
    if written is None:
        every = config["no_rope_layer_interval"]
        is_valid = is_size(every)
        checks.require(is_valid, "no_rope_layer_interval", every, "a positive integer")
        return [is_valid and is_nth(layer, every) for layer in range(n_layers)]
    is_valid = (
        isinstance(written, list)
        and len(written) >= n_layers  # transformers reads no more
        and all(type(value) is int and value in (0, 1) for value in written)
    )
    checks.require(is_valid, "no_rope_layers", written, "0 or 1 for each layer")
    return [value == 0 for value in written[:n_layers]] if is_valid else [False] * n_layers


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
    odd = {"qk_norm": shape.qk_norm, "qkv_bias": shape.qkv_bias, "nope_every": _has_nope(shape)}
    chosen = [name for name, is_on in odd.items() if is_on]
    if len(chosen) > 1:
        raise CheckpointError(
            f"no architecture of transformers has both {chosen[0]} and {chosen[1]}; convert to "
            "torch or dcp"
        )
    model_type = _model_type_of(shape)
    own = decoder_keys(shape, model_type)
    if model_type != "llama":
        own["sliding_window"] = shape.window or None
    if model_type in _WITH_LAYER_TYPES:
        own["use_sliding_window"] = shape.window > 0
        own["layer_types"] = layer_types_of(shape)
    if model_type in ("qwen2", "qwen3"):
        own["max_window_layers"] = 0 if shape.window else shape.n_layers
    if model_type == "smollm3":
        own["no_rope_layers"] = [int(shape.is_rotary(layer)) for layer in range(shape.n_layers)]
        # Where the key is absent, transformers takes a token beyond most vocabularies.
        own["pad_token_id"] = (carried or {}).get("pad_token_id")
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)


def decoder_keys(shape: RotaryShape, model_type: str) -> dict[str, Any]:
    """Return the keys of a config.json that all decoders share, except those of positions."""
    usual = "".join(part.capitalize() for part in model_type.split("_"))
    class_name = _CLASS_PREFIXES.get(model_type, usual)
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
    *,
    positions: Mapping[str, Any] | None = None,
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
        positions: further keys of positions.
    """
    longest = shape.stretched_context or shape.rope_context
    # A key that is absent has the default of transformers, which is a token of another tokenizer.
    no_tokens = {} if carried else NO_TOKENS
    config: dict[str, Any] = {"max_position_embeddings": longest, **no_tokens, **carried}
    # The first three are written below in their older form. auto_map names Python files of the
    # model's author, which are never copied.
    for key in ("dtype", "rope_parameters", "rope_scaling", "auto_map"):
        config.pop(key, None)

    written: dict[str, Any] = {"torch_dtype": dtype, **rope_keys(shape), **(positions or {})}
    if describes(config | written):
        return config | written

    kept = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") or key == "max_position_embeddings"
    }
    return {**kept, **written, **own}


def require_truncated_ramp(shape: RotaryShape, model_type: str) -> None:
    """Raise CheckpointError if a model_type whose YaRN begins at a whole pair has no such shape."""
    if shape.rope_factor != 1 and shape.rope_scaling == "yarn" and not shape.rope_truncate:
        raise CheckpointError(
            f"Hugging Face's {model_type} has no rope_truncate = false; convert to torch or dcp"
        )


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


def _has_nope(shape: ModelShape) -> bool:
    """Return whether a block has no rotary positions."""
    return not all(map(shape.is_rotary, range(shape.n_layers)))


def _model_type_of(shape: ModelShape) -> str:
    """Return the model_type with which transformers computes ``shape``."""
    if shape.qk_norm:
        return "qwen3"
    if shape.qkv_bias:
        return "qwen2"
    if _has_nope(shape) or len(shape.windows) > 1:
        return "smollm3"
    # Mistral is a Llama with a window. It also serves if n_heads does not divide dim, which
    # transformers refuses for a Llama.
    if shape.window or shape.dim % shape.n_heads:
        return "mistral"
    return "llama"
