"""How evenly a cut of the sequence spreads attention over context parallel ranks, for metrics."""

from collections.abc import Mapping

from torch import Tensor

from composer3d.data.loader import number_documents
from composer3d.parallel.context.ownership import parts_of_all_ranks


def attention_imbalance(
    documents_BT: Tensor,
    size: int,
    *,
    balanced: bool,
    windows: Mapping[int, int],
    micro_batch: int,
) -> float:
    """Measure how unevenly packed documents spread attention over ``size`` ranks. No collective.

    In each block, and for each micro-batch, all ranks wait for the busiest one.

    Args:
        documents_BT: int64 (B, T): the documents of whole rows.
        size: the number of context parallel ranks.
        balanced: as in ``shard_sequence``.
        windows: the number of blocks of each window, the most keys that a query sees; 0: it sees
            all before it.
        micro_batch: the rows of a micro-batch.

    Returns:
        The attention scores of the busiest rank of each block and micro-batch, summed over these,
        divided by the mean over the ranks of all scores; 1 at best.
    """
    _, position_BT = number_documents(documents_BT != documents_BT.roll(-1, 1))
    busiest = everything = 0
    for window, blocks in windows.items():
        visible_keys_BT = (position_BT + 1).clamp(1, window or None)
        parts = parts_of_all_ranks(visible_keys_BT, 1, size, balanced)
        by_rank_and_micro_batch = parts.unflatten(1, (-1, micro_batch)).sum((2, 3))
        busiest += blocks * int(by_rank_and_micro_batch.amax(0).sum())
        everything += blocks * int(visible_keys_BT.sum())
    return busiest * size / everything
