"""Convert the values of a recipe to the types of their keys, to TOML text, and to messages."""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from composer3d.facts.bounds import is_utf8
from composer3d.facts.text import shorten
from composer3d.models.registry import OURS, architecture
from composer3d.recipe.schema import TABLES, Model, Recipe

_SHORT = 300  # characters of a value in a message
_MOST_DIVISOR = 65536
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

# The dataclass field of each key: "mesh.tp" -> the field ``tp`` of ``MeshTable``.
Entries = Mapping[str, "Field[Any]"]


def entries_of(tables: Mapping[str, Any]) -> Entries:
    """Return the fields of all ``tables``, by key."""
    return {
        f"{table}.{entry.name}": entry for table, cls in tables.items() for entry in fields(cls)
    }


# The fields of a recipe with the default architecture, by key.
FIELDS = entries_of(TABLES)


def entries_of_recipe(recipe: Recipe) -> Entries:
    """Return the fields of a recipe, by key. [model] has the fields of the architecture's shape."""
    shape: Any = type(recipe.model)  # mypy takes a class of dataclasses for unhashable
    return entries_of_shape(shape)


@cache
def entries_of_shape(shape: Any) -> Entries:
    """Return the fields of a recipe whose table [model] is of this class, by key."""
    return FIELDS if shape is Model else entries_of({**TABLES, "model": shape})


def coerce(value: Any, value_type: Any) -> Any:
    """Convert ``value``, as parsed from TOML, to the type that the schema declares.

    An int becomes a float if the type is float, and a list becomes a tuple if the type is a tuple.
    No other conversion is made; a bool is not an int.

    Raises:
        ValueError: the value does not have the type. The text completes "the value must be".
    """
    if get_origin(value_type) is tuple and isinstance(value, list):
        return _coerce_to_tuple(value, value_type)
    if get_origin(value_type) is Literal:
        for choice in get_args(value_type):
            if type(value) is type(choice) and value == choice:
                return value
        raise ValueError(describe_type(value_type))
    if value_type is float and type(value) in (int, float):
        # The comparison is false for NaN.
        if not abs(value) <= sys.float_info.max:
            raise ValueError("a finite float")
        return float(value)
    if isinstance(value, dict) and is_dataclass(value_type):
        table: Any = value_type
        types = {entry.name: _without_none(entry.type) for entry in fields(value_type)}
        needed, _ = _keys_of_table(value_type)
        if set(needed) <= value.keys() <= types.keys():
            return table(**{name: coerce(given, types[name]) for name, given in value.items()})
        raise ValueError(describe_type(value_type))
    if type(value) is value_type:  # isinstance would accept a bool as an int
        if value_type is int and not -(2**63) <= value < 2**63:
            raise ValueError("an int of 64 bits")
        return value
    raise ValueError(describe_type(value_type))


def _keys_of_table(table: Any) -> tuple[list[str], list[str]]:
    """Return the keys that an inline table must have, and those that it may leave out."""
    needed = [entry.name for entry in fields(table) if entry.default is MISSING]
    optional = [entry.name for entry in fields(table) if entry.default is not MISSING]
    return needed, optional


def _coerce_to_tuple(elements: list[Any], value_type: Any) -> tuple[Any, ...]:
    element_types = get_args(value_type)
    if element_types[-1] is Ellipsis:
        element_types = element_types[:1] * len(elements)
    if len(elements) == len(element_types):
        # The error describes the array, not the element that is wrong.
        with suppress(ValueError):
            return tuple(map(coerce, elements, element_types))
    raise ValueError(describe_type(value_type))


def type_of(key: str, entries: Entries = FIELDS) -> Any:
    """Return the type of a key's value: ``X`` if the annotation is ``X | None``."""
    return _without_none(entries[key].type)


def _without_none(value_type: Any) -> Any:
    return get_args(value_type)[0] if get_origin(value_type) in (UnionType, Union) else value_type


def describe_type(value_type: Any) -> str:
    """Return a type in words: ``int``, ``"GPipe" or "1F1B"``, ``an array of 2 floats``."""
    arguments = get_args(value_type)
    if get_origin(value_type) is Literal:
        return join_with_or(map(as_toml, arguments))
    if arguments and is_dataclass(arguments[0]):
        needed, optional = _keys_of_table(arguments[0])
        names = " and ".join(needed)
        further = f", and maybe {' and '.join(optional)}" if optional else ""
        return f"an array of tables with {names}{further}"
    if arguments:
        element = "string" if arguments[0] is str else arguments[0].__name__
        if arguments[-1] is Ellipsis:
            return f"an array of {element}s"
        return f"an array of {len(arguments)} {element}s"
    return str(value_type.__name__)


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
    """Return advice to use one of the values ``legal``: at most 8, the nearest to ``wrong``."""
    if len(legal) <= 8:
        return f"use {join_with_or(sorted(legal))}"
    nearest = sorted(legal, key=lambda value: abs(value - wrong))[:8]
    return f"use for example {join_with_or(sorted(nearest))}"


