"""Values of a recipe: which ones a key takes, and how one is written as TOML."""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from composer3d.recipe.schema import TABLES, Recipe

_BRIEF = 300  # characters of a value in a message
_LINE = 4096  # of a path or a key, which a message does not cut as soon
FIELDS = {f"{table}.{entry.name}": entry for table, cls in TABLES.items() for entry in fields(cls)}


def fit(value: Any, kind: Any) -> Any:
    """``value``, as TOML gives it, as the type that the schema declares: of an int a float, where one is meant.

    Raises ValueError, which says what the value must be.
    """
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = get_args(kind)
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(value) == len(kinds):
            with suppress(ValueError):
                return tuple(map(fit, value, kinds))
    elif get_origin(kind) is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
            return value
    elif kind is float and type(value) in (int, float):
        if abs(value) <= sys.float_info.max:  # not so of nan
            return float(value)
        raise ValueError("a finite float")
    elif type(value) is kind:  # not isinstance: a bool is no int
        if kind is int and not -(2**63) <= value < 2**63:
            raise ValueError("an int of 64 bits")
        return value
    raise ValueError(describe(kind))


def kind_of(key: str) -> Any:
    """The type of a key's value: ``X`` of ``X | None``."""
    kind = FIELDS[key].type
    return get_args(kind)[0] if get_origin(kind) in (UnionType, Union) else kind


def describe(kind: Any) -> str:
    """A type in words: ``int``, ``"GPipe" or "1F1B"``, ``an array of 2 floats``."""
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        return either(map(show, kinds))
    if kinds:
        return (
            f"an array of {'' if kinds[-1] is Ellipsis else f'{len(kinds)} '}{kinds[0].__name__}s"
        )
    return str(kind.__name__)


def either(options: Iterable[object]) -> str:
    """``1, 2 or 4``"""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last


def divisors(number: int) -> list[int]:
    return [each for each in range(1, min(number, 65536) + 1) if number % each == 0]


def use(legal: list[int], near: int) -> str:
    """The way out: all legal values, or the nearest ones where they are many."""
    nearest = sorted(sorted(legal, key=lambda each: abs(each - near))[:8])
    return ("use " if len(legal) <= 8 else "use for example ") + either(nearest)


def multiples_near(number: int, unit: int) -> str:
    """The multiples of ``unit`` around ``number``, as a way out."""
    below = number // unit * unit
    return either(each for each in (below, below + unit) if each)


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold it; half a surrogate pair is a byte of the command line that is not UTF-8."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def show(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not is_text(value)).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(each) for each in value)}]"
    if isinstance(value, dict):
        return (
            f"{{ {', '.join(f'{name} = {show(each)}' for name, each in value.items())} }}"
            if value
            else "{}"
        )
    return str(value)


def brief(value: object) -> str:
    """A value as TOML writes it, for a message: of a long one its beginning."""
    text = show(value)
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}... ({len(text):,} characters)"


def value_of(recipe: Recipe, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(recipe, table), name)


def mention(recipe: Recipe, key: str) -> str:
    """A key with its value, as messages write it: ``mesh.tp = 4``."""
    return f"{key} = {brief(value_of(recipe, key))}"


def one_line(text: str) -> str:
    """Text that the user gave, fit for one line of a message or for a comment: what is not printable is escaped."""
    shown = text if text.isprintable() else show(text)[1:-1]
    return shown if len(shown) <= _LINE else f"{shown[:_LINE]}... ({len(shown):,} characters)"


def schema_text() -> str:
    """The vocabulary of a recipe, for people: every key with its default, its type and what it means."""
    lines = [f"{'base':<54} a recipe that this one inherits from, relative to this file"]
    for table, cls in TABLES.items():
        lines += ["", f"[{table}]"]
        for entry in fields(cls):
            default = "" if entry.default in (None, MISSING) else f" = {show(entry.default)}"
            kind = describe(kind_of(f"{table}.{entry.name}"))
            lines.append(f"{entry.name + default:<26} {kind:<27} {entry.metadata['doc']}")
    return "\n".join(lines) + "\n"
