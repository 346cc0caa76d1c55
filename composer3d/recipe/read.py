"""Reads a recipe's files and overrides into a draft: values of the right type, each with its place, and problems."""

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from composer3d.errors import RecipeError
from composer3d.recipe.keys import KeyPath, key_lines, repeated_key
from composer3d.recipe.schema import TABLES
from composer3d.recipe.values import FIELDS, either, fit, is_text, kind_of, one_line, show, takes_raw_text


@dataclass
class Draft:
    """What has been read so far. ``load`` adds what is resolved, and further problems."""

    path: str
    values: dict[str, Any] = field(default_factory=dict)  # by key, as the schema types them
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

    def given(self, table: str) -> dict[str, Any]:
        """The values of a table's keys that are given."""
        prefix = f"{table}."
        return {key.removeprefix(prefix): value for key, value in self.values.items() if key.startswith(prefix)}

    def blame(self, key: str, *problems: str) -> None:
        self.problems += [f"{self.place(key)}: {problem}" for problem in problems]

    def read(self, sets: Sequence[str]) -> None:
        """Reads the file, its bases, each of which gives what those before it do not, and the overrides.

        Raises:
            RecipeError: with all problems, where a file cannot be read; what it lacks would be blamed otherwise.
        """
        unreadable = False
        try:
            for shown, document, lines in _documents(self.path):
                self._take_document(document, lines, shown)
        except RecipeError as error:
            unreadable = True
            self.problems += error.lines
        for text in sets:
            self._take_override(text)
        if unreadable:
            raise RecipeError(self.problems)

    def _take_document(self, document: dict[str, Any], lines: dict[KeyPath, int], shown: str) -> None:
        for table, content in document.items():
            place = f"{shown}:{lines[table,]}"
            if table not in TABLES:
                self._refuse_unknown(table, place, is_table=isinstance(content, dict))
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
        elif not equals or not key:
            self.problems.append(f"{place}: write it as table.key=value")
        elif key == "base":
            self.problems.append(f"{place}: 'base' can only be given in a file")
        elif key in TABLES:
            self.problems.append(f"{place}: '{key}' is a table; set one of its keys, {key}.KEY=value")
        else:
            self._take(key, _override(raw, kind_of(key)) if key in FIELDS else raw, place)

    def _take(self, key: str, value: object, place: str) -> None:
        """A value that is given: the first one in a file, which its bases do not override, or the last ``--set``."""
        if key not in FIELDS:
            self._refuse_unknown(key, place)
            return
        try:
            fitting = fit(value, kind_of(key))
            if key not in self.values or place.startswith("--set "):
                self.values[key], self.places[key] = fitting, place
        except ValueError as error:
            self.problems.append(f"{place}: '{key}' must be {error}, got {show(value)}")
            self.spoiled.add(key)

    def _refuse_unknown(self, key: str, place: str, *, is_table: bool = False) -> None:
        meant, advice = _suggest(key, is_table=is_table)
        self.problems.append(f"{place}: unknown {'table' if is_table else 'key'} '{one_line(key)}'; {advice}")
        self.spoiled.update(meant)


def _documents(path: str) -> Iterator[tuple[str, dict[str, Any], dict[KeyPath, int]]]:
    """The file and then its bases: its name, its tables and the lines of its keys. Raises RecipeError."""
    chain, named_at = [path], ""  # the place of the `base` that named this file
    while True:
        shown = one_line(path)
        document, lines = _parse(path, f"{named_at}: base cannot be read: " if named_at else "")
        base = document.pop("base", None)
        yield shown, document, lines
        if base is None:
            return
        named_at = f"{shown}:{lines['base',]}"
        if not isinstance(base, str) or not base or "\0" in base:
            raise RecipeError(f"{named_at}: 'base' must be the path of one recipe, got {show(base)}")
        path = os.path.join(os.path.dirname(path), base)
        chain.append(path)
        if os.path.realpath(path) in map(os.path.realpath, chain[:-1]):
            circle = " > ".join(map(one_line, chain))
            raise RecipeError(f"{named_at}: base makes a circle: {circle}; remove one base")


def _parse(path: str, named: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """``named``: what comes before the message where there is no such file."""
    shown = one_line(path)
    try:
        content = Path(path).read_bytes()
        text = content.decode("utf-8").removeprefix("\ufeff")
        return tomli.loads(text), key_lines(text)
    except OSError as error:
        problem = f"{named}{shown}: {_why_unreadable(path, error)}"
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        problem = f"{shown}:{line}: byte 0x{byte:02x} at offset {error.start} is not UTF-8; save the file as UTF-8"
    except tomli.TOMLDecodeError as error:
        problem = f"{shown}:{error.lineno}: not TOML: {error.msg} (column {error.colno})"
        if again := repeated_key(text, error.lineno):
            name = ".".join(map(str, again[0]))
            problem = f"{shown}:{error.lineno}: '{name}' is given twice, first on line {again[1]}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in hundreds of brackets
        problem = f"{shown}: not TOML that can be read: {error}"
    raise RecipeError(problem)


def _why_unreadable(path: str, error: OSError) -> str:
    file = Path(path)
    near = sorted(each.name for each in (file if file.is_dir() else file.parent).glob("*.toml"))
    if file.is_dir():
        return "is a folder, not a recipe; give a file" + (f" in it, such as {near[0]}" if near else "")
    if not isinstance(error, FileNotFoundError):
        return error.strerror or str(error)
    close = difflib.get_close_matches(file.name, near, n=1)
    hint = f"; did you mean {one_line(os.path.join(os.path.dirname(path), close[0]))}?" if close else ""
    return f"no such file{hint}"


def _override(raw: str, kind: Any) -> object:
    """The text of an override for a str, else the value that it is in TOML, or the text where it is none."""
    if takes_raw_text(kind):
        return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'" else raw
    with suppress(ValueError, RecursionError):
        document = tomli.loads(f"value = {raw}")
        if len(document) == 1:
            return document["value"]
    return raw


def _keys_of(table: str) -> list[str]:
    return [key for key in FIELDS if key.startswith(f"{table}.")]


def _suggest(key: str, *, is_table: bool) -> tuple[list[str], str]:
    """The keys that an unknown one may have been meant for, and the advice to print."""
    if key in FIELDS:
        return [key], "write it without quotes: a quoted key holds its dot"
    if is_table:
        near = difflib.get_close_matches(key, TABLES, n=1)
        meant = _keys_of(near[0]) if near else []
        return meant, f"did you mean '{near[0]}'?" if near else f"the tables are {', '.join(TABLES)}"
    table, _, name = key.rpartition(".")
    names = {full: full.split(".")[1] for full in FIELDS}
    siblings = [names[full] for full in _keys_of(table)]
    if near := difflib.get_close_matches(name, siblings, n=1):
        return [f"{table}.{near[0]}"], f"did you mean '{near[0]}'?"
    same_name = [full for full in FIELDS if names[full] == name]
    meant = (
        (not siblings and difflib.get_close_matches(key, same_name or FIELDS, n=1, cutoff=0.75))
        or same_name
        or [full for full in FIELDS if names[full] in difflib.get_close_matches(name, names.values(), n=1)]
    )
    if meant:
        return meant, f"did you mean {either(map(repr, meant))}?"
    if siblings:
        return [], f"the keys of [{table}] are {', '.join(siblings)}"
    return [], f"a recipe has base and the tables {', '.join(TABLES)}"
