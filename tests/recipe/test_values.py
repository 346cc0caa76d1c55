"""What is written as TOML is read again as the same values."""

import math
from datetime import timedelta, timezone
from typing import Any

import pytest
import tomli
from hypothesis import example, given
from hypothesis import strategies as st

from composer3d.facts.toml import parse_toml
from composer3d.recipe.values import as_key, as_toml

_ZONES = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_ANY_TEXT = "".join(map(chr, range(0x100))) + "'''\"\"\"\\\u2028\u202e\ufeff\U0001f600"
TEXTS = st.text() | st.text("\"'\\\n\r\t= .#[]{}\x00\x1f\x7f\x85")
KEYS = TEXTS | st.sampled_from(
    ["", ".", "a.b", "a b", 'a = 1 }\nb = "c"\nz = { d', "1", "inf", "-"]
)
PLAIN = (
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.datetimes(timezones=st.none() | _ZONES)
    | st.dates()
    | st.times()
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Whether values and their types are equal; NaN equals NaN, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return bool(one == other)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
@example({_ANY_TEXT: {_ANY_TEXT: [_ANY_TEXT, {"": [{}, []]}]}})
@example({"x": [1e999, -1e999, math.nan, -0.0, 1e16, 5e-324, -(2**63), 2**63 - 1]})
@example({"x": [{"a": {"b.c": [{"d": 1}, {"d": [[], [[]]]}]}}]})
def test_values_survive_a_round_trip(document: dict[str, Any]) -> None:
    text = f"x = {as_toml(document)}\n"
    assert same(tomli.loads(text), {"x": document})
    lines = "".join(f"{as_key(name)} = {as_toml(value)}\n" for name, value in document.items())
    assert same(tomli.loads(lines), document)
    assert same(parse_toml(lines.encode()), document)


@pytest.mark.parametrize("name", ["a", "A-b_3", "0"])
def test_a_plain_key_has_no_quotes(name: str) -> None:
    assert as_key(name) == name
    assert as_toml({name: 1}) == f"{{ {name} = 1 }}"
