"""Sizes from which on a step computes in parts. Proofs lower them (``verify.limits``)."""

from typing import NamedTuple


class PartLimits(NamedTuple):
    """The sizes.

    Attributes:
        elements_per_round: the most elements of matrices that a rank owns in one round, and that it
            sends or receives in one message, unless one matrix has more (``planner.matrices``).
        row: as many squares of gradients in host memory are added up in their own dtype
            (``parallel.grad_norm``).
        initial_weights: the most elements of a shard that are drawn at once, unless a row has more
            (``parallel.init``).
        band: the most queries in a tile at the edge of a window, or of a kernel that builds all
            scores (``parallel.context.tiles``).
    """

    elements_per_round: int
    row: int
    initial_weights: int
    band: int


JOB = PartLimits(elements_per_round=1 << 26, row=4096, initial_weights=1 << 20, band=256)
