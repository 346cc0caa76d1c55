"""Reads a recipe's files and overrides into a draft: values of the right type, each with its place, and problems."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli

from composer3d.recipe.keys import KeyPath, key_lines, repeated_key
from composer3d.recipe.schema import TABLES
from composer3d.recipe.values import FIELDS, Misfit, either, fit, is_text, one_line, show, takes_raw_text


@dataclass
class Draft:
    """What has been read so far. ``load`` adds what is resolved, and further problems."""

    path: str
    values: dict[str, Any] = field(default_factory=dict)  # by key, as the schema types them
    origins: dict[str, str] = field(default_factory=dict)  # by key, for people
    places: dict[str, str] = field(default_factory=dict)  # by key or table, of what is written
    problems: list[str] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)  # keys whose value is wrong, or was meant for them and is elsewhere
    whole: bool = True  # every file was read

    def place(self, key: str) -> str:
        return self.places.get(key) or self.places.get(key.split(".")[0]) or one_line(self.path)

    def read_files(self) -> None:
        """Reads the file and its bases. A value of a file wins over one of its base, so the first one read stays."""
        path, chain = self.path, [self.path]
        named_at = ""  # the place of the `base` that named this file
        while True:
            shown = one_line(path)
            try:
                document, lines = _parse(path)
            except _Unreadable as error:
                self.whole = False
                self.problems.append(
                    f"{named_at}: base cannot be read: {error}" if error.is_absent and named_at else str(error)
                )
                return
            self._take_document(document, lines, shown)
            if "base" not in document:
                return
            base, named_at = document["base"], f"{shown}:{lines['base',]}"
            if not isinstance(base, str) or not base or "\0" in base:
                self.whole = False
                self.problems.append(f"{named_at}: 'base' must be the path of one recipe, got {show(base)}")
                return
            path = os.path.join(os.path.dirname(path), base)
            chain.append(path)
            if os.path.realpath(path) in map(os.path.realpath, chain[:-1]):
                self.whole = False
                self.problems.append(
                    f"{named_at}: base makes a circle: {' > '.join(map(one_line, chain))}; remove one base"
                )
                return

    def _take_document(self, document: dict[str, Any], lines: dict[KeyPath, int], shown: str) -> None:
        for table, content in document.items():
            place = f"{shown}:{lines[table,]}"
            if table == "base":
                continue
            if table not in TABLES:
                self._refuse_unknown(table, place, is_table=isinstance(content, dict))
            elif not isinstance(content, dict):
                self.problems.append(
                    f"{place}: '{table}' must be a table, [{table}] with its keys, got {show(content)}"
                )
                self.spoiled.update(key for key in FIELDS if key.startswith(f"{table}."))
            else:
                self.places.setdefault(table, place)
                for name, value in content.items():
                    key, place = f"{table}.{name}", f"{shown}:{lines[table, name]}"
                    if key not in FIELDS:
                        self._refuse_unknown(key, place)
                    elif self._fits(key, value, place) and key not in self.values:
                        self.values[key] = fit(value, FIELDS[key].type)
                        self.places[key] = self.origins[key] = place

    def read_sets(self, sets: Sequence[str]) -> None:
        for text in sets:
            key, equals, raw = text.partition("=")
            key, raw, place = key.strip(), raw.strip(), f"--set {one_line(text)}"
            if not is_text(text):
                self.problems.append(f"{place}: write it in UTF-8")
            elif not equals or not key:
                self.problems.append(f"{place}: write it as table.key=value")
            elif key == "base":
                self.problems.append(f"{place}: 'base' can only be given in a file")
            elif key in TABLES:
                self.problems.append(f"{place}: '{key}' is a table; set one of its keys, {key}.KEY=value")
            elif key not in FIELDS:
                self._refuse_unknown(key, place)
            else:
                value = _unquoted(raw) if takes_raw_text(FIELDS[key].type) else _toml_value(raw)
                if self._fits(key, value, place):
                    self.values[key] = fit(value, FIELDS[key].type)
                    self.places[key] = self.origins[key] = place

    def _fits(self, key: str, value: object, place: str) -> bool:
        try:
            fit(value, FIELDS[key].type)
        except Misfit as misfit:
            self.problems.append(f"{place}: '{key}' must be {misfit}, got {show(value)}")
            self.spoiled.add(key)
            return False
        return True

    def _refuse_unknown(self, key: str, place: str, *, is_table: bool = False) -> None:
        meant, advice = _suggest(key, is_table=is_table)
        self.problems.append(f"{place}: unknown {'table' if is_table else 'key'} '{one_line(key)}'; {advice}")
        self.spoiled.update(meant)


class _Unreadable(Exception):
    """A file that gives no TOML document; the text starts with its name."""

    is_absent = False


def _parse(path: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    shown = one_line(path)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        absent = _Unreadable(f"{shown}: {_why_unreadable(path, error)}")
        absent.is_absent = True
        raise absent from None
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise _Unreadable(
            f"{shown}:{line}: byte 0x{byte:02x} at offset {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        return tomli.loads(text), key_lines(text)
    except tomli.TOMLDecodeError as error:
        again = repeated_key(text, error.lineno)
        if again is not None:
            name = ".".join(map(str, again[0]))
            raise _Unreadable(f"{shown}:{error.lineno}: '{name}' is given twice, first on line {again[1]}") from None
        raise _Unreadable(f"{shown}:{error.lineno}: not TOML: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in hundreds of brackets
        raise _Unreadable(f"{shown}: not TOML that can be read: {error}") from None


def _why_unreadable(path: str, error: Exception) -> str:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    try:
        near = sorted(name for name in os.listdir(folder or ".") if name.endswith(".toml"))
    except (OSError, ValueError):
        near = []
    if os.path.isdir(path):
        return "is a folder, not a recipe; give a file" + (f" in it, such as {near[0]}" if near else "")
    if not isinstance(error, FileNotFoundError):
        return getattr(error, "strerror", None) or str(error)
    close = difflib.get_close_matches(os.path.basename(path), near, n=1)
    return "no such file" + (
        f"; did you mean {one_line(os.path.join(os.path.dirname(path), close[0]))}?" if close else ""
    )


def _unquoted(raw: str) -> str:
    return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'" else raw


def _toml_value(raw: str) -> object:
    """The value that ``raw`` is in TOML; the text itself where it is none, for the message that refuses it."""
    try:
        document = tomli.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return document["value"] if len(document) == 1 else raw


def _suggest(key: str, *, is_table: bool) -> tuple[list[str], str]:
    """The keys that an unknown one may have been meant for, and the advice to print."""
    if key in FIELDS:
        return [key], "write it without quotes: a quoted key holds its dot"
    table, _, name = key.rpartition(".")
    if is_table:
        near = difflib.get_close_matches(key, TABLES, n=1)
        meant = [full for full in FIELDS if near and full.startswith(f"{near[0]}.")]
        return meant, f"did you mean '{near[0]}'?" if near else f"the tables are {', '.join(TABLES)}"
    names = {full: full.split(".")[1] for full in FIELDS}
    siblings = [names[full] for full in FIELDS if full.startswith(f"{table}.")]
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return [f"{table}.{near[0]}"], f"did you mean '{near[0]}'?"
    same_name = [full for full in FIELDS if names[full] == name]
    meant = (
        (not siblings and difflib.get_close_matches(key, same_name or FIELDS, n=1, cutoff=0.75))
        or same_name
        or [full for full in FIELDS if names[full] in difflib.get_close_matches(name, names.values(), n=1)]
    )
    if meant:
        return meant, f"did you mean {either([repr(full) for full in meant])}?"
    if siblings:
        return [], f"the keys of [{table}] are {', '.join(siblings)}"
    return [], f"a recipe has base and the tables {', '.join(TABLES)}"
