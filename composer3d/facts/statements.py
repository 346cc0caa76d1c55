"""Find the statements of a TOML text, the line of each, and the keys that it sets.

tomli gives no positions. One pass over the text finds the end of each statement, in linear time.
The pass refuses brackets and dotted keys that nest deeper than those of any recipe. It runs before
tomli, which would recurse into them. If the text is not TOML, the result is meaningless, and tomli
refuses the text.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tomli

KeyPath = tuple[str, ...]

MOST_DEPTH = 16  # levels of brackets, and parts of a dotted key
_MOST_STATEMENTS = 4_000  # a recipe has fewer than a hundred

# White space and comments, which may stand between two statements.
_BLANK = r"(?:[ \t\r\n]|#[^\n]*(?=\n|\Z))*"
_LEADING_BLANK = re.compile(_BLANK)

# A quote, "#", bracket, dot, comma or "=", or a line break with the blank lines and comments after
# it.
_TOKEN = re.compile(rf"""\"{{3}}|'{{3}}|["'#\[\]{{}}.,=]|\n{_BLANK}""")

# What to search for inside a string, by the quotes that open it: an escape sequence, which is
# skipped, or the end of the string. Up to two quotes may precede the three that end a multi-line
# string.
_STRING_TOKENS = {
    '"': re.compile(r'\\.|["\n]'),
    "'": re.compile(r"['\n]"),
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'''": re.compile(r"'{3,5}"),
}
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


class Statement(NamedTuple):
    """The header of a table, or a key with its value.

    Attributes:
        line: the line on which the statement begins, from 1.
        text: the statement.
        equals: the index of the ``=`` in ``text``, or None for a header.
    """

    line: int
    text: str
    equals: int | None


def statements(text: str) -> Iterator[Statement]:
    """Yield every statement of ``text``, in order. Blank lines and comments are not statements.

    Raises:
        ValueError: brackets or keys nest too deep, or there are too many statements.
    """
    text = text.replace("\r\n", "\n")
    begin, line, count = 0, 1, 0
    for end, equals in _statement_ends(text):
        first = _skip_blank(text, begin, end)
        if first < end:
            count += 1
            if count > _MOST_STATEMENTS:
                raise ValueError(f"it has more than {_MOST_STATEMENTS:_} statements")
            yield Statement(
                line=line + text.count("\n", begin, first),
                text=text[first:end],
                equals=None if equals is None else equals - first,
            )
        line += text.count("\n", begin, end)
        begin = end


def _skip_blank(text: str, begin: int, end: int) -> int:
    match = _LEADING_BLANK.match(text, begin, end)
    return match.end() if match else begin


def _statement_ends(text: str) -> Iterator[tuple[int, int | None]]:
    """Yield the end of each statement, and the index of its first ``=`` outside of brackets.

    The end is the index of the line break. The index of the ``=`` is None for a header.
    """
    position = 0
    depth = 0  # of brackets
    key_parts = 0  # dots of the dotted key, or of the number, that is being read
    equals: int | None = None
    while token := _TOKEN.search(text, position):
        position = token.end()
        first_char = token[0][0]
        if first_char in "\"'":
            position = _end_of_string(text, position, token[0])
        elif first_char == "#":
            position = _find_or_end(text, "\n", position)
        elif first_char == ".":
            key_parts += 1
        else:
            key_parts = 0
            if first_char in "[{":
                depth += 1
            elif first_char in "]}":
                depth = max(0, depth - 1)
            elif first_char == "=" and depth == 0 and equals is None:
                equals = token.start()
            elif first_char == "\n" and depth == 0:
                yield token.start(), equals
                equals = None

        if max(depth, key_parts) > MOST_DEPTH:
            nested = "brackets" if depth > MOST_DEPTH else "the parts of a key"
            line = text.count("\n", 0, position) + 1
            raise ValueError(f"line {line} nests {nested} deeper than {MOST_DEPTH}")
    yield len(text), equals


def _end_of_string(text: str, position: int, quotes: str) -> int:
    """Return the position after a string whose content begins at ``position``.

    A line break in a single-line string is an error. It ends the string and is not skipped.
    """
    while token := _STRING_TOKENS[quotes].search(text, position):
        if token[0] == "\n":
            return token.start()
        position = token.end()
        is_escape = token[0][0] == "\\"
        if not is_escape:
            return position
    return len(text)


def _find_or_end(text: str, wanted: str, position: int) -> int:
    index = text.find(wanted, position)
    return len(text) if index < 0 else index


def key_lines(found_statements: Iterable[Statement]) -> dict[KeyPath, int]:
    """Return the line, from 1, of the statement that first sets each key or table.

    A table without a header has the line of its first key.

    Args:
        found_statements: the statements of a text that tomli accepts.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for line, text, equals in found_statements:
        if equals is None:
            table = next(_leaf_paths(tomli.loads(text)))
            paths = [table]
        else:
            paths = [table + path for path in _key_paths(text, equals)]
        for path in paths:
            for depth in range(1, len(path) + 1):
                lines.setdefault(path[:depth], line)
    return lines


def _key_paths(text: str, equals: int) -> Iterator[KeyPath]:
    """Yield the path of each key that a statement sets. An inline table sets several."""
    key = text[:equals].strip()
    if text[equals + 1 :].lstrip().startswith("{"):
        yield from _leaf_paths(tomli.loads(text))
    elif _PLAIN_KEY.fullmatch(key):
        yield (key,)
    else:
        # Parse the key without its value, which may be long.
        yield from _leaf_paths(tomli.loads(f"{key} = 0"))


def _leaf_paths(tree: dict[str, Any], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of the innermost keys of nested dicts."""
    for key, inner in tree.items():
        path = (*prefix, key)
        below = list(_leaf_paths(inner, path)) if isinstance(inner, dict) else []
        yield from below or [path]
