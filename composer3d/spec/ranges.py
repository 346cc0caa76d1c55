"""Ranges of values, for the fields of shapes and of recipes. No torch here.

Every number has a lower and an upper bound. The upper bounds lie far beyond any real use: they keep
a typing error, or a file made to harm, from costing hours of enumeration or all memory.
"""

from collections.abc import Callable
from dataclasses import field
from typing import Any

# A test of one value that is not None, and the text of an error about a value that fails it.
Range = tuple[Callable[[Any], bool], str]

MOST_LAYERS = 10_000  # published models have 126 at most
MOST_HEADS = 1 << 16
MOST_WIDTH = 1 << 20  # of the residual stream; Llama 3 405B has 16,384
MOST_TOKENS = 1 << 27  # of a sequence: 134 million
MOST_VOCAB = 1 << 24


def between(least: float, most: float) -> Range:
    """Accept values from ``least`` to ``most``, both included. NaN is in no range."""
    return lambda value: least <= value <= most, f"must be from {least:_} to {most:_}"


def above(bound: float, most: float) -> Range:
    """Accept values above ``bound`` and up to ``most``. NaN is in no range."""
    return lambda value: bound < value <= most, f"must be above {bound:_} and at most {most:_}"


HEAD_DIM: Range = (
    lambda value: 2 <= value <= 1 << 14 and value % 2 == 0,
    "must be even, because RoPE rotates its two halves, and from 2 to 16_384",
)


def key(default: Any, doc: str, allowed: Range | None = None) -> Any:
    """Declare a dataclass field that is a key of a recipe.

    ``doc`` is its line in ``composer3d check --schema``; ``allowed`` is the range of its values.
    """
    return field(default=default, metadata={"doc": doc, "range": allowed})
