"""Where each key of a TOML text stands: tomli gives values without positions, and an error must name its line."""

from collections.abc import Iterator
from typing import Any

import tomli

KeyPath = tuple[str, ...]


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line, from 1, of the statement that first gives each key; a table that is implied has its first key's."""
    lines: dict[KeyPath, int] = {}
    for path, line in _statements(text):
        for depth in range(1, len(path) + 1):
            lines.setdefault(path[:depth], line)
    return lines


def repeated_key(text: str, line: int) -> tuple[KeyPath, int] | None:
    """The first key that is given again, no later than on ``line``, with the line on which it was first given."""
    seen: dict[KeyPath, int] = {}
    for path, at in _statements(text):
        if path in seen and at <= line:
            return path, seen[path]
        seen.setdefault(path, at)
    return None


def _statements(text: str) -> Iterator[tuple[KeyPath, int]]:
    """(path, line) of each header and of each key that is given, those of inline tables with them.

    A statement is the fewest lines that tomli takes alone. Beyond one that is wrong nothing is found.
    """
    table: KeyPath = ()
    begin, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        pending += f"{line}\n"
        try:
            found = list(_paths(tomli.loads(pending)))
        except (ValueError, RecursionError):  # it goes on
            continue
        if pending.lstrip().startswith("["):
            table = found[-1]
            yield table, begin
        else:
            yield from ((table + path, begin) for path in found)
        begin, pending = number + 1, ""


def _paths(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """The keys of nested dicts; of a dict that holds one key, as dotted ones do, those below it."""
    for key, inner in tree.items():
        below = list(_paths(inner, (*path, key))) if isinstance(inner, dict) else []
        yield from below or [(*path, key)]
