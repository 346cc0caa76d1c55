"""Ranges of values, for the fields of shapes and of recipes. No torch here.

Every number has a lower and an upper bound. The upper bounds lie far beyond any real use. Without
them, a typing error or a malicious file could cost hours of enumeration or all memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The numbers that a key accepts, as data.

    Attributes:
        least: the least one.
        most: the largest one.
        is_above: whether ``least`` itself is left out.
        also: numbers outside that have a meaning of their own, such as 0 for "never".
    """

    least: float
    most: float
    is_above: bool = False
    also: tuple[float, ...] = ()

    def hold(self, value: float) -> bool:
        """Return whether the key accepts a number. NaN is in no bounds."""
        is_inside = self.least <= value <= self.most
        return (is_inside and not (self.is_above and value == self.least)) or value in self.also


class Range(NamedTuple):
    """The values that a key accepts.

    Attributes:
        accepts: returns whether a value is in the range. The value must not be None.
        requirement: the end of the error about a value outside the range: "must be from 1 to 8".
        bounds: those of a number; None for a value of another type. ``accepts`` may ask for more.
    """

    accepts: Callable[[Any], bool]
    requirement: str
    bounds: Bounds | None = None


MOST_LAYERS = 10_000  # published models have 126 at most
MOST_HEADS = 1 << 16
MOST_WIDTH = 1 << 20  # width of the residual stream; Llama 3 405B has 16,384
MOST_EXPERTS = 1 << 16
MOST_DEPTHS = 16  # tokens that are predicted beyond the next one; DeepSeek-V3 predicts 1
MOST_TOKENS = 1 << 27  # tokens in a sequence: 134 million
MOST_VOCAB = 1 << 24


def within_bounds(bounds: Bounds, requirement: str) -> Range:
    """Return the range of the numbers that ``bounds`` hold."""
    return Range(bounds.hold, requirement, bounds)


def between(least: float, most: float) -> Range:
    """Return the range from ``least`` to ``most``, both included. NaN is in no range."""
    return within_bounds(Bounds(least, most), f"must be from {least:_} to {most:_}")


def above(bound: float, most: float) -> Range:
    """Return the range above ``bound`` and up to ``most``. NaN is in no range."""
    bounds = Bounds(bound, most, is_above=True)
    return within_bounds(bounds, f"must be above {bound:_} and at most {most:_}")


_WIDTHS = Bounds(2, 1 << 14)
HEAD_DIM = Range(
    lambda value: _WIDTHS.hold(value) and value % 2 == 0,
    "must be even, because RoPE rotates its two halves, and from 2 to 16_384",
    _WIDTHS,
)


class InProof(NamedTuple):
    """How a proof keeps the value of a key when it makes a recipe small.

    Attributes:
        of: returns the value in a small recipe.
        gives_way: whether the remedy of a broken rule may change the value. A small mesh may lack
            the ranks that the value is about.
        without: why the value is left out of the proof, in words for its layout; "": it is not.
    """

    of: Callable[[Any], Any] = lambda value: value
    gives_way: bool = False
    without: str = ""


AS_IT_IS = InProof()
WHERE_LEGAL = InProof(gives_way=True)


def at_most(most: float) -> InProof:
    """Keep a value in a proof up to ``most``."""
    return InProof(lambda value: min(most, value))


def at_least(least: float) -> InProof:
    """Keep a value in a proof down to ``least``."""
    return InProof(lambda value: max(least, value))


def within(least: float, most: float) -> InProof:
    """Keep a value in a proof between ``least`` and ``most``."""
    return InProof(lambda value: min(most, max(least, value)))


def left_out(value: Any, reason: str) -> InProof:
    """Give the key ``value`` in every proof; ``reason`` completes "without KEY, "."""
    return InProof(lambda _: value, without=reason)


class Column(NamedTuple):
    """The column of a key in the covering matrix of proofs.

    Attributes:
        name: the name of the column.
        values: the values of the key that are proven, each by its name in the column. The first
            one stands in every layout that another value would not change.
    """

    name: str
    values: Mapping[str, Any]


def key(
    default: Any,
    doc: str,
    allowed: Range | None = None,
    *,
    words: str = "",
    in_proof: InProof = AS_IT_IS,
    column: Column | None = None,
    optional: bool = False,
) -> Any:
    """Declare a dataclass field that is a key of a recipe: all that is said of it is its row.

    Args:
        default: the value of an absent key. ``dataclasses.MISSING`` makes the key required.
        doc: the meaning of the key, in one line of ``composer3d check --schema``.
        allowed: the range of its values; None accepts every value of the field's type.
        words: how ``composer3d verify`` names a value that is not the default, in the layout that
            it has proven; ``{}`` stands for the value. "": it does not name the key.
        in_proof: how a proof keeps the value when it makes a recipe small.
        column: the values that the covering matrix proves with those of all other keys; None: the
            matrix has no column for this key alone.
        optional: whether a run that has the default instead trains the same model on the same mesh
            and batches. Where a rule refuses the value, ``composer3d import`` leaves it out.
    """
    return field(
        default=default,
        metadata={
            "doc": doc,
            "range": allowed,
            "words": words,
            "in_proof": in_proof,
            "column": column,
            "optional": optional,
        },
    )
