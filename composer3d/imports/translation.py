"""What a translation collects: values of the recipe, and what the user must be told."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer3d.facts.text import one_line
from composer3d.imports.literal import Unread
from composer3d.imports.words import PROGRAMS, Program, Word
from composer3d.recipe.schema import TABLES, model_table
from composer3d.recipe.values import as_toml, coerce, entries_of, type_of

_MOST_SHOWN = 80  # characters of a value of theirs in a line of ours
_MOST_LINES = 500  # of one list
_MOST_OPEN = 100  # points

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_SEPARATOR = re.compile(r"(?<=[0-9])_(?=[0-9])")  # as in 300_000_000, which Python reads
_NUMBER = re.compile(r"[+-]?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")

# The keys of all architectures of composer3d.
ENTRIES = {**entries_of({"model": model_table("moe")}), **entries_of(TABLES)}


class Setting(NamedTuple):
    """One word of a file with its value.

    Attributes:
        name: the word, as the tables of ``words`` have it.
        value: text of a script, or a typed value; ``Unread`` if it is an expression.
        shown: both as the file has them, for messages, such as ``--num-layers 96``.
        place: file and line, or the file.
        unsure: what in it depends on what is not decided: variables of a script.
    """

    name: str
    value: Any
    shown: str
    place: str
    unsure: frozenset[str] = frozenset()


class Value(NamedTuple):
    """A value of the recipe, and where it comes from."""

    value: Any
    comment: str


def setting(name: str, value: Any, place: str, *, option: str = "") -> Setting:
    """Return a setting; ``option`` is its name as an argument, if it is one."""
    if isinstance(value, Unread):
        text = value.text
    elif value is None:
        text = "null"
    elif isinstance(value, str | int | float | bool | list | tuple):
        text = value if isinstance(value, str) else as_toml(value)
    else:
        text = str(type(value).__name__)
    text = cut(text)
    shown = f"{name} = {text}"
    if option:
        shown = option if value is True else f"{option} {text}"
    return Setting(name, value, cut(shown), place)


def cut(text: str) -> str:
    """Return a text of theirs on one line, cut to a length that fits into ours."""
    shown = one_line(text[: 2 * _MOST_SHOWN])
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."


@dataclass
class Translation:
    """The recipe of a file, while it is made.

    Attributes:
        program: a key of ``words.PROGRAMS``.
        file: the file, for messages.
        settings: what the file says, by word.
        has_defaults: whether the program uses its own value for what the file does not say. An
            override file of a recipe of theirs says only what differs.
        accepted: the open points that the user accepts.
        overrides: the texts that ``--set`` gives, by key. What the file says of these keys is not
            needed.
        model: the preset that ``--model`` gives, or None.
        values: the recipe, by key.
        taken: what was taken over, a line each.
        assumed: what the file does not say, and the recipe needs.
        lost: what has no equal, with the reason.
        open: the open points, by key: what decides the layout, the model, the batch or the
            optimizer, and is not understood or cannot be expressed.
        harmless: words that change nothing here.
        contradictions: what contradicts itself, with the arithmetic.
        problems: why no recipe can be made.
    """

    program: str
    file: str
    settings: dict[str, Setting]
    has_defaults: bool = True
    accepted: frozenset[str] = frozenset()
    overrides: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    values: dict[str, Value] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    open: dict[str, str] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)

    @property
    def known(self) -> Program:
        """What is known of the program."""
        return PROGRAMS[self.program]

    @property
    def overridden(self) -> frozenset[str]:
        """The keys that ``--set`` gives."""
        return frozenset(self.overrides)

    def override(self, key: str) -> int | None:
        """Return the whole number that ``--set`` gives a key, or None."""
        text = self.overrides.get(key, "")
        return int(text) if re.fullmatch("[0-9]{1,9}", text) else None

    def get(self, name: str) -> Setting | None:
        """Return the setting of a word whose value is known; None if there is none.

        A value that cannot be known, such as a variable that the script does not set, is a problem,
        unless ``--set`` gives our key.
        """
        found = self.settings.get(name)
        if found is None:
            return None
        if self._is_automatic(found):
            return None  # ``finish`` tells
        first = name not in self._read
        self._read.add(name)
        if not is_known(found.value):
            word = self.known.find(name)
            keys = [key.strip() for key in word.ours.split(",")] if word and word.ours else []
            if first and not self.overridden.intersection(keys):
                way_out = f"give it with --set {keys[0]}=VALUE" if keys else "write its value there"
                self.problems.append(
                    f"{found.place}: {found.shown}: the value is not known here; {way_out}"
                )
            return None
        return None if found.value is None else found

    def _is_automatic(self, found: Setting) -> bool:
        """Return whether a value is left to Hugging Face's Trainer."""
        return self.program == "DeepSpeed" and found.value == "auto"

    def ignore(self, *names: str) -> None:
        """Mark words as read that need no line of their own."""
        self._read.update(name for name in names if name in self.settings)

    def number(self, name: str) -> int | None:
        """Return a whole number of at least 0, or None."""
        return self._converted(name, int)

    def real(self, name: str) -> float | None:
        """Return a number, or None."""
        return self._converted(name, float)

    def flag(self, name: str) -> bool:
        """Return whether a switch is there and not false."""
        return bool(self._converted(name, bool))

    def text(self, name: str) -> str | None:
        """Return a text, or None."""
        return self._converted(name, str)

    def _converted(self, name: str, kind: Any) -> Any:
        found = self.get(name)
        if found is None:
            return None
        try:
            return convert(_own_word(found, kind), kind)
        except ValueError as error:
            line = f"{found.place}: {found.shown}: must be {error}"
            if line not in self.problems:
                self.problems.append(line)
            return None

    def words(self, *names: str) -> str:
        """Return the settings of those words that are there as the file has them."""
        return ", ".join(self.settings[name].shown for name in names if name in self.settings)

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value that a key of the recipe has so far, or else the program's default."""
        if key in self.values:
            return self.values[key].value
        return self.known.defaults[key][0] if key in self.known.defaults else default

    def take(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key of the recipe from words of theirs. If the file has none, it is an assumption.

        Args:
            key: the key of the recipe.
            value: its value.
            names: words; those that the file lacks do not count.
            note: how the value follows from the words, or without words, the reason for it.
        """
        self._read.update(names)
        words = self.words(*names)
        if not words:
            self.values.pop(key, None)
            self.assume(key, value, note or "the default")
            return
        comment = f"{words}: {note}" if note else words
        self.values[key] = Value(value, comment)
        if key not in self.overridden:
            self.taken.append(f"{words} -> {key} = {as_toml(value)}{f': {note}' if note else ''}")

    def move(self, key: str, name: str) -> None:
        """Set a key, which is a number or a switch, to the value of a word, if the file has one."""
        value = self._converted(name, type_of(key, ENTRIES))
        if value is not None:
            self.take(key, value, name)

    def assume(self, key: str, value: Any, reason: str) -> None:
        """Set a key that the file does not give, unless ``--set`` or ``--model`` gives it."""
        if key in self.overridden or key in self.values:
            return
        self.values[key] = Value(value, reason)
        self.assumed.append(f"{key} = {as_toml(value)}: {reason}")

    def drop(self, key: str) -> None:
        """Take a key back."""
        self.values.pop(key, None)
        self.taken[:] = [line for line in self.taken if f" -> {key} = " not in line]

    def lose(self, reason: str, *names: str) -> None:
        """Note words that have no equal, if the file has them, and what happens instead."""
        self._read.update(names)
        words = self.words(*names)
        self.lost.append(f"{words}: {reason}" if words else reason)

    def ask(
        self, reason: str, *names: str, key: str = "", ours: str = "", is_settled: bool = False
    ) -> None:
        """Leave a point open, unless the user accepts it or sets our key.

        Args:
            reason: why the recipe is not what the file says.
            names: words; those that the file lacks do not count.
            key: the name of the point; by default the first word.
            ours: the key of the recipe that ``--set`` may give.
            is_settled: whether the user has settled it otherwise.
        """
        self._read.update(names)
        words = self.words(*names)
        line = one_line(f"{words}: {reason}" if words else reason)
        key = point_name(key or names[0])
        self._asked.add(key)
        if is_settled or key in self.accepted or ours in self.overridden:
            self.lost.append(line)
        elif key not in self.open:
            self.open[key] = line

    def contradict(self, line: str, key: str = "") -> None:
        """Note a contradiction, once. With a key, what is used is a guess: an open point."""
        if line not in self.contradictions:
            self.contradictions.append(line)
            if key:
                self.ask(line, key=key)

    def choose(self, name: str, key: str) -> Any:
        """Return our value of a word as ``[choices]`` has it; None if the file lacks the word.

        A text that the table lacks is an open point of ``key``, and has the first value.
        """
        values, text = self.known.choices[name], self.text(name)
        if text is None:
            return None
        first = next(iter(values.values()))
        text = text.lower().rpartition(".")[2]  # the class of a path of Python
        if text not in values:
            self.ask(f"not there: {key} = {as_toml(first)}", name, ours=key)
        return values.get(text, first)

    def take_choice(self, key: str, name: str) -> None:
        """Set a key to our value of a word, if the file has one."""
        value = self.choose(name, key)
        if value is not None:
            self.take(key, value, name)

    def take_plain_words(self) -> None:
        """Take over the words that need no code: those that move, and switches."""
        for name, values in self.known.absent.items():
            found = self.settings.get(name)
            if found is not None and str(found.value).lower() in values:
                del self.settings[name]
        self._copy_words()
        for name, (on, *off) in self.known.flags.items():
            if name in self.settings and (self.flag(name) or off):
                value = on if self.flag(name) else off[0]
                self.take(self.known.index[name].ours, value, name)

    def assume_defaults(self) -> None:
        """Set what the program has by default, unless the file or a preset says it."""
        for key, (value, reason, *words) in self.known.defaults.items():
            is_given = self.model is not None and key.startswith("model.")
            if not is_given and not any(word in self.settings for word in words):
                self.assume(key, value, reason)

    def _copy_words(self) -> None:
        for name in list(self.settings):
            word = self.known.index.get(name)
            if word is None or not word.is_copied or name in self._read:
                continue
            found = self.get(name)
            if found is None or word.ours in self.overridden:
                continue
            try:
                value = self._copied(found, word)
            except ValueError as error:
                self.problems.append(f"{found.place}: {found.shown}: must be {error}")
                continue
            self.take(word.ours, value, name, note=word.note)

    def _copied(self, found: Setting, word: Word) -> Any:
        wanted = type_of(word.ours, ENTRIES)
        if word.values:
            text = str(found.value).lower()
            if text not in word.values:
                raise ValueError(f"one of {', '.join(word.values)}")
            return word.values[text]
        if wanted in (int, float, bool):
            return convert(_own_word(found, wanted), wanted)
        value = list(found.value) if isinstance(found.value, tuple) else found.value
        return coerce(value, wanted)

    def finish(self) -> None:
        """Note the words that no code has read, and keep the lists short."""
        without_equal: dict[str, list[str]] = {}
        unknown = "not a word that this import knows; it may change what is trained"
        for name, found in self.settings.items():
            if name in self._read:
                continue
            word = self.known.find(name)
            if self._is_automatic(found):
                self.assumed.append(
                    f"{found.shown}: Hugging Face's Trainer chooses it, so it is absent"
                )
            elif word is None and found.value is None:
                self.harmless.append(found.shown)
            elif name.startswith("$") or "**" in name:
                self.ask("arguments that the file does not have", name)
            elif word is None:
                self.ask(unknown, name)
            elif word.is_copied and word.ours in self.overridden:
                pass
            elif word.ours or _fits(word, found):
                # Another word has decided, such as --model or --set, or nothing is lost.
                self.harmless.append(found.shown)
            elif word.decides:
                self.ask(word.note, name)
            else:
                without_equal.setdefault(word.note, []).append(found.shown)
        for reason, words in without_equal.items():
            self.lost.append(f"{', '.join(words)}: {reason}")
        said = set(map(point_name, self.settings))
        for key in sorted(self.accepted - self._asked - said):
            keys = ", ".join(self.open) or "none"
            self.problems.append(f"--accept {one_line(key)}: no such point is open; open: {keys}")
        if len(self.open) > _MOST_OPEN:
            self.problems.append(
                f"{self.file}: {len(self.open):,} words that decide what is trained are not known: "
                f"this is no configuration of {self.program} that import can read"
            )
        for lines in (self.taken, self.assumed, self.lost, self.harmless, self.contradictions):
            if len(lines) > _MOST_LINES:
                lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES:,} more"]
            lines[:] = [one_line(line) for line in lines]


def _own_word(found: Setting, kind: Any) -> Any:
    """Return the value of an option without the arguments of the program that follow it.

    A command line does not tell where the values of ``--swiglu PATH`` or ``--lr 1 PATH`` end.
    """
    if not found.shown.startswith("--") or not isinstance(found.value, str):
        return found.value
    first = found.value.split()[0] if found.value.split() else ""
    if kind is bool:
        return first.lower() not in _FALSE
    return first if kind in (int, float) else found.value


def point_name(text: str) -> str:
    """Return the name of an open point; ``--quick-geglu`` and ``quick_geglu`` name the same."""
    return one_line(text[:200]).lstrip("-").replace("-", "_") or "_"


def _fits(word: Word, found: Setting) -> bool:
    text = as_toml(found.value) if not isinstance(found.value, str | Unread) else found.value
    return "*" in word.fits or found.value is None or str(text).lower() in word.fits


def is_known(value: object) -> bool:
    """Return whether a value is one, and not an expression."""
    if isinstance(value, str):
        return "$" not in value and "`" not in value
    return not isinstance(value, Unread)


def convert(value: Any, kind: Any) -> Any:
    """Convert a text or a typed value to int (at least 0), float, bool or str.

    Raises:
        ValueError: the value is something else. The text completes "must be".
    """
    if isinstance(value, str):
        value = value.strip()
    if kind is str:
        if isinstance(value, str):
            return value
        raise ValueError("a text")
    if kind is bool:
        text = str(value).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise ValueError("true or false")
    if type(value) is bool:
        raise ValueError("a number")
    if isinstance(value, str):
        value = _SEPARATOR.sub("", value)
        if _NUMBER.fullmatch(value):
            value = int(value) if _INTEGER.fullmatch(value) else float(value)
    if kind is int:
        if type(value) is float and value.is_integer() and abs(value) < 1e18:
            value = int(value)
        if type(value) is int and 0 <= value < 10**18:
            return value
        raise ValueError("a whole number of at least 0")
    if type(value) in (int, float) and -1e300 < value < 1e300:
        return float(value)
    raise ValueError("a number")


def canonical(program: str, found: Iterable[Setting]) -> tuple[dict[str, Setting], dict[str, str]]:
    """Return settings by the name of their word; a word that stands twice has its last value.

    Returns:
        The settings, and a line for each word that stands twice with different values, by word.
    """
    result: dict[str, Setting] = {}
    contradictions: dict[str, str] = {}
    for one in found:
        word = PROGRAMS[program].index.get(one.name)
        name = word.name if word is not None else one.name
        before = result.get(name)
        if before is not None and str(before.value) != str(one.value):
            contradictions[name] = (
                f"{before.shown} ({before.place}) and {one.shown} ({one.place}): "
                f"{one.shown} is used"
            )
        result[name] = one._replace(name=name)
    return result, contradictions
