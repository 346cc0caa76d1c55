"""The units of FSDP: what is gathered and reduced at once. No torch here."""

from collections.abc import Sequence
from typing import Any, TypeVar

S = TypeVar("S", bound=Sequence[Any])


def units_of_blocks(blocks: S, size: int, alone: int = 0) -> list[S]:
    """Cut the blocks of a stage into units of ``size`` (``parallel.fsdp_blocks``).

    The last unit may be smaller. The embedding and the head are units of their own.

    Args:
        blocks: in their order: the blocks, their numbers (a range), or what belongs to each.
        size: at least 1.
        alone: so many blocks at the end are a unit each: those of multi-token prediction.
    """
    together = len(blocks) - alone
    ranges = [(begin, min(begin + size, together)) for begin in range(0, together, size)]
    ranges += [(block, block + 1) for block in range(together, len(blocks))]
    return [blocks[begin:end] for begin, end in ranges]  # type: ignore[misc]
