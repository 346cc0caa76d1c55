"""Translate between Hugging Face's config.json and a ``GraniteShape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from composer3d.models.granite.shape import GraniteShape
from composer3d.models.llama import huggingface as llama
from composer3d.models.llama.huggingface import (
    KEYS,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    parse_decoder,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.untrusted import Requirements, checked_shape, is_number

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

MODEL_TYPES = ("granite",)  # the values of model_type that this module reads

# The fields are named as the keys.
_MULTIPLIERS = (
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
# A Granite 3 has neither biases nor windows.
_UNSUPPORTED = ("attention_bias", "sliding_window", "use_sliding_window")

# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, GraniteShape, find_problems=decoder_problems)


def parse_config(config: Any) -> GraniteShape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads. ``attention_multiplier`` never is:
    where a config.json lacks it, it is 1, and the scores are not divided at all.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    checks = Requirements()
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED)
    for multiplier in _MULTIPLIERS:
        value = config.get(multiplier, 1.0)
        checks.require(is_number(value), multiplier, value, "a number")
        values[multiplier] = value
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, KEYS))


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def canonical(shape: GraniteShape) -> GraniteShape:
    """Return the same shape for all shapes whose config.json would describe the same model."""
    return replace(llama.canonical(shape), attention_multiplier=_attention_multiplier(shape))


def make_config(
    shape: GraniteShape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does."""
    own = decoder_keys(shape, "granite")
    own |= {name: getattr(shape, name) for name in _MULTIPLIERS}
    own["attention_multiplier"] = _attention_multiplier(shape)
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)


def _attention_multiplier(shape: GraniteShape) -> float:
    return shape.attention_multiplier or shape.head_width**-0.5
