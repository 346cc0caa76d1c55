"""The vocabulary cut over tp: a rank's rows, and the loss of logits that stay cut.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. A rank holds ceil(vocabulary / tp) rows; if tp
does not divide the vocabulary, the last rank holds fewer. No parameter is padded.

Shapes: N tokens of a micro-batch, V columns of the logits that this rank holds.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.facts.errors import PlanError
from composer3d.models.contract import IGNORE_INDEX


class OwnRows(NamedTuple):
    """Consecutive rows of the vocabulary."""

    first: int
    length: int


def own_rows(vocab: int, group: dist.ProcessGroup) -> OwnRows:
    """Return this rank's rows of a vocabulary of ``vocab`` rows.

    Raises PlanError if the last rank would have none.
    """
    chunk = -(-vocab // group.size())
    if chunk * (group.size() - 1) >= vocab:
        raise PlanError(
            f"a vocabulary of {vocab} rows leaves no row for the last of {group.size()} tp ranks; "
            "use a lower mesh.tp"
        )
    first = group.rank() * chunk
    return OwnRows(first, min(chunk, vocab - first))


def cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, *, first: int, group: dist.ProcessGroup
) -> Tensor:
    """Sum the cross-entropy of logits whose columns are cut over ``group``.

    Args:
        logits_NV: this rank's columns of the logits.
        labels_N: int64, counted over the whole vocabulary; or ``IGNORE_INDEX``.
        first: the label of this rank's first column.
        group: the tp ranks.

    Returns:
        A scalar in float32 or wider, the same on all ranks.

    Collectives: forward has an all-reduce of N maxima, and one of 2 N numbers: the sums of
    exponentials and the logits of the labels. Both are in float32 or wider. Backward has none: each
    rank computes the gradient of its own columns.
    """
    return _CrossEntropy.apply(logits_NV, labels_N, first, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        max_N = wide_NV.amax(-1)
        dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
        shifted_NV = wide_NV - max_N[:, None]

        is_own_N = _is_own(labels_N, first, logits_NV)
        column_N = (labels_N - first).masked_fill(~is_own_N, 0)
        target_N = shifted_NV.gather(1, column_N[:, None])[:, 0].masked_fill(~is_own_N, 0)
        exp_NV = shifted_NV.exp_()  # in place: the logits of the labels have been taken out
        sums_2N = torch.stack((exp_NV.sum(-1), target_N))
        dist.all_reduce(sums_2N, group=group)
        shifted_lse_N, target_N = sums_2N[0].log(), sums_2N[1]

        # The logits are saved in their own dtype, which takes less memory than the wide softmax.
        # Backward computes the softmax again.
        ctx.save_for_backward(logits_NV, labels_N, max_N + shifted_lse_N)
        ctx.first = first
        return (shifted_lse_N - target_N).masked_fill(labels_N == IGNORE_INDEX, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, labels_N, lse_N = ctx.saved_tensors
        is_own_N = _is_own(labels_N, ctx.first, logits_NV)
        grad_NV = (logits_NV.to(lse_N.dtype) - lse_N[:, None]).exp_()
        column_N1 = (labels_N - ctx.first).masked_fill(~is_own_N, 0)[:, None]
        grad_NV.scatter_add_(1, column_N1, -is_own_N[:, None].to(grad_NV.dtype))
        grad_NV *= grads[0]
        grad_NV.masked_fill_((labels_N == IGNORE_INDEX)[:, None], 0)
        return grad_NV.to(logits_NV.dtype), None, None, None


def _is_own(labels_N: Tensor, first: int, logits_NV: Tensor) -> Tensor:
    return (labels_N >= first) & (labels_N < first + logits_NV.shape[1])
