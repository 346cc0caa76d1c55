"""Bounds of what a document from outside may hold, whatever its format is. No torch here.

A document is a TOML, JSON or YAML text that somebody else may have written. Its values become
plain Python values. Python has integers of any size and lists of any depth, but most code that
reads them has not: ``str`` refuses an integer with thousands of digits, and a recursion ends.
"""

from collections.abc import Iterator
from typing import Any

from composer3d.facts.text import shorten

MOST_TEXT = 300  # characters of a document's own words in a message

# Of every format but TOML. 1e30 written as an integer stands in the tokenizer_config.json of many
# models.
MOST_DEPTH = 100
_MOST_BITS = 128

Path = tuple[str | int, ...]


class BoundsError(ValueError):
    """A value of a document is out of bounds.

    Attributes:
        path: the keys and the indices that lead to the value.
        problem: what is wrong. The text follows the name of the value.
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"'{_name_of(path)}' {problem}" if path else f"it {problem}")


def check_values(tree: Any, *, most_depth: int = MOST_DEPTH, most_bits: int = _MOST_BITS) -> None:
    """Check the values of a document, in a loop without recursion.

    Args:
        tree: dicts, lists and tuples of plain values. A tuple may be a key with its value.
        most_depth: the levels of dicts and lists that may be inside of each other.
        most_bits: the bits of an integer, with its sign.

    Raises:
        BoundsError: an integer is too large, the levels are too many, or a text has a lone
            surrogate, which UTF-8 cannot encode.
    """
    bound = 1 << (most_bits - 1)
    waiting: list[tuple[Path, Any, int]] = [((), tree, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if type(value) is int:
            if not -bound <= value < bound:
                raise BoundsError(
                    path, f"must be an int of {most_bits} bits, got {_int_words(value)}"
                )
        elif isinstance(value, str):
            if not is_utf8(value):
                raise BoundsError(path, "has a lone surrogate, which is no character")
        elif isinstance(value, dict | list | tuple):
            if depth > most_depth:
                raise BoundsError(path[:1], f"nests deeper than {most_depth} levels")
            waiting += ((place, inner, depth + 1) for place, inner in _items(path, value))


def _items(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if not isinstance(value, dict):
        yield from (((*path, index), inner) for index, inner in enumerate(value))
        return
    for key, inner in value.items():
        if not isinstance(key, str):
            yield path, key  # YAML has keys of other types
        elif not is_utf8(key):
            raise BoundsError(path, "has a key with a lone surrogate, which is no character")
        yield (*path, key if isinstance(key, str) else "?"), inner


def _int_words(value: int) -> str:
    return str(value) if value.bit_length() <= 200 else f"one of {value.bit_length():,} bits"


def _name_of(path: Path) -> str:
    """Return the place of a value as messages show it, such as ``model.dim``, cut if it is long."""
    return shorten(".".join(map(str, path)), 80)


def is_utf8(value: str) -> bool:
    """Return whether UTF-8 can encode the text.

    It cannot encode a lone surrogate, with which Python represents a byte of the command line that
    is not UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
