"""Translate between Hugging Face's config.json and a ``Gemma3Shape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from composer3d.facts.errors import CheckpointError
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.llama import huggingface as llama
from composer3d.models.llama.huggingface import (
    FULL,
    SLIDING,
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
from composer3d.models.shape import is_nth
from composer3d.models.untrusted import Requirements, checked_shape, is_number, is_size

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

MODEL_TYPES = ("gemma3_text",)  # the values of model_type that this module reads

# The defaults of keys for which other types have none, or another one.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_THETA, _LOCAL_THETA = 1e6, 1e4
# The keys that must be false, null or absent.
_UNSUPPORTED = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)
_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
_KEYS = {**llama.KEYS, "rope_local_theta": "rope_local_base_freq"}

# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, Gemma3Shape, find_problems=decoder_problems)


def parse_config(config: Any) -> Gemma3Shape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads, and ``query_pre_attn_scalar`` if
    it equals the width of a head.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS | config
    checks = Requirements()
    full, windowed = positions_by_kind(
        config, checks, theta=_THETA, local_theta=config.get("rope_local_base_freq", _LOCAL_THETA)
    )
    config |= full
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED, activation=_ACTIVATION)
    head_dim, scalar = values["head_dim"], config["query_pre_attn_scalar"]
    checks.require(is_size(head_dim), "head_dim", head_dim, "a positive integer")
    checks.require(is_size(scalar), "query_pre_attn_scalar", scalar, "a positive integer")
    values["query_pre_attn_scalar"] = scalar

    local_theta = windowed.get("rope_theta")
    checks.require(is_number(local_theta), "rope_local_base_freq", local_theta, "a number")
    values["rope_local_theta"] = local_theta
    is_plain = windowed == {"rope_type": "default", "rope_theta": local_theta}
    rule = "a rope_theta with the rope_type default"
    checks.require(is_plain, f"rope_parameters.{SLIDING}", windowed, rule)
    checks.raise_problems()

    n_layers = make_shape(values, _KEYS).n_layers  # the lists below have a value for each layer
    layer_types, every = config.get("layer_types"), config["sliding_window_pattern"]
    if layer_types is None:
        checks.require(is_size(every), "sliding_window_pattern", every, "a positive integer")
        checks.raise_problems()
        layer_types = [FULL if is_nth(layer, every) else SLIDING for layer in range(n_layers)]
    values |= parse_layer_types(layer_types, config["sliding_window"], n_layers, checks)
    checks.raise_problems()
    return _without_usual_scale(without_usual_head_dim(make_shape(values, _KEYS)))


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def _without_usual_scale(shape: Gemma3Shape) -> Gemma3Shape:
    """Return the shape with None as ``query_pre_attn_scalar`` if it equals the width of a head."""
    is_usual = shape.query_pre_attn_scalar == shape.head_width
    return replace(shape, query_pre_attn_scalar=None) if is_usual else shape


def canonical(shape: Gemma3Shape) -> Gemma3Shape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    shape = _without_usual_scale(llama.canonical(shape))
    return shape if any(shape.windows) else replace(shape, rope_local_theta=_LOCAL_THETA)


def make_config(
    shape: Gemma3Shape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: no architecture of transformers computes this shape.
    """
    if shape.dim % shape.n_heads:
        raise CheckpointError(
            f"transformers has no Gemma 3 of which n_heads = {shape.n_heads} does not divide "
            f"dim = {shape.dim}; convert to torch or dcp"
        )
    require_truncated_ramp(shape, "gemma3_text")
    own = decoder_keys(shape, "gemma3_text")
    del own["hidden_act"]
    key, activation = _ACTIVATION
    own |= {
        key: activation,
        "query_pre_attn_scalar": shape.query_pre_attn_scalar or shape.head_width,
        "layer_types": layer_types_of(shape),
        # transformers wants a width even where no layer has a window.
        "sliding_window": shape.window or _DEFAULTS["sliding_window"],
    }
    if shape.full_every or not any(shape.windows):
        # The older form of layer_types, which transformers 4.50 reads.
        own["sliding_window_pattern"] = shape.full_every or 1
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    positions = {"rope_local_base_freq": shape.rope_local_theta}
    return complete_config(own, shape, dtype, carried or {}, is_same, positions=positions)
