"""The units of FSDP: what is gathered and reduced at once. No torch here."""

from collections.abc import Sequence
from typing import Any, TypeVar

S = TypeVar("S", bound=Sequence[Any])


def units_of_blocks(blocks: S, size: int) -> list[S]:
    """Cut the blocks of a stage into units of ``size`` (``parallel.fsdp_blocks``).

    The last unit may be smaller. The embedding and the head are units of their own.

    Args:
        blocks: in their order: the blocks, their numbers (a range), or what belongs to each.
        size: at least 1.
    """
    begins = range(0, len(blocks), size)
    return [blocks[begin : begin + size] for begin in begins]  # type: ignore[misc]
