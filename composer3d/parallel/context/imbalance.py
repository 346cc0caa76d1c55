"""How evenly a cut of the sequence spreads attention over context parallel ranks, for metrics."""

from collections.abc import Mapping

import torch
from torch import Tensor

from composer3d.data.loader import number_documents
from composer3d.parallel.context.ownership import parts_of_all_ranks


def attention_imbalance(
    documents_BT: Tensor, size: int, *, balanced: bool, windows: Mapping[int, int]
) -> float:
    """Measure how unevenly packed documents spread attention over ``size`` ranks. No collective.

    Args:
        documents_BT: int64 (B, T): the documents of whole rows.
        size: the number of context parallel ranks.
        balanced: as in ``shard_sequence``.
        windows: the number of blocks of each window, the most keys that a query sees; 0: it sees
            all before it.

    Returns:
        The number of attention scores of the busiest rank in all blocks, divided by the mean over
        the ranks; 1 at best.
    """
    _, position_BT = number_documents(documents_BT != documents_BT.roll(-1, 1))
    visible_keys_BT = torch.zeros_like(position_BT)
    for window, blocks in windows.items():
        visible_keys_BT += blocks * (position_BT + 1).clamp(1, window or None)
    scores = parts_of_all_ranks(visible_keys_BT, 1, size, balanced).sum((1, 2)).tolist()
    return max(scores) * size / sum(scores)
