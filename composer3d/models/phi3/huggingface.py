"""Translate between Hugging Face's config.json and a ``Phi3Shape``. No torch here.

As ``models.llama.huggingface``: each key has the meaning and the default of transformers, and every
value is checked.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from composer3d.facts.errors import CheckpointError
from composer3d.models.llama.huggingface import (
    KEYS,
    NO_TOKENS,
    canonical,
    complete_config,
    decoder_keys,
    decoder_problems,
    describes,
    parse_decoder,
    parse_window_of_all,
    read_config,
    require_model_type,
    without_usual_head_dim,
)
from composer3d.models.phi3.shape import Phi3Shape
from composer3d.models.untrusted import Requirements, checked_shape

__all__ = ["MODEL_TYPES", "canonical", "make_config", "make_shape", "parse_config", "read_shape"]

MODEL_TYPES = ("phi3",)  # the values of model_type that this module reads

# Defaults that other types do not have.
_DEFAULTS = {"rms_norm_eps": 1e-5}
# transformers ignores biases here; the other keys drop numbers at random.
_UNSUPPORTED = ("attention_bias", "resid_pdrop", "embd_pdrop")

# As ``models.llama.huggingface.make_shape``.
make_shape = partial(checked_shape, Phi3Shape, find_problems=decoder_problems)


def parse_config(config: Any) -> Phi3Shape:
    """Return the shape that the content of a config.json describes.

    ``head_dim`` is None in the shape if it equals dim / n_heads.

    Raises CheckpointError if a value has a wrong type, lies outside of the range of recipes, or
    asks for something that composer3d does not compute. The error has a line for each such value.
    """
    require_model_type(config, MODEL_TYPES)
    config = _DEFAULTS | config
    checks = Requirements()
    values = parse_decoder(config, checks, unsupported=_UNSUPPORTED)
    stretch = values.get("rope_scaling")
    # transformers takes "yarn" for longrope here, and refuses the other types.
    checks.require(stretch is None, "rope_scaling.rope_type", stretch, '"default"')
    checks.raise_problems()
    make_shape(values, KEYS)  # the list of layers depends on their number
    values["window"] = parse_window_of_all(config, config.get("sliding_window"), checks)
    checks.raise_problems()
    return without_usual_head_dim(make_shape(values, KEYS))


# As ``models.llama.huggingface.read_shape``.
read_shape = partial(read_config, parse=parse_config)


def make_config(
    shape: Phi3Shape, dtype: str, carried: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a config.json for ``shape``, as ``models.llama.huggingface.make_config`` does.

    Raises:
        CheckpointError: transformers computes no such shape as a Phi-3. The error has a line for
            each field.
    """
    required = {
        **{"qk_norm": False, "qkv_bias": False, "rope_factor": 1.0},
        **{"full_every": 0, "nope_every": 0},
    }
    lines = [
        f"Hugging Face's phi3 has no {name} = {getattr(shape, name)}; convert to torch or dcp"
        for name, value in required.items()
        if getattr(canonical(shape), name) != value
    ]
    if lines:
        raise CheckpointError(lines)
    own = decoder_keys(shape, "phi3") | {"sliding_window": shape.window or None}
    is_same = partial(describes, shape=shape, parse=parse_config, canonical=canonical)
    # Absent ids would be those of Phi-3's tokenizer, which a smaller vocabulary lacks.
    return complete_config(own, shape, dtype, {**NO_TOKENS, **(carried or {})}, is_same)
