"""Rotary positions in Hugging Face's config.json. No torch here.

They have two forms, ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``. Each key has the
meaning and the default that it has in transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any, get_args

from composer3d.facts.ranges import MOST_TOKENS
from composer3d.facts.text import short_json
from composer3d.models.llama.shape import RotaryShape
from composer3d.models.rotary import RopeScaling, yarn_attention_factor
from composer3d.models.untrusted import Requirements, is_number, is_size

LONGEST, _CONTEXT = "max_position_embeddings", "original_max_position_embeddings"

# The fields of a shape, and their keys below rope_scaling or rope_parameters.
STRETCH_KEYS = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_context": _CONTEXT,
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_truncate": "truncate",
    "rope_attention_factor": "attention_factor",
}
# The fields of each way to stretch that config.json has there.
STRETCH_FIELDS: dict[str, tuple[str, ...]] = {
    "llama3": ("rope_factor", "rope_low_freq", "rope_high_freq", "rope_context"),
    "linear": ("rope_factor",),
    "dynamic": ("rope_factor",),  # its context is max_position_embeddings
    "yarn": (
        *("rope_factor", "rope_context", "rope_beta_fast", "rope_beta_slow"),
        *("rope_truncate", "rope_attention_factor"),
    ),
}
# What an absent key or null means; the other keys must be there. (A ``truncate`` of null would be
# false in transformers, and is refused.)
_DEFAULTS = {
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": True,
    "rope_attention_factor": None,
}
_DEFAULT = "default"  # the rope_type of positions that are not stretched
_TYPES = (_DEFAULT, *get_args(RopeScaling))


def parse_rope(
    config: Mapping[str, Any], checks: Requirements, default_theta: float
) -> dict[str, Any]:
    """Return the fields ``rope_*`` of the shape that ``config`` describes.

    Args:
        config: the content of a config.json, with the defaults of its model_type.
        checks: collects a line for each value that is not supported.
        default_theta: the default of ``rope_theta``.
    """
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

    thetas = (unread.pop("rope_theta", None), config.get("rope_theta"), default_theta)
    theta = next(value for value in thetas if value is not None)
    require(is_number(theta), "rope_theta", theta, "a number")
    values: dict[str, Any] = {"rope_theta": theta}

    partial = unread.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    require(partial in (None, 1), "partial_rotary_factor", partial, "1")

    older_key = unread.pop("type", _DEFAULT)
    rope_type = unread.pop("rope_type", older_key)
    if rope_type not in _TYPES:
        *others, last = (f'"{known}"' for known in _TYPES)
        require(False, f"{place}.rope_type", rope_type, f"{', '.join(others)} or {last}")
        return values
    if rope_type != _DEFAULT:
        values |= _parse_stretch(rope_type, config, unread, place, checks)
    require(not unread, place, unread, f"without these keys, because its rope_type is {rope_type}")
    # A factor of 1 stretches nothing, so the other values do not matter.
    return values if values.get("rope_factor") != 1 else {"rope_theta": theta}


def _parse_stretch(
    scaling: RopeScaling,
    config: Mapping[str, Any],
    unread: dict[str, Any],
    place: str,
    checks: Requirements,
) -> dict[str, Any]:
    """Return the fields of a stretch, and remove their keys from ``unread``."""
    values: dict[str, Any] = {"rope_scaling": scaling}
    for name in STRETCH_FIELDS[scaling]:
        key = STRETCH_KEYS[name]
        values[name] = value = unread.pop(key, _DEFAULTS.get(name))
        if name == "rope_truncate":
            checks.require(type(value) is bool, f"{place}.{key}", value, "true, false or absent")
        elif value is None and name in _DEFAULTS:
            values[name] = _DEFAULTS[name]
        elif name != "rope_context":
            checks.require(is_number(value), f"{place}.{key}", value, "a number")
    if scaling == "dynamic":
        values["rope_context"] = _parse_longest(config, checks)
    elif "rope_context" in values:
        values["rope_context"] = _parse_context(values, config, place, checks)
    if scaling == "yarn":
        values["rope_attention_factor"] = _parse_attention_factor(values, unread, place, checks)
    return values


def _parse_context(
    values: Mapping[str, Any], config: Mapping[str, Any], place: str, checks: Requirements
) -> Any:
    """Return the context length before a stretch.

    ``max_position_embeddings`` need not be its product with the factor: transformers warns then,
    but computes with the factor, and the cards of Qwen 3 recommend such a config.json.
    """
    context = values["rope_context"]
    if context is None and values["rope_scaling"] == "yarn":
        # transformers would infer the context of "llama3" as well, and warn that it is too long.
        context = config.get(LONGEST)
    checks.require(is_size(context), f"{place}.{_CONTEXT}", context, "a positive integer")
    # The key may also be at the top level. If the two differ, transformers is not consistent: its
    # config uses one, and its model the other.
    at_top = config.get(_CONTEXT, context)
    rule = f"{place}.{_CONTEXT} = {short_json(context)}"
    checks.require(at_top == context, _CONTEXT, at_top, rule)
    return context


def _parse_longest(config: Mapping[str, Any], checks: Requirements) -> Any:
    """Return the length up to which "dynamic" positions are not stretched."""
    longest = config.get(LONGEST)
    is_length = isinstance(longest, int) and is_size(longest) and longest <= MOST_TOKENS
    rule = f"a positive integer up to {MOST_TOKENS:_}, because the rope_type is dynamic"
    checks.require(is_length, LONGEST, longest, rule)
    # transformers does not read this key here. Other programs do.
    at_top = config.get(_CONTEXT, longest)
    checks.require(at_top == longest, _CONTEXT, at_top, f"{LONGEST} = {short_json(longest)}")
    return longest


def _parse_attention_factor(
    values: Mapping[str, Any], unread: dict[str, Any], place: str, checks: Requirements
) -> Any:
    """Return the attention factor of YaRN. Configurations of DeepSeek have it as a ratio."""
    scales = (unread.pop("mscale", None), unread.pop("mscale_all_dim", None))
    factor, attention_factor = values["rope_factor"], values["rope_attention_factor"]
    if scales != (None, None):
        # transformers ignores one without the other, and both beside attention_factor.
        is_ratio = attention_factor is None and all(is_number(one) and one > 0 for one in scales)
        rule = "both mscale and mscale_all_dim above 0, without attention_factor, or neither"
        checks.require(is_ratio, f"{place}.mscale", scales[0], rule)
        if is_ratio and is_number(factor) and factor >= 1:
            numerator, denominator = (yarn_attention_factor(factor, one) for one in scales)
            return numerator / denominator
    elif factor == 1:
        rule = "1, null or absent, because the factor is 1"
        is_one = attention_factor in (None, 1)
        checks.require(is_one, f"{place}.attention_factor", attention_factor, rule)
    return attention_factor


def rope_keys(shape: RotaryShape) -> dict[str, Any]:
    """Return the keys of a config.json for the rotary positions of a shape.

    They are in the older form, which transformers 4 and 5 both read.
    """
    keys: dict[str, Any] = {"rope_theta": shape.rope_theta}
    if shape.rope_factor == 1:
        return keys
    stretch = {
        STRETCH_KEYS[name]: getattr(shape, name) for name in STRETCH_FIELDS[shape.rope_scaling]
    }
    # transformers 4 does not know the first of them.
    for key, default in (("truncate", True), ("attention_factor", None)):
        if stretch.get(key) == default:
            stretch.pop(key, None)
    keys["rope_scaling"] = {"rope_type": shape.rope_scaling, **stretch}
    if shape.most_tokens is not None:
        keys[LONGEST] = shape.most_tokens
    return keys
