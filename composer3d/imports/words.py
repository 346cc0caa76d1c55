"""The words of other programs beside the keys of recipes, as the TOML files beside this one say.

The translators and docs/coming_from_elsewhere.md read the same tables, so that the page cannot
differ from the code: ``python -m tools.words_page`` writes its tables. ``words.toml`` has what the
programs share, and each program has a file with these tables:

    [words]          a word, and our key if the value moves as it is; else our keys and how
    [also]           other names of a word
    [remarks]        a line about a value that moves
    [values]         our value of each of theirs, for a value that moves
    [absent]         values of a word that mean that it is absent
    [flags]          our value if a switch is on, and if there is a second one, if it is off
    [choices]        our value of each of theirs, in any case. The first one is for all others,
                     which are open points
    [defaults]       what the program has for what a file does not say, why, and the word that says
                     it, if that word may be there without a value
    [layout]         the word of each attribute of ``layout.StatedLayout``
    [[without_equal]], [[open]]   words that have no equal, and why; open: they decide something
    [own]            what only the translator of this program knows

Of ``[[without_equal]]`` and ``[[open]]``, ``fits`` lists values with which nothing is lost: ``off``
stands for all that switch a word off, as in every ``[[open]]`` without ``fits``, and ``any`` for
every value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from composer3d.facts.toml import parse_toml

# Values that switch a word off.
OFF = ("false", "0", "0.0", "none", "null", "", "[]")
_TABLES = {
    *("words", "also", "remarks", "values", "absent", "flags", "choices", "defaults", "layout"),
    *("without_equal", "open", "own"),
}


class Word(NamedTuple):
    """A word of another program.

    Attributes:
        name: the word: of Megatron-LM, an argument without dashes and with underscores; of the
            others, the keys of a file with dots between them. ``optimizer.*`` stands for all keys
            below ``optimizer``.
        ours: the key of a recipe, or several with commas between them. Empty: there is no equal.
        note: how the value is computed, or why there is no equal and what happens instead.
        is_copied: whether the value moves to the key as it is. Otherwise a translator computes it.
        values: for a value that is copied, our value of each of theirs, if they differ.
        fits: with no equal, the values with which nothing is lost. ``*`` means any.
        aliases: other names of the same word.
        decides: whether a word without an equal decides the layout, the model, the batch or the
            optimizer. A value that does not fit is then an open point of the recipe.
        is_computed: whether a translator reads the word, which may have no key of ours.
    """

    name: str
    ours: str = ""
    note: str = ""
    is_copied: bool = False
    values: Mapping[str, object] = {}
    fits: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    decides: bool = False
    is_computed: bool = False


@dataclass(frozen=True)
class Program:
    """What is known of a program. The tables that are no words are those of its file.

    Attributes:
        words: its words, in the order of the page.
    """

    words: list[Word]
    absent: Mapping[str, list[str]] = field(default_factory=dict)
    flags: Mapping[str, list[Any]] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, list[Any]] = field(default_factory=dict)
    layout: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def index(self) -> Mapping[str, Word]:
        """The words by each of their names and aliases."""
        return {name: word for word in self.words for name in (word.name, *word.aliases)}

    def find(self, name: str) -> Word | None:
        """Return the word of a name: the word itself, or that of the longest pattern that fits."""
        if name in self.index:
            return self.index[name]
        patterns = [key for key in self.index if "*" in key and fnmatchcase(name, key)]
        return self.index[max(patterns, key=len)] if patterns else None


def read_program(tables: Mapping[str, Any], why: Mapping[str, str]) -> Program:
    """Return a program of the tables of its file.

    Args:
        tables: the tables.
        why: reasons that groups of words of several programs have.

    Raises:
        ValueError: a table is unknown, or has a word that is none.
    """
    unknown = sorted(tables.keys() - _TABLES)
    if unknown:
        raise ValueError(f"unknown tables: {', '.join(unknown)}")
    words = list(_words_of(tables, why))
    names = {word.name for word in words}
    for table in ("also", "remarks", "values", "absent", "flags", "choices"):
        strange = sorted(tables.get(table, {}).keys() - names)
        if strange:
            raise ValueError(f"[{table}] has unknown words: {', '.join(strange)}")
    rest = {key: tables[key] for key in Program.__dataclass_fields__ if key in tables}
    return Program(**{**rest, "words": words})


def _words_of(tables: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[Word]:
    also, remarks, values = (tables.get(key, {}) for key in ("also", "remarks", "values"))
    for name, entry in tables["words"].items():
        aliases = tuple(also.get(name, "").split())
        if isinstance(entry, str):
            note = remarks.get(name, "")
            yield Word(name, entry, note, True, values.get(name, {}), aliases=aliases)
        else:
            ours, how = entry
            yield Word(name, ours, how, aliases=aliases, is_computed=True)
    for table, default in (("without_equal", []), ("open", ["off"])):
        for group in tables.get(table, []):
            note = group["note"] if "note" in group else why[group["why"]]
            fits = tuple(_fits_of(group.get("fits", default)))
            for name in group["words"].split():
                aliases = tuple(also.get(name, "").split())
                yield Word(name, "", note, fits=fits, aliases=aliases, decides=table == "open")


def _fits_of(fits: str | list[str]) -> Iterator[str]:
    for value in [fits] if isinstance(fits, str) else fits:
        if value == "off":
            yield from OFF
        else:
            yield "*" if value == "any" else value


def _read(name: str) -> dict[str, Any]:
    return parse_toml(files("composer3d.imports").joinpath(name).read_bytes())


_COMMON = _read("words.toml")
# What is known, by the name of the program.
PROGRAMS = {name: read_program(_read(file), _COMMON["why"]) for name, file in _COMMON["programs"]}
# Our name of each dtype, by what programs call it.
DTYPES = {theirs: ours for ours, names in _COMMON["dtypes"].items() for theirs in names}
# Words of the tables that other programs have as well: they tell no program.
SHARED = frozenset(_COMMON["shared"].split())
# Sections of a configuration of Megatron-Bridge, whose keys are mostly those of Megatron-LM.
BRIDGE_SECTIONS = frozenset(_COMMON["bridge_sections"].split())
