"""Read a recipe's files and overrides into a ``Draft``: values, their places, and problems."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import tomli

from composer3d.models import registry
from composer3d.recipe.schema import ARCHITECTURE, OPEN_POINTS, PATH, TABLES, model_table
from composer3d.recipe.statements import KeyPath, key_lines, statements
from composer3d.recipe.values import (
    FIELDS,
    Entries,
    as_short_toml,
    coerce,
    entries_of,
    is_utf8,
    join_with_or,
    one_line,
    type_of,
)
from composer3d.spec.errors import ModelError, RecipeError
from composer3d.spec.files import read_plain

MOST_BYTES = 256 << 10  # in a recipe and its bases together; a long recipe has a few thousand
MOST_BASES = 32
MOST_PROBLEMS = 100  # reported for one recipe


class _Document(NamedTuple):
    """One file of a recipe.

    Attributes:
        name: the path of the file, on one line, for messages.
        tables: the content, without ``base``.
        lines: the line of each key and table, from 1.
    """

    name: str
    tables: dict[str, Any]
    lines: dict[KeyPath, int]


@dataclass
class Draft:
    """The content of a recipe's files and overrides. ``resolve.load`` completes it.

    Attributes:
        path: the recipe's file, as the user names it.
        values: the typed values of each table, by name.
        places: where each key or table is written, such as ``x.toml:4``, by key or table.
        origins: the origin of each value that was computed, or taken from a preset or config.json,
            by key. The origin of any other value is the place of its key.
        problems: the lines of the error so far.
        invalid_keys: keys that have a wrong value, or that the user probably meant with a misspelt
            key. Rules that read them are skipped, so that one mistake gives one line.
        tables: the dataclass of each table. [model] has the fields of the architecture's shape.
        entries: the fields of all tables, by key.
    """

    path: str
    values: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {table: {} for table in TABLES}
    )
    places: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    invalid_keys: set[str] = field(default_factory=set)
    tables: dict[str, Any] = field(default_factory=lambda: TABLES)
    entries: Entries = field(default_factory=lambda: FIELDS)

    def place(self, key: str) -> str:
        """Return the prefix of an error about ``key``.

        It is the place of the key, or of its table if no file gives the key, or else the file.
        """
        return self.places.get(key) or self.places.get(key.split(".")[0]) or one_line(self.path)

    def origin(self, key: str) -> str:
        """Return where the value of ``key`` came from, as messages show it."""
        return self.origins.get(key) or self.places.get(key, "default")

    def blame(self, key: str, *problems: str) -> None:
        """Add problems, each with the place of ``key`` as its prefix."""
        self.problems += [f"{self.place(key)}: {problem}" for problem in problems]

    def read(self, sets: Sequence[str]) -> None:
        """Read the file, its bases and the overrides ``sets``.

        A base gives only the keys that no file before it gives. A later override wins.

        Raises:
            RecipeError: a file cannot be read, the architecture cannot be imported, or there are
                too many problems. The error includes the problems that were found before.
        """
        documents: list[_Document] = []
        unreadable: RecipeError | None = None
        try:
            for document in _documents(self.path):
                documents.append(document)
        except RecipeError as error:
            unreadable = error
        self._choose_architecture(documents, sets)
        try:
            for document in documents:
                self._add_document(document)
            if unreadable is not None:
                raise unreadable
            for text in sets:
                self._add_override(text)
        except RecipeError as error:
            raise RecipeError([*self.problems, *error.lines]) from None

    def _choose_architecture(self, documents: Sequence[_Document], sets: Sequence[str]) -> None:
        """Set the fields of [model] to those of the architecture that the recipe names.

        This comes before any other key is read, because the architecture defines the keys of
        [model]. A user's own architecture is imported.

        Raises:
            RecipeError: there is no such architecture, or it cannot be imported.
        """
        name: object = registry.DEFAULT
        place = ""
        for document in reversed(documents):
            table = document.tables.get("model")
            if isinstance(table, dict) and "architecture" in table:
                name = table["architecture"]
                place = f"{document.name}:{document.lines['model', 'architecture']}"
        for text in sets:
            key, _, raw = (part.strip() for part in text.partition("="))
            if key == "model.architecture":
                name, place = _parse_override(raw, str), f"--set {one_line(text)}"
        if name == registry.DEFAULT or not isinstance(name, str) or not ARCHITECTURE.accepts(name):
            return  # the checks of types and ranges report a wrong value
        try:
            self.tables = {**TABLES, "model": model_table(name)}
        except ModelError as error:
            raise RecipeError(
                [f"{place}: model.architecture: {one_line(line)}" for line in error.lines]
            ) from None
        self.entries = entries_of(self.tables)

    def _add_document(self, document: _Document) -> None:
        for table, content in document.tables.items():
            place = f"{document.name}:{document.lines[table,]}"
            if table == OPEN_POINTS:
                self._refuse_open_points(content, document, place)
            elif table not in TABLES:
                self._refuse_unknown(table, place, "table" if isinstance(content, dict) else "key")
            elif not isinstance(content, dict):
                self.problems.append(
                    f"{place}: '{table}' must be a table, [{table}] with its keys, "
                    f"got {as_short_toml(content)}"
                )
                self.invalid_keys.update(self._keys_of(table))
            else:
                self.places.setdefault(table, place)
                for name, value in content.items():
                    line = document.lines[table, name]
                    self._add_value(f"{table}.{name}", value, f"{document.name}:{line}")

    def _refuse_open_points(self, content: object, document: _Document, place: str) -> None:
        """Report each open point of a draft, of a base as well. No override settles one."""
        if not isinstance(content, dict):
            self.problems.append(
                f"{place}: '{OPEN_POINTS}' is the table of the open points of a draft; remove it"
            )
            return
        for key, point in list(content.items())[:MOST_PROBLEMS]:
            shown = point if isinstance(point, str) else as_short_toml(point)
            self.problems.append(
                f"{document.name}:{document.lines[OPEN_POINTS, key]}: open point "
                f"'{one_line(key)}': {one_line(shown)}; settle it in the recipe and delete this "
                "line, or import again with --accept"
            )

    def _add_override(self, text: str) -> None:
        key, equals, raw = (part.strip() for part in text.partition("="))
        place = f"--set {one_line(text)}"
        if not is_utf8(text):
            self.problems.append(f"{place}: the text must be UTF-8")
        elif not equals or "." not in key:
            self.problems.append(f"{place}: write it as table.key=value")
        else:
            is_known = key in self.entries
            value = _parse_override(raw, type_of(key, self.entries)) if is_known else raw
            self._add_value(key, value, place, overrides=True)

    def _add_value(self, key: str, value: object, place: str, *, overrides: bool = False) -> None:
        """Check the type of a value, and keep it.

        A value from a file is kept only if no earlier file gave one. An override always replaces
        the value.
        """
        if key not in self.entries:
            self._refuse_unknown(key, place)
            return
        try:
            typed_value = coerce(value, type_of(key, self.entries))
        except ValueError as error:
            self.problems.append(f"{place}: '{key}' must be {error}, got {as_short_toml(value)}")
            self.invalid_keys.add(key)
            return
        if overrides or key not in self.places:
            table, name = key.split(".")
            self.values[table][name] = typed_value
            self.places[key] = place

    def _refuse_unknown(self, key: str, place: str, noun: str = "key") -> None:
        """Report an unknown key or table, and mark the keys that may have been meant as invalid.

        Raises:
            RecipeError: there are too many problems.
        """
        table, _, name = key.rpartition(".")
        siblings = [full_key.split(".")[1] for full_key in self._keys_of(table)]
        meant_keys = [full_key for full_key in self.entries if full_key.endswith(f".{name}")]
        similar_names = difflib.get_close_matches(name, siblings or ["base", *TABLES], n=1)
        if similar_names:
            similar = similar_names[0]
            meant_keys = [f"{table}.{similar}"] if siblings else self._keys_of(similar)
            advice = f"did you mean '{similar}'?"
        elif meant_keys:
            # The name is a key of other tables.
            advice = f"did you mean {join_with_or(map(repr, meant_keys))}?"
        elif siblings:
            advice = f"the keys of [{table}] are {', '.join(siblings)}"
        else:
            advice = f"a recipe has base and the tables {', '.join(TABLES)}"

        self.problems.append(f"{place}: unknown {noun} '{one_line(key)}'; {advice}")
        self.invalid_keys.update(meant_keys)
        if len(self.problems) >= MOST_PROBLEMS:
            raise RecipeError(
                f"{place}: the recipe has {MOST_PROBLEMS} problems up to here; fix them first"
            )

    def _keys_of(self, table: str) -> list[str]:
        return [key for key in self.entries if key.startswith(f"{table}.")]


def _documents(path: str) -> Iterator[_Document]:
    """Yield the recipe's file, then its base, then the base of that one, and so on.

    Raises RecipeError if a file cannot be read or a ``base`` is wrong.
    """
    seen: set[str] = set()  # real paths
    total_bytes = 0
    blame = ""  # prefix of an error about a base: the place that names the base
    while True:
        name = one_line(path)
        try:
            content = read_plain(path, limit=MOST_BYTES)
        except OSError as error:
            raise RecipeError(f"{blame}{name}: {error.strerror}") from None
        except ValueError as error:  # the name contains a NUL byte, or UTF-8 cannot encode it
            raise RecipeError(f"{blame}{name}: no file has such a name ({error})") from None

        total_bytes += len(content)
        if total_bytes > MOST_BYTES:
            raise RecipeError(
                f"{blame}{name}: the recipe and its bases are larger than {MOST_BYTES:_} bytes"
            )
        tables, lines = _parse(content, name)
        base = tables.pop("base", None)
        yield _Document(name, tables, lines)
        if base is None:
            return

        place = f"{name}:{lines['base',]}"
        shown_base = as_short_toml(base)
        if not isinstance(base, str) or not PATH.accepts(base):
            raise RecipeError(f"{place}: 'base' must be the path of one recipe, got {shown_base}")
        seen.add(os.path.realpath(path))
        path = os.path.join(os.path.dirname(path), base)
        blame = f"{place}: base cannot be read: "
        if os.path.realpath(path) in seen:
            raise RecipeError(f"{place}: base = {shown_base} makes a cycle; remove one base")
        if len(seen) > MOST_BASES:
            raise RecipeError(
                f"{place}: base = {shown_base} is base number {len(seen)}; use at most {MOST_BASES}"
            )


def _parse(content: bytes, name: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Parse the file ``name``: return its tables and the lines of its keys.

    Raises RecipeError if the content is not TOML.
    """
    try:
        text = content.decode("utf-8-sig")
        # ``statements`` refuses deep nesting, so it runs before tomli, which would recurse.
        found_statements = list(statements(text))
        return tomli.loads(text), key_lines(found_statements)
    except tomli.TOMLDecodeError as error:
        raise RecipeError(
            f"{name}:{error.lineno}: not TOML: {error.msg} (column {error.colno})"
        ) from None
    except (ValueError, RecursionError) as error:
        # The text is not UTF-8, nests too deep, or has a number with thousands of digits.
        raise RecipeError(f"{name}: cannot be read as TOML: {error}") from None


def split_overrides(line: str) -> list[str]:
    """Split a line of overrides, each ``table.key=value``. A value may contain spaces."""
    return re.split(r"\s+(?=\w+\.\w+=)", line.strip()) if line.strip() else []


def _parse_override(raw: str, value_type: Any) -> object:
    """Return the value of an override for a key of the type ``value_type``.

    If the type is str or a choice of strings, the value is the raw text without a pair of quotes
    around it. Otherwise the text is parsed as TOML. A text that is not exactly one TOML value is
    returned unchanged.
    """
    if value_type is str or str in map(type, get_args(value_type)):
        is_quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'"
        return raw[1:-1] if is_quoted else raw
    text = f"value = {raw}"
    with suppress(ValueError, RecursionError):
        # One statement and one key: an override must not smuggle in a second key.
        if len(list(statements(text))) == 1:
            document = tomli.loads(text)
            if len(document) == 1:
                return document["value"]
    return raw
