"""Values of a recipe: conversion to the type of a key, TOML text, and parts of error messages."""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from composer3d.recipe.schema import TABLES, Model, Recipe

_SHORT = 300  # characters of a value in a message
_LINE = 4096  # characters of a path or a key in a message
_MOST_DIVISOR = 65536

# The dataclass field of each key: "mesh.tp" -> the field ``tp`` of ``MeshTable``.
Entries = Mapping[str, "Field[Any]"]


def entries_of(tables: Mapping[str, Any]) -> Entries:
    """The fields of all ``tables``, by key."""
    return {
        f"{table}.{entry.name}": entry for table, cls in tables.items() for entry in fields(cls)
    }


# Those of a recipe of our own architecture.
FIELDS = entries_of(TABLES)


def entries_of_recipe(recipe: Recipe) -> Entries:
    """The fields of a recipe, by key; [model] has those of its architecture's shape."""
    if type(recipe.model) is Model:
        return FIELDS
    return entries_of({**TABLES, "model": type(recipe.model)})


def coerce(value: Any, kind: Any) -> Any:
    """Convert ``value``, as parsed from TOML, to the type that the schema declares.

    An int becomes a float if the type is float, and a list becomes a tuple. No other conversion is
    made; a bool is not an int.

    Raises:
        ValueError: the value does not have the type; the text says what it must be.
    """
    if get_origin(kind) is tuple and isinstance(value, list):
        return _coerce_to_tuple(value, kind)
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if type(value) is type(choice) and value == choice:
                return value
        raise ValueError(describe_type(kind))
    if kind is float and type(value) in (int, float):
        # The comparison is false for NaN.
        if not abs(value) <= sys.float_info.max:
            raise ValueError("a finite float")
        return float(value)
    if type(value) is kind:  # isinstance would accept a bool as an int
        if kind is int and not -(2**63) <= value < 2**63:
            raise ValueError("an int of 64 bits")
        return value
    raise ValueError(describe_type(kind))


def _coerce_to_tuple(elements: list[Any], kind: Any) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(elements)
    if len(elements) == len(kinds):
        # The error describes the array, not the element that is wrong.
        with suppress(ValueError):
            return tuple(map(coerce, elements, kinds))
    raise ValueError(describe_type(kind))


def type_of(key: str, entries: Entries = FIELDS) -> Any:
    """Return the type of a key's value: ``X`` if the annotation is ``X | None``."""
    kind: Any = entries[key].type
    return get_args(kind)[0] if get_origin(kind) in (UnionType, Union) else kind


def describe_type(kind: Any) -> str:
    """Return a type in words: ``int``, ``"GPipe" or "1F1B"``, ``an array of 2 floats``."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        return join_with_or(map(as_toml, arguments))
    if arguments:
        element = arguments[0].__name__
        if arguments[-1] is Ellipsis:
            return f"an array of {element}s"
        return f"an array of {len(arguments)} {element}s"
    return str(kind.__name__)


def join_with_or(options: Iterable[object]) -> str:
    """Join options: ``1, 2 or 4``."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, up to 65536, in ascending order."""
    return [
        divisor for divisor in range(1, min(number, _MOST_DIVISOR) + 1) if number % divisor == 0
    ]


def suggest(legal: list[int], wrong: int) -> str:
    """Say which values to use: all legal ones, or the 8 nearest to ``wrong`` if there are more."""
    if len(legal) <= 8:
        return f"use {join_with_or(sorted(legal))}"
    nearest = sorted(legal, key=lambda value: abs(value - wrong))[:8]
    return f"use for example {join_with_or(sorted(nearest))}"


def nearest_multiples(number: int, unit: int) -> str:
    """Return the positive multiples of ``unit`` around ``number``: ``24 or 32``."""
    below = number // unit * unit
    return join_with_or(multiple for multiple in (below, below + unit) if multiple)


def is_utf8(value: str) -> bool:
    """Return whether UTF-8 can encode the text.

    It cannot encode half a surrogate pair, which stands for a byte of the command line that is not
    UTF-8.
    """
    return not any("\ud800" <= char <= "\udfff" for char in value)


def as_toml(value: object) -> str:
    """Return a value as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not is_utf8(value)).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        if not value:
            return "{}"
        return f"{{ {', '.join(f'{name} = {as_toml(inner)}' for name, inner in value.items())} }}"
    return str(value)


def as_short_toml(value: object) -> str:
    """Return a value as TOML text for a message; a long one is cut at 300 characters."""
    return _cut(as_toml(value), _SHORT)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def has_key(recipe: Recipe, key: str) -> bool:
    """Whether the recipe has this key: shapes of other architectures lack some of ours."""
    table, name = key.split(".")
    return hasattr(getattr(recipe, table), name)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key such as ``mesh.tp``."""
    table, name = key.split(".")
    return getattr(getattr(recipe, table), name)


def mention(recipe: Recipe, key: str) -> str:
    """Return a key with its value, as messages show it: ``mesh.tp = 4``."""
    return f"{key} = {as_short_toml(value_of(recipe, key))}"


def one_line(text: str) -> str:
    """Return text of the user on one line, for a message or a comment.

    Text with a character that is not printable is escaped. Text over 4096 characters is cut.
    """
    return _cut(text if text.isprintable() else as_toml(text)[1:-1], _LINE)


def schema_text() -> str:
    """Return the vocabulary of a recipe: every key with its default, type and meaning."""
    lines = [f"{'base':<54} recipe to inherit from; its path is relative to this file"]
    for table, cls in TABLES.items():
        lines += ["", f"[{table}]"]
        for entry in fields(cls):
            default = "" if entry.default in (None, MISSING) else f" = {as_toml(entry.default)}"
            kind = describe_type(type_of(f"{table}.{entry.name}"))
            lines.append(f"{entry.name + default:<26} {kind:<27} {entry.metadata['doc']}")
    return "\n".join(lines) + "\n"
