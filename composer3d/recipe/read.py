"""Reads a recipe's files and overrides into a draft: values of the right type, each with its place, and problems."""

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import tomli

from composer3d.errors import RecipeError
from composer3d.recipe.schema import TABLES
from composer3d.recipe.values import FIELDS, either, fit, is_text, kind_of, one_line, show

KeyPath = tuple[str, ...]


@dataclass
class Draft:
    """What has been read so far. ``load`` adds what is resolved, and further problems."""

    path: str
    given: dict[str, dict[str, Any]] = field(default_factory=lambda: {table: {} for table in TABLES})  # values, typed
    places: dict[str, str] = field(default_factory=dict)  # by key or table, of what is written
    origins: dict[str, str] = field(default_factory=dict)  # by key, where that is not its place
    problems: list[str] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)  # keys whose value is wrong, or was meant for them and is elsewhere

    def place(self, key: str) -> str:
        """The prefix of an error about ``key``; where no file gives the key, that of its table or of the file."""
        return self.places.get(key) or self.places.get(key.split(".")[0]) or one_line(self.path)

    def origin(self, key: str) -> str:
        """Where the value of ``key`` came from, for people."""
        return self.origins.get(key) or self.places.get(key, "default")

    def blame(self, key: str, *problems: str) -> None:
        self.problems += [f"{self.place(key)}: {problem}" for problem in problems]

    def read(self, sets: Sequence[str]) -> None:
        """Reads the file, its bases, each of which gives what those before it do not, and the overrides.

        Raises RecipeError, with the problems so far, where a file cannot be read.
        """
        try:
            for shown, document, lines in _documents(self.path):
                self._take_document(document, lines, shown)
        except RecipeError as error:
            raise RecipeError([*self.problems, *error.lines]) from None
        for text in sets:
            self._take_override(text)

    def _take_document(self, document: dict[str, Any], lines: dict[KeyPath, int], shown: str) -> None:
        for table, content in document.items():
            place = f"{shown}:{lines[table,]}"
            if table not in TABLES:
                self._refuse_unknown(table, place, "table" if isinstance(content, dict) else "key")
            elif not isinstance(content, dict):
                wanted = f"a table, [{table}] with its keys"
                self.problems.append(f"{place}: '{table}' must be {wanted}, got {show(content)}")
                self.spoiled.update(_keys_of(table))
            else:
                self.places.setdefault(table, place)
                for name, value in content.items():
                    self._take(f"{table}.{name}", value, f"{shown}:{lines[table, name]}")

    def _take_override(self, text: str) -> None:
        key, equals, raw = (part.strip() for part in text.partition("="))
        place = f"--set {one_line(text)}"
        if not is_text(text):
            self.problems.append(f"{place}: write it in UTF-8")
        elif not equals or "." not in key:
            self.problems.append(f"{place}: write it as table.key=value")
        else:
            self._take(key, _override(raw, kind_of(key)) if key in FIELDS else raw, place)

    def _take(self, key: str, value: object, place: str) -> None:
        """A value that is given: the first one in a file, which its bases do not override, or the last ``--set``."""
        if key not in FIELDS:
            self._refuse_unknown(key, place)
            return
        try:
            fitting = fit(value, kind_of(key))
            if key not in self.places or place.startswith("--set "):
                table, name = key.split(".")
                self.given[table][name], self.places[key] = fitting, place
        except ValueError as error:
            self.problems.append(f"{place}: '{key}' must be {error}, got {show(value)}")
            self.spoiled.add(key)

    def _refuse_unknown(self, key: str, place: str, what: str = "key") -> None:
        """Refuses a key, and spoils those that it may have been meant for."""
        table, _, name = key.rpartition(".")
        siblings = [full.split(".")[1] for full in _keys_of(table)]
        meant = [full for full in FIELDS if full.endswith(f".{name}")]
        if near := difflib.get_close_matches(name, siblings or ["base", *TABLES], n=1):
            meant = [f"{table}.{near[0]}"] if siblings else _keys_of(near[0])
            advice = f"did you mean '{near[0]}'?"
        elif meant:
            advice = f"did you mean {either(map(repr, meant))}?"
        elif siblings:
            advice = f"the keys of [{table}] are {', '.join(siblings)}"
        else:
            advice = f"a recipe has base and the tables {', '.join(TABLES)}"
        self.problems.append(f"{place}: unknown {what} '{one_line(key)}'; {advice}")
        self.spoiled.update(meant)


def _documents(path: str) -> Iterator[tuple[str, dict[str, Any], dict[KeyPath, int]]]:
    """The file and then its bases: its name, its tables and the lines of its keys. Raises RecipeError."""
    seen, named = set(), ""  # what comes before the message where there is no such file: the `base` that names it
    while True:
        shown = one_line(path)
        try:
            text = Path(path).read_bytes().decode("utf-8-sig")
            document, lines = tomli.loads(text), key_lines(text)
        except OSError as error:
            raise RecipeError(f"{named}{shown}: {error.strerror}") from None
        except tomli.TOMLDecodeError as error:
            raise RecipeError(f"{shown}:{error.lineno}: not TOML: {error.msg} (column {error.colno})") from None
        except (ValueError, RecursionError) as error:  # no UTF-8, numbers of thousands of digits, hundreds of brackets
            raise RecipeError(f"{shown}: not TOML that can be read: {error}") from None
        base = document.pop("base", None)
        yield shown, document, lines
        if base is None:
            return
        place = f"{shown}:{lines['base',]}"
        if not isinstance(base, str) or not base or "\0" in base:
            raise RecipeError(f"{place}: 'base' must be the path of one recipe, got {show(base)}")
        seen.add(os.path.realpath(path))
        path, named = os.path.join(os.path.dirname(path), base), f"{place}: base cannot be read: "
        if os.path.realpath(path) in seen:
            raise RecipeError(f"{place}: base = {show(base)} makes a circle; remove one base")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, of the statement that first gives each key; a table that is implied has its first key's.

    tomli gives no positions. A statement, a header or a key with its value, is the fewest lines that it takes alone.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    begin, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        pending += f"{line}\n"
        try:
            found = list(_paths(tomli.loads(pending)))
        except (ValueError, RecursionError):  # it goes on
            continue
        if pending.lstrip().startswith("["):
            table, found = found[-1], [()]
        for path in (table + path for path in found):
            for depth in range(1, len(path) + 1):
                lines.setdefault(path[:depth], begin)
        begin, pending = number + 1, ""
    return lines


def _paths(tree: dict[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """The innermost keys of nested dicts."""
    for key, inner in tree.items():
        below = list(_paths(inner, (*path, key))) if isinstance(inner, dict) else []
        yield from below or [(*path, key)]


def _override(raw: str, kind: Any) -> object:
    """The text of an override for a str, else the value that it is in TOML, or the text where it is none."""
    if str in (kind, *map(type, get_args(kind))):  # or a choice of texts
        return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'" else raw
    with suppress(ValueError, RecursionError):
        document = tomli.loads(f"value = {raw}")
        if len(document) == 1:
            return document["value"]
    return raw


def _keys_of(table: str) -> list[str]:
    return [key for key in FIELDS if key.startswith(f"{table}.")]
