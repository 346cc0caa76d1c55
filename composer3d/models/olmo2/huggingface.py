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
    canonical,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    parse_decoder,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.untrusted import Requirements, checked_shape

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

MODEL_TYPES = ("olmo2",)  # the values of model_type that this module reads

# Defaults that other types do not have.
_DEFAULTS = {"rms_norm_eps": 1e-5}
# An OLMo 2 has none of these: attention is full, and without biases.
_UNSUPPORTED = ("attention_bias", "clip_qkv", "sliding_window", "use_sliding_window")

# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, Olmo2Shape, find_problems=decoder_problems)


def parse_config(config: Any) -> Olmo2Shape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS | config
    checks = Requirements()
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED)
    checks.raise_problems()

    shape = make_shape(values, KEYS)  # the list below depends on the number of layers
    layer_types = config.get("layer_types")
    is_full = layer_types in (None, [FULL] * shape.n_layers)
    checks.require(is_full, "layer_types", layer_types, f'"{FULL}" for each layer, or absent')
    checks.raise_problems()
    return without_usual_head_dim(shape)


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def make_config(
    shape: Olmo2Shape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of a config.json for ``shape`` with weights of ``dtype``.

    Args:
        shape: the shape of the model.
        dtype: the name of the dtype of the weights, such as "bfloat16".
        carried: the config.json that came with the model. If it describes this shape, all its other
            keys are kept. Otherwise only the ids of special tokens and ``max_position_embeddings``
            are kept.
    """
    own = decoder_keys(shape, "olmo2")
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    return complete_config(own, shape, dtype, carried or {}, is_same)
