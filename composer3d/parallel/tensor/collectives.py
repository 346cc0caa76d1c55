"""The collectives of tensor parallelism, each with its transpose as backward.

n is the number of tp ranks. Ranks hold parts along ``CUT_DIM``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composer3d.parallel.tensor.vocab import own_rows

CUT_DIM = 1  # the sequence of (B, T, C), or the columns of (N, V)
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gather_sequence(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the whole sequence from the ranks' consecutive shards: (B, T / n, C) to (B, T, C).

    Backward sums the ranks' gradients and keeps this rank's shard. A rank sends (n - 1) shards in
    forward, and as many in backward.
    """
    return _WithTranspose.apply(x_BTC, group, _all_gather, _reduce_scatter)


def scatter_sum(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x_BTC`` over the ranks and keep this rank's shard of the sequence: (B, T / n, C).

    Backward gathers the gradients. This is the transpose of ``gather_sequence``.
    """
    return _WithTranspose.apply(x_BTC, group, _reduce_scatter, _all_gather)


def sum_gradients(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x_BTC``, equal on all ranks. Backward sums the gradients (Megatron-LM's f)."""
    return _WithTranspose.apply(x_BTC, group, _identity, _all_reduce)


def sum_outputs(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x_BTC`` over the ranks. Backward returns the gradient as it is (Megatron-LM's g)."""
    return _WithTranspose.apply(x_BTC, group, _all_reduce, _identity)


def mean_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of the ranks' ``x``, of any shape. Each rank uses it for other heads.

    So its gradient on a rank is a part of a sum. Backward takes the mean of the parts, which is the
    transpose of the mean. Forward and backward have one all-reduce of ``x`` each.
    """
    return _WithTranspose.apply(x, group, _all_reduce, _all_reduce) / group.size()


def gather_columns(x_NV: Tensor, columns: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' columns: (N, this rank's columns) to (N, ``columns``).

    A rank sends (n - 1) chunks. The last chunk is padded to the size of the others. All ranks must
    compute the same with the result: then each has its gradient, and backward sends nothing.
    """
    _, own_columns = own_rows(columns, group)
    chunk = -(-columns // group.size())
    padded_NV = F.pad(x_NV, (0, chunk - own_columns))
    return _WithTranspose.apply(padded_NV, group, _all_gather, _own_chunk)[:, :columns]


def no_collective(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``, of any shape, unchanged."""
    return x


class _WithTranspose(torch.autograd.Function):
    """A collective whose backward is another collective, its transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        collective: Collective,
        transpose: Collective,
    ) -> Tensor:
        ctx.group, ctx.transpose = group, transpose
        return collective(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.transpose(grads[0], ctx.group), None, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    by_rank = x.new_empty((group.size(), *x.shape))  # (n, B, T / n, C)
    dist.all_gather_single(by_rank.flatten(0, 1), x.contiguous(), group=group)
    return by_rank.movedim(0, CUT_DIM).flatten(CUT_DIM, CUT_DIM + 1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    by_rank = x.unflatten(CUT_DIM, (group.size(), -1)).movedim(CUT_DIM, 0).contiguous()
    out = x.new_empty(by_rank.shape[1:])
    dist.reduce_scatter_single(out, by_rank.flatten(0, 1), group=group)
    return out


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _identity(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # An autograd function must not return its input itself, so this is a view of it.
    return x.view_as(x)


def _own_chunk(x_NV: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x_NV.chunk(group.size(), CUT_DIM)[group.rank()]
