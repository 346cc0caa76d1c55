"""Read TOML that somebody else may have written. No torch here."""

from typing import Any, NamedTuple

import tomli

from composer3d.facts.bounds import MOST_TEXT, BoundsError, check_values
from composer3d.facts.statements import MOST_DEPTH, KeyPath, Statement, key_lines, statements
from composer3d.facts.text import shorten

_INT_BITS = 64  # as the TOML specification says


class TomlError(ValueError):
    """A text is not TOML, or holds more than any of ours.

    Attributes:
        problem: what is wrong.
        line: the line of the problem, from 1; None if there is no such line.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem = problem
        self.line = line
        super().__init__(problem if line is None else f"line {line}: {problem}")


class TomlBoundsError(TomlError):
    """A value nests too deep or is too large."""


class TomlText(NamedTuple):
    """What a TOML text says.

    Attributes:
        tables: its values.
        lines: the line of each key and table, from 1.
    """

    tables: dict[str, Any]
    lines: dict[KeyPath, int]


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        TomlBoundsError: a value nests deeper than 16 levels, or is an integer of more than 64 bits.
        TomlError: the text is not UTF-8 or not TOML, or has more than 4,000 statements.
    """
    return _parse(content)[0]


def parse_toml_with_lines(content: bytes | str) -> TomlText:
    """Parse a TOML text, and find the line of each key.

    Raises:
        TomlError, TomlBoundsError: as ``parse_toml``.
    """
    tables, found = _parse(content)
    return TomlText(tables, key_lines(found))


def _parse(content: bytes | str) -> tuple[dict[str, Any], list[Statement]]:
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        # ``statements`` refuses deep nesting, so it runs before tomli, which would recurse.
        found = list(statements(text))
    except ValueError as error:
        raise TomlError(str(error)) from None
    try:
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        problem = f"not TOML: {shorten(error.msg, MOST_TEXT)} (column {error.colno})"
        raise TomlError(problem, error.lineno) from None
    except (ValueError, RecursionError):
        raise TomlBoundsError(
            f"an integer has more than {_INT_BITS} bits", _long_int(found)
        ) from None
    try:
        check_values(tables, most_depth=MOST_DEPTH, most_bits=_INT_BITS)
    except BoundsError as error:
        raise TomlBoundsError(str(error), _line_of(error, found)) from None
    return tables, found


def _long_int(found: list[Statement]) -> int | None:
    """Return the line of the statement whose integer has thousands of digits.

    tomli gives no place: Python refuses to convert the digits.
    """
    for statement in found:
        try:
            tomli.loads(statement.text)
        except tomli.TOMLDecodeError:
            continue
        except ValueError:
            return statement.line
    return None


def _line_of(error: BoundsError, found: list[Statement]) -> int | None:
    """Return the line of the key that holds a value, or of the innermost table around it."""
    try:
        lines = key_lines(found)
    except RecursionError:  # the tables nest too deep
        return None
    path = tuple(map(str, error.path))
    prefixes = [path[:size] for size in range(len(path), 0, -1)]
    return next((lines[prefix] for prefix in prefixes if prefix in lines), None)