def nearest_multiples(number: int, unit: int) -> str:
    """Return the positive multiples of ``unit`` next to ``number``, in words: ``24 or 32``."""
    below = number // unit * unit
    return join_with_or(multiple for multiple in (below, below + unit) if multiple)


def as_toml(value: object) -> str:
    """Return a value as TOML text. The reader of TOML gets an equal value from it.

    A dict or a dataclass becomes an inline table. Only a text with a lone surrogate has no form in
    TOML. Its escape is meant for messages.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Characters that are not printable are escaped, because recipes are shown on terminals.
        shown = json.dumps(value, ensure_ascii=not is_utf8(value))
        return "".join(char if char.isprintable() else _toml_escape(char) for char in shown)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if is_dataclass(value) and not isinstance(value, type):
        # What is absent in TOML is None here.
        value = {name: inner for name, inner in asdict(value).items() if inner is not None}
    if isinstance(value, dict):
        if not value:
            return "{}"
        entries = ", ".join(f"{as_key(name)} = {as_toml(inner)}" for name, inner in value.items())
        return f"{{ {entries} }}"
    return str(value)


def _toml_escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def as_key(name: str) -> str:
    """Return one part of a key as TOML text, in quotes unless TOML reads it without them."""
    return name if _BARE_KEY.fullmatch(name) else as_toml(name)


def as_short_toml(value: object) -> str:
    """Return a value as TOML text for a message; a long one is cut at 300 characters."""
    return shorten(as_toml(value), _SHORT)


def has_key(recipe: Recipe, key: str) -> bool:
    """Return whether the recipe has ``key``. Shapes of other architectures lack some of ours."""
    table, name = key.split(".")
    return hasattr(getattr(recipe, table), name)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a key such as ``mesh.tp``."""
    table, name = key.split(".")
    return getattr(getattr(recipe, table), name)


def variant(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values, legal or not.

    Args:
        recipe: a resolved recipe.
        values: by key, such as ``"mesh.pp"``. They replace fields as they are: nothing is derived
            from them, such as the fields of a preset.
    """
    values_of_table: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        values_of_table.setdefault(table, {})[name] = value
    tables = {
        table: replace(getattr(recipe, table), **given) for table, given in values_of_table.items()
    }
    return replace(recipe, **tables)


def mention(recipe: Recipe, key: str) -> str:
    """Return a key with its value, as messages show it: ``mesh.tp = 4``."""
    return f"{key} = {as_short_toml(value_of(recipe, key))}"


class SchemaRow(NamedTuple):
    """A key of a recipe: its name, its default as TOML (or ""), its type in words, its meaning."""

    name: str
    default: str
    type_text: str
    meaning: str


def schema_tables() -> dict[str, list[SchemaRow]]:
    """Return every key of a recipe, by the heading of its table.

    The table [model] has the keys of the default architecture. The keys that another architecture
    of composer3d adds to them follow in a part of their own.
    """
    tables = {}
    for table, cls in TABLES.items():
        tables[f"[{table}]"] = [*map(_schema_row, fields(cls))]
        if table == "model":
            for name in OURS:
                further = _further_fields(name)
                if further:
                    heading = f'[model] with architecture = "{name}": these keys as well'
                    tables[heading] = [*map(_schema_row, further)]
    return tables


def schema_text() -> str:
    """Return the vocabulary of a recipe as text: every key with its default, type and meaning."""
    lines = [f"{'base':<54} recipe to inherit from; its path is relative to this file"]
    for heading, rows in schema_tables().items():
        lines += ["", heading]
        for row in rows:
            key = f"{row.name} = {row.default}" if row.default else row.name
            lines.append(f"{key:<26} {row.type_text:<27} {row.meaning}")
    return "\n".join(lines) + "\n"


def _further_fields(name: str) -> "list[Field[Any]]":
    """Return the fields of an architecture's shape that the default architecture lacks."""
    known = {entry.name for entry in fields(Model)}
    return [entry for entry in fields(architecture(name).shape) if entry.name not in known]


def _schema_row(entry: "Field[Any]") -> SchemaRow:
    default = "" if entry.default in (None, MISSING) else as_toml(entry.default)
    type_text = describe_type(_without_none(entry.type))
    return SchemaRow(entry.name, default, type_text, entry.metadata["doc"])
