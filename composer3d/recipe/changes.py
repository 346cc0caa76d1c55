"""Compare a recipe with an older one, whose text a checkpoint or a run's folder has kept.

The text is not trusted, because anyone may have written the checkpoint or the folder. It is parsed
within limits, no path in it is read, and its values are only compared and shown.
"""

from dataclasses import MISSING
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.facts.files import MIB, read_plain
from composer3d.facts.text import one_line
from composer3d.facts.toml import parse_toml
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

# Characters of a resolved recipe, which says the origin of each value. One has about 10,000.
TEXT_LIMIT = 1 << 20
_SHOWN_LIMIT = 60  # characters of a value


class Change(NamedTuple):
    """A key whose value differs between two recipes.

    Attributes:
        key: the key.
        then: the old value as TOML, cut at 80 characters, or "absent".
        now: the new value, in the same form.
    """

    key: str
    then: str
    now: str


def kept_text(folder: Path) -> str:
    """Return the text of ``recipe.toml`` in the folder of a run: the recipe of its last start.

    Raises:
        OSError: there is no such plain file, or it cannot be read.
        ValueError: it is longer than any recipe, or not UTF-8.
    """
    return read_plain(folder / "recipe.toml", limit=MIB, follow_links=False).decode()


def values_of(text: str, entries: Entries = FIELDS) -> dict[str, Any]:
    """Return the values of a resolved recipe by key.

    Args:
        text: the TOML text of the recipe.
        entries: the fields whose types the values are converted to, by key.

    Returns:
        The values by key. A value of the wrong type is returned as it was parsed. A key that is
        not in ``entries`` is left out, unless it is in [model]: shapes of other architectures have
        other keys.

    Raises:
        ValueError: the text is longer than any recipe, or ``parse_toml`` refuses it.
    """
    if len(text) > TEXT_LIMIT:
        raise ValueError(
            f"it has {len(text):,} characters, more than the {TEXT_LIMIT:,} of any recipe"
        )
    document = parse_toml(text)
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
    """List the keys whose values differ between two recipes, sorted by key.

    A key that ``then`` lacks counts as its default: the text leaves out keys without a value, and
    an older composer3d did not have all keys.

    Args:
        then: the TOML text of the older, resolved recipe.
        now: the newer recipe.

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
            differences.append(Change(key, shown(old_value), shown(new_value)))
    return differences


def shown(value: object) -> str:
    """Return a value as TOML on one line, cut at 80 characters; None is "absent"."""
    if value is None:
        return "absent"
    return one_line(as_toml(value), _SHOWN_LIMIT)
