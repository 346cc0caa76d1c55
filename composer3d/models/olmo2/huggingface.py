"""Translate between Hugging Face's config.json and an ``Olmo2Shape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from composer3d.models.llama.huggingface import (
    FULL,
    KEYS,
    SLIDING,
    canonical,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    layer_types_of,
    parse_decoder,
    parse_layer_types,
    positions_by_kind,
    read_config,
    require_model_type,
    require_truncated_ramp,
    without_usual_head_dim,
)
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.shape import is_nth
from composer3d.models.untrusted import Requirements, checked_shape, short_json

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

# For each model_type, the defaults of keys for which other types have none, or another one.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "sliding_window": 4096},
}
# For each model_type, the keys that must be false, null or absent. Attention has no biases, and
# that of an OLMo 2 is full.
_UNSUPPORTED = {
    "olmo2": ("attention_bias", "clip_qkv", "sliding_window", "use_sliding_window"),
    "olmo3": ("attention_bias", "clip_qkv"),
}
_OLMO_3_THETA = 5e5  # of rope_theta in an OLMo 3

MODEL_TYPES = tuple(_DEFAULTS)  # the values of model_type that this module reads

# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, Olmo2Shape, find_problems=decoder_problems)


def parse_config(config: Any) -> Olmo2Shape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    model_type = require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS[model_type] | config
    checks = Requirements()
    if model_type == "olmo3":
        # As in transformers: a base at the top level does not hold for layers with a window.
        theta = _OLMO_3_THETA
        full, windowed = positions_by_kind(config, checks, theta=theta, local_theta=theta)
        config |= full
        if full["rope_parameters"] is not None:
            expected = {"rope_type": "default", "rope_theta": full["rope_parameters"]["rope_theta"]}
            rule = f"{short_json(expected)}: the base of {FULL}, without a stretch"
            checks.require(windowed == expected, f"rope_parameters.{SLIDING}", windowed, rule)
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED[model_type])
    checks.raise_problems()

    shape = make_shape(values, KEYS)  # the lists below depend on the number of layers
    layer_types = config.get("layer_types")
    if model_type == "olmo3":
        if layer_types is None:
            layer_types = [FULL if is_nth(n, 4) else SLIDING for n in range(shape.n_layers)]
        window = config["sliding_window"]
        values |= parse_layer_types(layer_types, window, shape.n_layers, checks)
    else:
        is_full = layer_types in (None, [FULL] * shape.n_layers)
        checks.require(is_full, "layer_types", layer_types, f'"{FULL}" for each layer, or absent')
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, KEYS))


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def make_config(
    shape: Olmo2Shape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: transformers computes no such shape.
    """
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    if not shape.window:
        own = decoder_keys(shape, "olmo2")
        return complete_config(own, shape, dtype, carried or {}, is_same)
    require_truncated_ramp(shape, "olmo3")
    own = decoder_keys(shape, "olmo3")
    own |= {"sliding_window": shape.window, "layer_types": layer_types_of(shape)}
    # The newer form, beside the older one: transformers 5 reads a base of all layers only here.
    kind = {"rope_type": "default", "rope_theta": shape.rope_theta}
    by_kind = {"rope_parameters": {FULL: kind, SLIDING: kind}}
    return complete_config(own, shape, dtype, carried or {}, is_same, positions=by_kind)
