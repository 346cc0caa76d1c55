"""The exchange of tokens between the ranks that share the experts: two all-to-alls of rows.

Lepikhin et al. 2020 (GShard, arXiv 2006.16668), without a capacity: each rank sends exactly the
rows that the other's experts compute. Ranks that all hold the same tokens send none, and sum what
each has computed.

Shapes: M rows on this rank, in the order of all E experts; ep ranks with L = E / ep experts each; R
rows for the experts of this rank; C model width.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.moe import (
    Exchange,
    Exchanged,
    ExchangeRows,
    inverse_of,
    permute_rows,
)
from composer3d.runtime.host_copy import HostCopy
from composer3d.runtime.torch_private import group_by_name


def exchange_over(group: dist.ProcessGroup) -> Exchange:
    """Make the function for the seam ``exchange`` of experts on the ranks of ``group``.

    Collectives of a call: an all-to-all of E numbers of rows, which go to the host. With the rows,
    the host waits for these numbers; then an all-to-all of rows, and one of outputs. Each sends C
    elements for every row of this rank that goes to an expert of another rank, and backward sends
    the same bytes in the other direction. A checkpointed layer that runs again has the numbers.
    The operators ``composer3d::exchange_*`` can be saved by selective activation checkpointing.
    """
    name, size = group.group_name, group.size()

    def exchange(tokens_E: Tensor, seq: SequenceInfo) -> ExchangeRows:
        # Each layer has an ``exchange`` of its own. When it runs again, all ranks skip this alike.
        key = (exchange, "rows")
        if key not in seq.kept:
            seq.kept[key] = _Rows(tokens_E, exchange_counts(tokens_E, name), size)
        return partial(exchange_with, rows=seq.kept[key])

    def exchange_with(rows_MC: Tensor, rows: _Rows) -> Exchanged:
        sent, arriving = rows.by_rank()
        rows_RC = exchange_rows(rows_MC, sent, arriving, name)
        # Rows arrive by source rank, and by expert within it; experts need the rows of all ranks.
        # The order is computed on the device: a copy of it would wait for all that runs there.
        cell_R = torch.repeat_interleave(rows.arriving_E, output_size=sum(arriving))
        own_experts = len(rows.arriving_E) // size
        order_R = (cell_R % own_experts).argsort(stable=True)
        place_R = inverse_of(order_R)

        def send_back(out_RC: Tensor) -> Tensor:
            by_rank_RC = permute_rows(out_RC, place_R, order_R)
            return exchange_rows(by_rank_RC, arriving, sent, name)

        tokens_L = rows.arriving_E.unflatten(0, (size, -1)).sum(0)
        return Exchanged(permute_rows(rows_RC, order_R, place_R), tokens_L, send_back)

    return exchange


class _Rows:
    """The numbers of rows that a layer exchanges for a micro-batch.

    Args:
        tokens_E: the rows that this rank sends to each expert.
        arriving_E: those that arrive: by source rank, and by expert of this rank.
        size: the number of ranks.
    """

    def __init__(self, tokens_E: Tensor, arriving_E: Tensor, size: int) -> None:
        self.arriving_E = arriving_E
        self._size = size
        self._copy = HostCopy(torch.stack((tokens_E, arriving_E)))
        self._by_rank: list[list[int]] | None = None

    def by_rank(self) -> list[list[int]]:
        """The rows that this rank sends to each rank, and gets from each. Waits the first time."""
        if self._by_rank is None:
            self._by_rank = self._copy.read().unflatten(1, (self._size, -1)).sum(2).tolist()
        return self._by_rank


def sum_over(group: dist.ProcessGroup) -> Exchange:
    """Make the function for the seam ``exchange`` of ranks that all hold the same tokens.

    A rank computes the rows of its own experts, and the outputs of all ranks are added up. Each row
    has one output that is not zero, so the sum has the bits of one process.

    Collective of a call: an all-reduce of the outputs (M, C). There is no backward.
    """
    rank, size = group.rank(), group.size()

    def exchange(tokens_E: Tensor, _: SequenceInfo) -> ExchangeRows:
        return partial(exchange_with, tokens_E=tokens_E)

    def exchange_with(rows_MC: Tensor, tokens_E: Tensor) -> Exchanged:
        tokens_by_rank = tokens_E.unflatten(0, (size, -1))
        ends = tokens_by_rank.sum(1).cumsum(0).tolist()
        own = slice(ends[rank - 1] if rank else 0, ends[rank])

        def send_back(out_RC: Tensor) -> Tensor:
            out_MC = out_RC.new_zeros(rows_MC.shape)
            out_MC[own] = out_RC
            dist.all_reduce(out_MC, group=group)
            return out_MC

        return Exchanged(rows_MC[own], tokens_by_rank[rank], send_back)

    return exchange


@torch.library.custom_op("composer3d::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group_name: str) -> Tensor:
    """All-to-all of equal parts: part r of this rank goes to rank r, as its part ``this rank``."""
    out = torch.empty_like(counts)
    dist.all_to_all_single(out, counts.contiguous(), group=group_by_name(group_name))
    return out


@torch.library.custom_op("composer3d::exchange_rows", mutates_args=())
def exchange_rows(
    rows: Tensor, sent: Sequence[int], arriving: Sequence[int], group_name: str
) -> Tensor:
    """All-to-all of rows: the first ``sent[0]`` go to rank 0, and so on.

    Returns the rows of all ranks in the order of the ranks: ``arriving[r]`` come from rank r.
    Backward sends the gradients back.
    """
    out = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows.contiguous(), list(arriving), list(sent), group=group_by_name(group_name)
    )
    return out


@torch.library.custom_op("composer3d::sum_counts", mutates_args=())
def sum_counts(counts: Tensor, group_name: str) -> Tensor:
    """Sum integers over the ranks of a group. They have no gradient."""
    out = counts.clone()
    dist.all_reduce(out, group=group_by_name(group_name))
    return out


@exchange_counts.register_fake
def _(counts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(counts)


@sum_counts.register_fake
def _(counts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(counts)


@exchange_rows.register_fake
def _(rows: Tensor, sent: Sequence[int], arriving: Sequence[int], group_name: str) -> Tensor:
    return rows.new_empty((sum(arriving), *rows.shape[1:]))


def _save_settings(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.sent, ctx.arriving, ctx.group_name = inputs


def _send_gradients_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_rows(grad, ctx.arriving, ctx.sent, ctx.group_name), None, None, None


exchange_rows.register_autograd(_send_gradients_back, setup_context=_save_settings)
