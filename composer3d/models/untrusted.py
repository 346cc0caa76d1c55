"""Check values from untrusted files, and make shapes of them. No torch here.

Anybody may have written a config.json, a params.json or the manifest of a checkpoint. So the type
and the range of every value are checked before anything is computed with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import short_json
from composer3d.models.shape import DecoderShape

# The name of a field's type in messages.
_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    int | None: "an integer or null",
    float | None: "a number or null",
}

Shape = TypeVar("Shape", bound=DecoderShape)


class Requirements:
    """Collects one line for each value of a file that is not supported."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def require(self, is_supported: bool, key: str, value: Any, rule: str) -> None:
        """Add a line about ``key`` if its value is not supported; ``rule`` says what it must be."""
        if not is_supported:
            self.problems.append(f"{key} = {short_json(value)} is not supported; it must be {rule}")

    def raise_problems(self) -> None:
        """Raise CheckpointError if there is a line."""
        if self.problems:
            raise CheckpointError(self.problems)


def checked_shape(
    shape_type: type[Shape],
    values: Mapping[str, Any],
    keys: Mapping[str, str] | None = None,
    *,
    find_problems: Callable[[Mapping[str, Any], Mapping[str, str]], list[str]],
) -> Shape:
    """Check plain values from an untrusted file, and make a shape of them.

    A value must have the type of its field and lie in its range, which is the same as in recipes.
    Rules on several values are checked only if each value is right by itself.

    Args:
        shape_type: the class of the shape.
        values: values by the names of their fields. An absent field has its default. Names that no
            field has are ignored.
        keys: for messages, the name of each field in the file, if the file uses another name.
        find_problems: the rules on several values: takes all values, and the text of each in a
            message, both by the names of their fields, and returns a line for each broken rule.

    Raises:
        CheckpointError: a value is missing, or the shape may not have it. The error has a line for
            each such value.
    """
    all_values = {entry.name: values.get(entry.name, entry.default) for entry in fields(shape_type)}
    keys = keys or {}
    labels = {
        name: f"{keys.get(name, name)} = {short_json(value)}" for name, value in all_values.items()
    }

    problems = []
    for entry in fields(shape_type):
        value, allowed = all_values[entry.name], entry.metadata["range"]
        if value is MISSING:
            problems.append(f"{keys.get(entry.name, entry.name)} is missing; the model needs it")
        elif not _has_type(value, entry.type):
            problems.append(f"{labels[entry.name]} must be {_type_name(entry.type)}")
        elif value is not None and allowed and not allowed.accepts(value):
            problems.append(f"{labels[entry.name]} {allowed.requirement}")

    problems = problems or find_problems(all_values, labels)
    if problems:
        raise CheckpointError(problems)
    plain: dict[str, Any] = {
        entry.name: _as_float(all_values[entry.name], entry.type) for entry in fields(shape_type)
    }
    return shape_type(**plain)


def _as_float(value: Any, wanted: Any) -> Any:
    """Return an integer as a float where a field is one."""
    is_float = wanted is float or float in get_args(wanted)
    return float(value) if is_float and value is not None else value


def _has_type(value: Any, wanted: Any) -> bool:
    if get_origin(wanted) is Literal:
        return type(value) is str and value in get_args(wanted)
    if get_origin(wanted) is UnionType:
        return any(_has_type(value, one) for one in get_args(wanted))
    if wanted is float:
        return is_number(value)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _type_name(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(wanted))
    return _TYPE_NAMES[wanted]


def is_size(value: Any) -> bool:
    """Return whether ``value`` is a positive integer, and not a bool."""
    return type(value) is int and value > 0


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number.

    The bounds also refuse integers with hundreds of digits, which no float can hold.
    """
    return type(value) in (int, float) and -1e300 < value < 1e300
