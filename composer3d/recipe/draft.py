"""Reads a recipe's files and overrides into a draft: values of the right type, each with its place, and problems."""

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import tomli

from composer3d.recipe.schema import PATH, TABLES
from composer3d.recipe.statements import KeyPath, key_lines, statements
from composer3d.recipe.values import FIELDS, brief, either, fit, is_text, kind_of, one_line
from composer3d.spec.errors import RecipeError
from composer3d.spec.files import read_plain

MOST_BYTES = 256 << 10  # of a recipe with all its bases; a long one has a few thousand
MOST_BASES = 32
MOST_PROBLEMS = 100  # that are told of one recipe


@dataclass
class Draft:
    """What has been read so far. ``load`` adds what is resolved, and further problems."""

    path: str
    given: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {table: {} for table in TABLES}
    )  # values, typed
    places: dict[str, str] = field(default_factory=dict)  # by key or table, of what is written
    origins: dict[str, str] = field(default_factory=dict)  # by key, where that is not its place
    problems: list[str] = field(default_factory=list)
    spoiled: set[str] = field(
        default_factory=set
    )  # keys whose value is wrong, or was meant for them and is elsewhere

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
            for text in sets:
                self._take_override(text)
        except RecipeError as error:
            raise RecipeError([*self.problems, *error.lines]) from None

    def _take_document(
        self, document: dict[str, Any], lines: dict[KeyPath, int], shown: str
    ) -> None:
        for table, content in document.items():
            place = f"{shown}:{lines[table,]}"
            if table not in TABLES:
                self._refuse_unknown(table, place, "table" if isinstance(content, dict) else "key")
            elif not isinstance(content, dict):
                wanted = f"a table, [{table}] with its keys"
                self.problems.append(f"{place}: '{table}' must be {wanted}, got {brief(content)}")
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
            self.problems.append(f"{place}: '{key}' must be {error}, got {brief(value)}")
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
        if len(self.problems) >= MOST_PROBLEMS:
            raise RecipeError(
                f"{place}: the recipe has {MOST_PROBLEMS} problems up to here; mend them first"
            )


def _documents(path: str) -> Iterator[tuple[str, dict[str, Any], dict[KeyPath, int]]]:
    """The file and then its bases: its name, its tables and the lines of its keys. Raises RecipeError."""
    seen, named = (
        set(),
        "",
    )  # what comes before the message where there is no such file: the `base` that names it
    size = 0
    while True:
        shown = one_line(path)
        try:
            content = read_plain(path, limit=MOST_BYTES)
        except OSError as error:
            raise RecipeError(f"{named}{shown}: {error.strerror}") from None
        except ValueError as error:  # a NUL byte, or what is no UTF-8
            raise RecipeError(f"{named}{shown}: no file has such a name ({error})") from None
        size += len(content)
        if size > MOST_BYTES:
            raise RecipeError(
                f"{named}{shown}: the recipe and its bases are larger than {MOST_BYTES:_} bytes"
            )
        document, lines = _parse(content, shown)
        base = document.pop("base", None)
        yield shown, document, lines
        if base is None:
            return
        place = f"{shown}:{lines['base',]}"
        if not isinstance(base, str) or not PATH[0](base):
            raise RecipeError(f"{place}: 'base' must be the path of one recipe, got {brief(base)}")
        seen.add(os.path.realpath(path))
        path, named = os.path.join(os.path.dirname(path), base), f"{place}: base cannot be read: "
        if os.path.realpath(path) in seen:
            raise RecipeError(f"{place}: base = {brief(base)} makes a circle; remove one base")
        if len(seen) > MOST_BASES:
            raise RecipeError(
                f"{place}: base = {brief(base)} is base number {len(seen)}; use at most {MOST_BASES}"
            )


def _parse(content: bytes, shown: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The tables of a file, and the lines of its keys. Raises RecipeError."""
    try:
        text = content.decode("utf-8-sig")
        found = list(
            statements(text)
        )  # first: it refuses what is nested too deep for those who recurse
        return tomli.loads(text), key_lines(found)
    except tomli.TOMLDecodeError as error:
        raise RecipeError(
            f"{shown}:{error.lineno}: not TOML: {error.msg} (column {error.colno})"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # no UTF-8, nested too deep, numbers of thousands of digits
        raise RecipeError(f"{shown}: not TOML that can be read: {error}") from None


def _override(raw: str, kind: Any) -> object:
    """The text of an override for a str, else the value that it is in TOML, or the text where it is none."""
    if str in (kind, *map(type, get_args(kind))):  # or a choice of texts
        return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'" else raw
    text = f"value = {raw}"
    with suppress(ValueError, RecursionError):
        if len(list(statements(text))) == 1:
            document = tomli.loads(text)
            if len(document) == 1:
                return document["value"]
    return raw


def _keys_of(table: str) -> list[str]:
    return [key for key in FIELDS if key.startswith(f"{table}.")]
