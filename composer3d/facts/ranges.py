"""Ranges of values, for the fields of shapes and of recipes. No torch here.

Every number has a lower and an upper bound. The upper bounds lie far beyond any real use. Without
them, a typing error or a malicious file could cost hours of enumeration or all memory.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The values that a key accepts.

    Attributes:
        accepts: returns whether a value is in the range. The value must not be None.
        requirement: the end of the error about a value outside the range: "must be from 1 to 8".
    """

    accepts: Callable[[Any], bool]
    requirement: str


MOST_LAYERS = 10_000  # published models have 126 at most
MOST_HEADS = 1 << 16
MOST_WIDTH = 1 << 20  # width of the residual stream; Llama 3 405B has 16,384
MOST_EXPERTS = 1 << 16
MOST_TOKENS = 1 << 27  # tokens in a sequence: 134 million
MOST_VOCAB = 1 << 24


def between(least: float, most: float) -> Range:
    """Return the range from ``least`` to ``most``, both included. NaN is in no range."""
    return Range(
        lambda value: least <= value <= most,
        f"must be from {least:_} to {most:_}",
    )


def above(bound: float, most: float) -> Range:
    """Return the range above ``bound`` and up to ``most``. NaN is in no range."""
    return Range(
        lambda value: bound < value <= most,
        f"must be above {bound:_} and at most {most:_}",
    )


HEAD_DIM = Range(
    lambda value: 2 <= value <= 1 << 14 and value % 2 == 0,
    "must be even, because RoPE rotates its two halves, and from 2 to 16_384",
)


def key(default: Any, doc: str, allowed: Range | None = None) -> Any:
    """Declare a dataclass field that is a key of a recipe.

    Args:
        default: the value of an absent key. ``dataclasses.MISSING`` makes the key required.
        doc: the meaning of the key, in one line of ``composer3d check --schema``.
        allowed: the range of its values; None accepts every value of the field's type.
    """
    return field(default=default, metadata={"doc": doc, "range": allowed})
