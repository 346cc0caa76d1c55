"""Where each key of a TOML text stands: tomli gives values without positions, and an error must name its line.

A recursive scanner that knows just enough TOML to step over values. It is meant for texts that tomli accepts; tests
compare the two. On others it yields what it can find, so that a key given twice can be named with both lines.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator

import tomli

KeyPath = tuple[str | int, ...]  # a table's key, or the index of an element of an array

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# A multi-line string may end in up to two quotes of its own before the closing three.
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")  # numbers, booleans, dates; a date may hold a space


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, on which each key is first written; a table that is only implied has its first key's line."""
    lines: dict[KeyPath, int] = {}
    for path, line in _Scanner(text).document():
        for depth in range(1, len(path) + 1):
            lines.setdefault(path[:depth], line)
    return lines


def repeated_key(text: str, line: int) -> tuple[KeyPath, int] | None:
    """The first key that is given again, no later than on ``line``, with the line on which it was first given."""
    seen: dict[KeyPath, int] = {}
    try:
        for path, at in _Scanner(text).document():
            if path in seen and at <= line:
                return path, seen[path]
            seen.setdefault(path, at)
    except (ValueError, RecursionError):  # the text is not TOML beyond this point
        return None
    return None


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line_ends = [match.start() for match in re.finditer("\n", self._text)]

    def document(self) -> Iterator[tuple[KeyPath, int]]:
        """Yields (path, line) of each table header, key and array element, in the order in which they are written."""
        table: KeyPath = ()
        last_index: dict[KeyPath, int] = {}  # of each array of tables
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._take("["):
                line, is_array = self._line(), self._take("[")
                table = ()
                parts = self._dotted_key()
                for depth, part in enumerate(parts, start=1):
                    table = (*table, part)
                    if is_array and depth == len(parts):
                        last_index[table] = last_index.get(table, -1) + 1
                    if table in last_index:
                        table = (*table, last_index[table])
                self._expect("]]" if is_array else "]")
                yield table, line
            else:
                yield from self._assignment(table)
            self._skip(_BLANK)

    def _assignment(self, table: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        line = self._line()
        path = (*table, *self._dotted_key())
        self._expect("=")
        yield path, line
        yield from self._value(path)

    def _value(self, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
        self._skip(_SPACE)
        if self._take("["):
            index = 0
            while not self._closes("]"):
                yield (*path, index), self._line()
                yield from self._value((*path, index))
                index += 1
        elif self._take("{"):
            while not self._closes("}"):
                yield from self._assignment(path)
        elif not self._skip(_STRING) and not self._skip(_SCALAR):
            raise ValueError(f"no value on line {self._line()}")

    def _closes(self, bracket: str) -> bool:
        """Steps over the space, the comments and the comma between two elements; true at the closing bracket."""
        self._skip(_BLANK)
        if self._take(","):
            self._skip(_BLANK)
        return self._take(bracket)

    def _dotted_key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while not parts or self._take("."):
            self._skip(_SPACE)
            raw = self._skip(_STRING)
            if raw:
                parts.append(tomli.loads(f"key = {raw}")["key"])
            else:
                parts.append(self._skip(_BARE_KEY))
            if not raw and not parts[-1]:
                raise ValueError(f"no key on line {self._line()}")
            self._skip(_SPACE)
        return tuple(parts)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match.group()

    def _take(self, literal: str) -> bool:
        found = self._text.startswith(literal, self._at)
        self._at += len(literal) * found
        return found

    def _expect(self, literal: str) -> None:
        if not self._take(literal):
            raise ValueError(f"expected {literal!r} on line {self._line()}")

    def _line(self) -> int:
        return bisect_right(self._line_ends, self._at) + 1
