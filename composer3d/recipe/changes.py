"""Compares a recipe with the text of a resolved recipe, kept by a checkpoint or in a run's folder.

The text is not trusted, as anyone may have written the checkpoint or the folder. It is parsed
within limits, no path in it is read, and its values are only compared and shown.
"""

from dataclasses import MISSING
from typing import Any, NamedTuple

import tomli

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import (
    FIELDS,
    Entries,
    as_toml,
    coerce,
    entries_of_recipe,
    type_of,
    value_of,
)

_TEXT_LIMIT = 256 << 10  # characters; a resolved recipe has about 10,000
_SHOWN_LIMIT = 80  # characters of a value


class Change(NamedTuple):
    """One key whose value differs.

    Attributes:
        key: the key.
        then: the old value as TOML, cut at 80 characters, or "absent".
        now: the new value, likewise.
    """

    key: str
    then: str
    now: str


def values_of(text: str, entries: Entries = FIELDS) -> dict[str, Any]:
    """Return the values of a resolved recipe by key.

    A value that this version does not accept is returned as TOML gives it, and so are keys of
    [model] that are not in ``entries``. Other keys that are not in ``entries`` are left out.

    Raises:
        ValueError: the text is not TOML, is longer than any recipe, or nests too deep.
    """
    if len(text) > _TEXT_LIMIT:
        raise ValueError(
            f"it has {len(text):,} characters, more than the {_TEXT_LIMIT:,} of any recipe"
        )
    try:
        document = tomli.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None

    values: dict[str, Any] = {}
    for table, content in document.items():
        if not isinstance(content, dict):
            continue
        for name, value in content.items():
            key = f"{table}.{name}"
            if key not in entries:
                if table == "model":
                    values[key] = value
                continue
            try:
                values[key] = coerce(value, type_of(key, entries))
            except ValueError:
                values[key] = value
    return values


def changes(then: str, now: Recipe) -> list[Change]:
    """List the keys, sorted, whose value in ``now`` differs from the resolved recipe ``then``.

    A key that ``then`` lacks had its default: the text leaves out keys without a value, and an
    older composer3d did not write keys that it did not have.

    Raises:
        ValueError: see ``values_of``.
    """
    entries = entries_of_recipe(now)
    old_values = values_of(then, entries)
    differences = []
    for key in sorted(entries):
        default = entries[key].default
        old_value = old_values.get(key, None if default is MISSING else default)
        new_value = value_of(now, key)
        if old_value != new_value or type(old_value) is not type(new_value):
            differences.append(Change(key, _shown(old_value), _shown(new_value)))
    return differences


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    try:
        text = as_toml(value)
    except RecursionError:
        return "a value that nests too deep"
    # Escape control characters, and those that change the direction of the text after them.
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return text if len(text) <= _SHOWN_LIMIT else f"{text[:_SHOWN_LIMIT]}..."
