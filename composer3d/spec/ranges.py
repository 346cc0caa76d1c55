"""Ranges of values, for the fields of shapes and of recipes. No torch here.

Every number has a lower and an upper bound. The upper bounds lie far beyond any real use: they keep
a typing error, or a file made to harm, from costing hours of enumeration or all memory.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The values that a key accepts.

    Attributes:
        accepts: whether a value, which is not None, is in the range.
        requirement: the end of the error about a value that is not: "must be from 1 to 8".
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
    """Accept values from ``least`` to ``most``, both included. NaN is in no range."""
    return Range(
        lambda value: least <= value <= most,
        f"must be from {least:_} to {most:_}",
    )


def above(bound: float, most: float) -> Range:
    """Accept values above ``bound`` and up to ``most``. NaN is in no range."""
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

    ``doc`` is its line in ``composer3d check --schema``; ``allowed`` is the range of its values.
    """
    return field(default=default, metadata={"doc": doc, "range": allowed})
