"""The statements of a TOML text: where each begins, and which keys it gives. tomli gives no positions.

One pass over the text finds where its statements end, in linear time. It runs before tomli, so that brackets and dotted
keys deeper than those of any recipe are refused before anybody recurses into them. Of a text that is no TOML the
answer means nothing: tomli is what refuses that.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tomli

KeyPath = tuple[str, ...]

MOST_DEPTH = 16  # of brackets, and of the parts of a dotted key
MOST_STATEMENTS = 4_000  # a recipe has fewer than a hundred

_BLANK = r"(?:[ \t\r\n]|#[^\n]*(?=\n|\Z))*"  # what may stand between two statements
_TOKEN = re.compile(rf"""\"{{3}}|'{{3}}|["'#\[\]{{}}.=]|\n{_BLANK}""")
_LEADING = re.compile(_BLANK)
_ENDS = {  # of a string, by its quotes: an escape, which is stepped over, or what ends it
    '"': re.compile(r'\\.|["\n]'),
    "'": re.compile(r"['\n]"),
    '"""': re.compile(
        r'\\.|"{3,5}', re.DOTALL
    ),  # two quotes may stand before the three that end it
    "'''": re.compile(r"'{3,5}"),
}
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Statement(NamedTuple):
    """A header, or a key with its value. ``line`` counts from 1; ``equals`` is the place of the ``=`` in ``text``."""

    line: int
    text: str
    equals: int | None


def statements(text: str) -> Iterator[Statement]:
    """Every statement of ``text``, in order. Blank lines and comments are none.

    Raises ValueError where brackets or keys are nested too deep, or where there are too many statements.
    """
    text = text.replace("\r\n", "\n")
    begin, line, count = 0, 1, 0
    for end, equals in _ends(text):
        first = _leading(text, begin, end)
        if first < end:
            count += 1
            if count > MOST_STATEMENTS:
                raise ValueError(f"it has more than {MOST_STATEMENTS:_} statements")
            place = None if equals is None else equals - first
            yield Statement(line + text.count("\n", begin, first), text[first:end], place)
        line += text.count("\n", begin, end)
        begin = end


def _leading(text: str, begin: int, end: int) -> int:
    found = _LEADING.match(text, begin, end)
    return found.end() if found else begin


def _ends(text: str) -> Iterator[tuple[int, int | None]]:
    """Where each statement ends, before its line's end, and where its first ``=`` outside of brackets is."""
    position = depth = parts = 0
    dot = 0  # behind the last one
    equals: int | None = None
    while token := _TOKEN.search(text, position):
        position, kind = token.end(), token[0][:1]
        if kind in "\"'":
            position = _end_of_string(text, position, token[0])
        elif kind == "#":
            position = _index(text, "\n", position)
        elif kind == ".":  # of a key that has dots, or of a number of an array
            parts = 1 if parts == 0 or text.find(",", dot, position) >= 0 else parts + 1
            dot = position
        else:
            parts = 0
            depth = max(0, depth + (kind in "[{") - (kind in "]}"))
            if kind == "=" and depth == 0 and equals is None:
                equals = token.start()
            elif kind == "\n" and depth == 0:
                yield token.start(), equals
                equals = None
        if max(depth, parts) > MOST_DEPTH:
            what = "brackets" if depth > MOST_DEPTH else "the parts of a key"
            line = text.count("\n", 0, position) + 1
            raise ValueError(f"line {line} nests {what} deeper than {MOST_DEPTH}")
    yield len(text), equals


def _end_of_string(text: str, position: int, quotes: str) -> int:
    """Behind a string whose content begins at ``position``; a line's end, which ends one in error, is left."""
    while found := _ENDS[quotes].search(text, position):
        if found[0] == "\n":
            return found.start()
        position = found.end()
        if found[0][0] != "\\":
            return position
    return len(text)


def _index(text: str, wanted: str, position: int) -> int:
    found = text.find(wanted, position)
    return len(text) if found < 0 else found


def key_lines(found: Iterable[Statement]) -> dict[KeyPath, int]:
    """The line, from 1, of the statement that first gives each key; a table that is implied has its first key's.

    ``found``: the statements of a text that tomli reads.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, text, equals in found:
        given: list[KeyPath] = [()]
        if equals is None:
            table = next(_paths(tomli.loads(text)))
        else:
            given = list(_keys_of(text, equals))
        for path in (table + path for path in given):
            for depth in range(1, len(path) + 1):
                lines.setdefault(path[:depth], line)
    return lines


def _keys_of(text: str, equals: int) -> Iterator[KeyPath]:
    """The paths that a key with its value gives: several where the value is an inline table."""
    key = text[:equals].strip()
    if text[equals + 1 :].lstrip().startswith("{"):
        yield from _paths(tomli.loads(text))
    elif _PLAIN_KEY.fullmatch(key):
        yield (key,)
    else:  # a value may be long: tomli reads the key alone
        yield from _paths(tomli.loads(f"{key} = 0"))


def _paths(tree: dict[str, Any], path: KeyPath = ()) -> Iterator[KeyPath]:
    """The innermost keys of nested dicts."""
    for key, inner in tree.items():
        below = list(_paths(inner, (*path, key))) if isinstance(inner, dict) else []
        yield from below or [(*path, key)]
