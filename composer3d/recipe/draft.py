"""Read a recipe's files and overrides into a ``Draft``: values, their places, and problems."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from composer3d.facts.bounds import MOST_TEXT, is_utf8
from composer3d.facts.errors import ModelError, RecipeError
from composer3d.facts.files import read_plain
from composer3d.facts.statements import KeyPath, statements
from composer3d.facts.text import one_line
from composer3d.facts.toml import TomlBoundsError, TomlError, parse_toml, parse_toml_with_lines
from composer3d.models import registry
from composer3d.recipe.schema import ARCHITECTURE, OPEN_POINTS, PATH, TABLES, model_table
from composer3d.recipe.values import (
    FIELDS,
    Entries,
    as_short_toml,
    coerce,
    entries_of,
    join_with_or,
    type_of,
)

_MOST_BYTES = 256 << 10  # in a recipe and its bases together; a long recipe has a few thousand
_MOST_BASES = 32
_MOST_PROBLEMS = 100  # reported for one recipe
DEFAULT = "default"  # the origin of a value that nothing sets
_VALUE = "value"  # the key of an override's value, while it is parsed


class ParsedRecipe(NamedTuple):
    """The parsed text of a recipe.

    Attributes:
        name: the path of the file, on one line, for messages.
        tables: the content, without ``base``.
        lines: the line of each key and table, from 1; empty if nobody wrote the text.
    """

    name: str
    tables: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def place(self, *path: str) -> str:
        """Return the place of a key or a table, as the prefix of an error."""
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"


# What ``resolve.load`` reads: a file, or a document whose content was checked before.
Source = str | os.PathLike[str] | ParsedRecipe


@dataclass
class Draft:
    """The content of a recipe's files and overrides. ``resolve.load`` completes it.

    Attributes:
        source: the recipe's file, as the user names it, or a document.
        values: the typed values of each table, by name.
        places: where each key or table is written, such as ``x.toml:4``, by key or table.
        distances: how far each value is from the command line, by key: 0 for an override, 1 for the
            recipe, 2 for its base, and so on.
        hidden: of each key whose value hides another one, the nearest value that a file gives.
        origins: the origin of each value that was computed, or taken from a preset or config.json,
            by key. The origin of any other value is the place of its key.
        problems: the lines of the error so far.
        invalid_keys: keys that have a wrong value, or that the user probably meant with a misspelt
            key. Rules that read them are skipped, so that one mistake gives one line.
        tables: the dataclass of each table. [model] has the fields of the architecture's shape.
        entries: the fields of all tables, by key.
        may_import, hub_names: as in ``resolve.load``.
    """

    source: Source
    values: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {table: {} for table in TABLES}
    )
    places: dict[str, str] = field(default_factory=dict)
    distances: dict[str, int] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    invalid_keys: set[str] = field(default_factory=set)
    tables: dict[str, Any] = field(default_factory=lambda: TABLES)
    entries: Entries = field(default_factory=lambda: FIELDS)
    may_import: bool = False
    hub_names: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The name of the recipe, for messages."""
        source = self.source
        return source.name if isinstance(source, ParsedRecipe) else one_line(os.fspath(source))

    def place(self, key: str) -> str:
        """Return the prefix of an error about ``key``.

        It is the place of the key, or of its table if no file gives the key, or else the file.
        """
        return self.places.get(key) or self.places.get(key.split(".")[0]) or self.name

    def origin(self, key: str) -> str:
        """Return where the value of ``key`` came from, as messages show it."""
        return self.origins.get(key) or self.places.get(key, DEFAULT)

    def blame(self, key: str, *problems: str) -> None:
        """Add problems, each with the place of ``key`` as its prefix."""
        self.problems += [f"{self.place(key)}: {problem}" for problem in problems]

    def read(self, sets: Sequence[str]) -> None:
        """Read the file, its bases and the overrides ``sets``.

        A base gives only the keys that no file before it gives. A later override wins. The base of
        a document is not read.

        Args:
            sets: overrides, each ``table.key=value``.

        Raises:
            RecipeError: a file cannot be read, the architecture cannot be imported, or there are
                too many problems. The error includes the problems that were found before.
        """
        documents: list[ParsedRecipe] = []
        unreadable: RecipeError | None = None
        try:
            for document in _documents(self.source):
                documents.append(document)
        except RecipeError as error:
            unreadable = error
        self._choose_architecture(documents, sets)
        try:
            for distance, document in enumerate(documents, start=1):
                self._add_document(document, distance)
            if unreadable is not None:
                raise unreadable
            for text in sets:
                self._add_override(text)
        except RecipeError as error:
            raise RecipeError([*self.problems, *error.lines]) from None

    def _choose_architecture(self, documents: Sequence[ParsedRecipe], sets: Sequence[str]) -> None:
        """Set the fields of [model] to those of the architecture that the recipe names.

        This comes before any other key is read, because the architecture defines the keys of
        [model]. A user's own architecture is imported only if ``may_import``.

        Raises:
            RecipeError: there is no such architecture, or it cannot or may not be imported.
        """
        name: object = registry.DEFAULT
        place = ""
        for document in reversed(documents):
            table = document.tables.get("model")
            if isinstance(table, dict) and "architecture" in table:
                name = table["architecture"]
                place = document.place("model", "architecture")
        for text in sets:
            if key_of_override(text) == "model.architecture":
                raw = text.partition("=")[2].strip()
                name, place = _parse_override(raw, str), _place_of_override(text)
        if name == registry.DEFAULT or not isinstance(name, str) or not ARCHITECTURE.accepts(name):
            return  # the checks of types and ranges report a wrong value
        try:
            if self.may_import:
                registry.import_architecture(name)
            self.tables = {**TABLES, "model": model_table(name)}
        except ModelError as error:
            raise RecipeError(
                [f"{place}: model.architecture: {one_line(line)}" for line in error.lines]
            ) from None
        self.entries = entries_of(self.tables)

    def _add_document(self, document: ParsedRecipe, distance: int) -> None:
        for table, content in document.tables.items():
            place = document.place(table)
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
                    place = document.place(table, name)
                    self._add_value(f"{table}.{name}", value, place, distance)

    def _refuse_open_points(self, content: object, document: ParsedRecipe, place: str) -> None:
        """Report each open point of a draft, of a base as well. No override settles one."""
        if not isinstance(content, dict):
            self.problems.append(
                f"{place}: '{OPEN_POINTS}' is the table of the open points of a draft; remove it"
            )
            return
        for key, point in list(content.items())[:_MOST_PROBLEMS]:
            shown = point if isinstance(point, str) else as_short_toml(point)
            self.problems.append(
                f"{document.place(OPEN_POINTS, key)}: open point "
                f"'{one_line(key)}': {one_line(shown)}; settle it in the recipe and delete this "
                "line, or import again with --accept"
            )

    def _add_override(self, text: str) -> None:
        key, equals, raw = (part.strip() for part in text.partition("="))
        place = _place_of_override(text)
        if not is_utf8(text):
            self.problems.append(f"{place}: the text must be UTF-8")
        elif not equals or "." not in key:
            self.problems.append(f"{place}: write it as table.key=value")
        else:
            is_known = key in self.entries
            try:
                value = _parse_override(raw, type_of(key, self.entries)) if is_known else raw
            except TomlBoundsError as error:
                problem = error.problem.replace(f"'{_VALUE}", f"'{key}", 1)
                self.problems.append(f"{place}: {problem}")
                self.invalid_keys.add(key)
                return
            self._add_value(key, value, place, distance=0)

    def _add_value(self, key: str, value: object, place: str, distance: int) -> None:
        """Check the type of a value, and keep it.

        A value from a file is kept only if no earlier file gave one. An override, whose
        ``distance`` is 0, always replaces the value.
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
        table, name = key.split(".")
        if key not in self.places or distance == 0:
            if self.distances.get(key, 0) > 0:
                self.hidden[key] = self.values[table][name]
            self.values[table][name] = typed_value
            self.places[key] = place
            self.distances[key] = distance
        else:
            self.hidden.setdefault(key, typed_value)

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

        self.problems.append(f"{place}: unknown {noun} '{one_line(key, MOST_TEXT)}'; {advice}")
        self.invalid_keys.update(meant_keys)
        if len(self.problems) >= _MOST_PROBLEMS:
            raise RecipeError(
                f"{place}: the recipe has {_MOST_PROBLEMS} problems up to here; fix them first"
            )

    def _keys_of(self, table: str) -> list[str]:
        return [key for key in self.entries if key.startswith(f"{table}.")]


def _documents(source: Source) -> Iterator[ParsedRecipe]:
    """Yield the recipe's file, then its base, then the base of that one, and so on.

    Raises RecipeError if a file cannot be read or a ``base`` is wrong.
    """
    if isinstance(source, ParsedRecipe):
        yield source
        return
    path = os.fspath(source)
    seen: set[str] = set()  # real paths
    total_bytes = 0
    blame = ""  # prefix of an error about a base: the place that names the base
    while True:
        name = one_line(path)
        content = read_file(path, limit=_MOST_BYTES, blame=blame)
        total_bytes += len(content)
        if total_bytes > _MOST_BYTES:
            raise RecipeError(
                f"{blame}{name}: the recipe and its bases are larger than {_MOST_BYTES:_} bytes"
            )
        document = parse_document(content, name)
        base = document.tables.get("base")
        tables = {key: table for key, table in document.tables.items() if key != "base"}
        yield document._replace(tables=tables)
        if base is None:
            return

        place = document.place("base")
        shown_base = as_short_toml(base)
        if not isinstance(base, str) or not PATH.accepts(base):
            raise RecipeError(f"{place}: 'base' must be the path of one recipe, got {shown_base}")
        seen.add(os.path.realpath(path))
        path = os.path.join(os.path.dirname(path), base)
        blame = f"{place}: base cannot be read: "
        if os.path.realpath(path) in seen:
            raise RecipeError(f"{place}: base = {shown_base} makes a cycle; remove one base")
        if len(seen) > _MOST_BASES:
            raise RecipeError(
                f"{place}: base = {shown_base} is base number {len(seen)}; use at most "
                f"{_MOST_BASES}"
            )


def read_file(path: str, *, limit: int, blame: str = "") -> bytes:
    """Return the content of a file of at most ``limit`` bytes. ``blame`` begins an error's line.

    Raises:
        RecipeError: the file cannot be read.
    """
    try:
        return read_plain(path, limit=limit)
    except OSError as error:
        raise RecipeError(f"{blame}{one_line(path)}: {error.strerror}") from None
    except ValueError as error:  # the name contains a NUL byte, or UTF-8 cannot encode it
        raise RecipeError(f"{blame}{one_line(path)}: no file has such a name ({error})") from None


def parse_document(content: bytes | str, name: str) -> ParsedRecipe:
    """Parse the text of a recipe. Nothing that it names is opened or imported.

    Args:
        content: the text.
        name: the name of its file, for messages.

    Raises:
        RecipeError: the content is not TOML, or holds more than any recipe.
    """
    try:
        return ParsedRecipe(name, *parse_toml_with_lines(content))
    except TomlError as error:
        if error.line is None:
            raise RecipeError(f"{name}: cannot be read as TOML: {error.problem}") from None
        raise RecipeError(f"{name}:{error.line}: {error.problem}") from None


def split_overrides(line: str) -> list[str]:
    """Split a line of overrides, each ``table.key=value``. A value may contain spaces."""
    return re.split(r"\s+(?=\w+\.\w+=)", line.strip()) if line.strip() else []


def key_of_override(text: str) -> str:
    """Return the key of an override such as ``mesh.tp=2``."""
    return text.partition("=")[0].strip()


def _place_of_override(text: str) -> str:
    return f"--set {one_line(text, MOST_TEXT)}"


def _parse_override(raw: str, value_type: Any) -> object:
    """Return the value of an override for a key of the type ``value_type``.

    If the type is str or a choice of strings, the value is the raw text without a pair of quotes
    around it. Otherwise the text is parsed as TOML. A text that is not exactly one TOML value is
    returned unchanged.

    Raises TomlBoundsError if the value is out of bounds. The error calls it ``_VALUE``.
    """
    if value_type is str or str in map(type, get_args(value_type)):
        is_quoted = len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "\"'"
        return raw[1:-1] if is_quoted else raw
    text = f"{_VALUE} = {raw}"
    try:
        # One statement and one key: an override must not smuggle in a second key.
        document = parse_toml(text) if len(list(statements(text))) == 1 else {}
    except TomlBoundsError:
        raise
    except ValueError:
        document = {}
    return document[_VALUE] if len(document) == 1 else raw
