"""Values of a recipe: which ones a key takes, and how one is written as TOML."""

import json
import math
from dataclasses import Field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from composer3d.recipe.schema import TABLES, Recipe, doc_of

FIELDS: dict[str, Field[Any]] = {
    f"{table}.{entry.name}": entry for table, cls in TABLES.items() for entry in fields(cls)
}


class Misfit(Exception):
    """A value that its key does not take; the text says what the key must be."""


def fit(value: object, kind: Any) -> Any:
    """``value``, as TOML gives it, as the type that the schema declares; an int becomes a float where one is meant.

    Raises Misfit, with the description of ``kind``.
    """
    kind = without_none(kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if isinstance(value, list) and kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        if isinstance(value, list) and len(value) == len(kinds):
            try:
                return tuple(fit(element, each) for element, each in zip(value, kinds, strict=True))
            except Misfit:
                pass
    elif get_origin(kind) is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
            return value
    elif kind is float and type(value) in (int, float):
        try:
            number = float(value)  # type: ignore[arg-type]
        except OverflowError:
            raise Misfit("a finite float") from None
        if math.isfinite(number):
            return number
        raise Misfit("a finite float")
    elif type(value) is kind:  # not isinstance: a bool is no int
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise Misfit("an int of 64 bits")
        return value
    raise Misfit(describe(kind))


def without_none(kind: Any) -> Any:
    """``X`` of ``X | None``; other types as they are."""
    if get_origin(kind) in (UnionType, Union):
        return next(each for each in get_args(kind) if each is not type(None))
    return kind


def takes_raw_text(kind: Any) -> bool:
    """Whether ``--set`` passes the text of a value as it stands, not as TOML."""
    kind = without_none(kind)
    return kind is str or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))


def describe(kind: Any) -> str:
    """A type in words: ``int``, ``"GPipe" or "1F1B"``, ``an array of 2 floats``."""
    kind = without_none(kind)
    if get_origin(kind) is Literal:
        return either([show(choice) for choice in get_args(kind)])
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        return f"an array of {'' if kinds[-1] is Ellipsis else f'{len(kinds)} '}{kinds[0].__name__}s"
    return str(kind.__name__)


def either(options: list[str]) -> str:
    """``1, 2 or 4``"""
    return " or ".join([", ".join(options[:-1]), options[-1]] if len(options) > 1 else options)


def divisors(number: int, *, at_most: int = 65536) -> list[int]:
    return [each for each in range(1, min(number, at_most) + 1) if number % each == 0]


def use(legal: list[int], near: int, shown: int = 8) -> str:
    """The way out: all legal values, or the nearest ones where they are many."""
    nearest = sorted(sorted(legal, key=lambda each: abs(each - near))[:shown])
    return ("use " if len(legal) <= shown else "use for example ") + either([str(each) for each in nearest])


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold it."""
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair: bytes of the command line that are not UTF-8
        return False
    return True


def show(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=not is_text(value)).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {show(each)}' for name, each in value.items())} }}" if value else "{}"
    return str(value)


def value_of(recipe: Recipe, key: str) -> object:
    table, name = key.split(".")
    return getattr(getattr(recipe, table), name)


def mention(recipe: Recipe, key: str) -> str:
    """A key with its value, as messages write it: ``mesh.tp = 4``."""
    return f"{key} = {show(value_of(recipe, key))}"


def one_line(text: str) -> str:
    """Text that the user gave, fit for one line of a message or for a comment: what is not printable is escaped."""
    return text if text.isprintable() else show(text)[1:-1]


def schema_text() -> str:
    """The vocabulary of a recipe, for people: every key with its default, its type and what it means."""
    lines = [f"{'base':<54} a recipe that this one inherits from, relative to this file"]
    for table, cls in TABLES.items():
        lines += ["", f"[{table}]"]
        for entry in fields(cls):
            default = "" if entry.default is None else f" = {show(entry.default)}"
            lines.append(f"{entry.name + default:<26} {describe(entry.type):<27} {doc_of(entry)}")
    return "\n".join(lines) + "\n"
