"""What a recipe changes since a checkpoint was made: the values of a resolved recipe that is kept as text.

The text comes from a checkpoint or a run's folder, so whoever made those wrote it. It is parsed within bounds, no path
in it is read, and what it holds is only compared and shown.
"""

from dataclasses import MISSING
from typing import Any, NamedTuple

import tomli

from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import FIELDS, fit, kind_of, show, value_of

_TEXT_LIMIT = 256 << 10  # characters; a resolved recipe has about 10,000
_SHOWN_LIMIT = 80  # characters of a value


class Change(NamedTuple):
    """One key whose value differs; the values are written as in TOML, and shortened."""

    key: str
    then: str
    now: str


def values_of(text: str) -> dict[str, Any]:
    """The values of a resolved recipe by key. A value that this version does not accept is left as TOML gives it.

    Keys that this version does not have are left out.

    Raises:
        ValueError: the text is not TOML, is longer than a recipe can be, or nests too deep.
    """
    if len(text) > _TEXT_LIMIT:
        raise ValueError(
            f"it has {len(text):,} characters, more than the {_TEXT_LIMIT:,} of any recipe"
        )
    try:
        document = tomli.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    found: dict[str, Any] = {}
    for table, content in document.items():
        for name, value in content.items() if isinstance(content, dict) else ():
            if (key := f"{table}.{name}") in FIELDS:
                try:
                    found[key] = fit(value, kind_of(key))
                except ValueError:
                    found[key] = value
    return found


def changes(then: str, now: Recipe) -> list[Change]:
    """Every key whose value in ``now`` is not that of the resolved recipe ``then``, sorted by key.

    A key that ``then`` lacks had its default: the text leaves out a key that has no value, and an older composer3d
    wrote none that it did not have.

    Raises:
        ValueError: see ``values_of``.
    """
    found = values_of(then)
    differing = []
    for key in sorted(FIELDS):
        default = FIELDS[key].default
        before, after = found.get(key, None if default is MISSING else default), value_of(now, key)
        if before != after or type(before) is not type(after):
            differing.append(Change(key, _shown(before), _shown(after)))
    return differing


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    try:
        text = show(value)
    except RecursionError:
        return "a value that nests too deep"
    # Neither control characters nor those that turn the direction of what follows.
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return text if len(text) <= _SHOWN_LIMIT else f"{text[:_SHOWN_LIMIT]}..."
