"""The vocabulary cut over tp: which rows a rank holds, the loss of logits that stay cut, and the loss in parts.

Shoeybi et al. 2019 (arXiv 1909.08053), section 3. A rank's rows are a chunk of ceil(vocabulary / tp); where that does
not come out even the last ranks hold fewer. Nothing is padded.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.errors import PlanError
from composer3d.parallel.plan import Plan
from composer3d.shape import IGNORE_INDEX


def own_rows(vocab: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """The first of this rank's rows, and how many they are."""
    chunk = -(-vocab // group.size())
    if chunk * (group.size() - 1) >= vocab:
        raise PlanError(
            f"{vocab} rows of a vocabulary leave the last of {group.size()} tp ranks none; use a lower mesh.tp"
        )
    first = group.rank() * chunk
    return first, min(chunk, vocab - first)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor, *, first: int, group: dist.ProcessGroup) -> Tensor:
    """The summed cross-entropy of logits whose columns are cut over ``group``: float32 or wider, alike on all ranks.

    Args:
        logits_NV: this rank's columns of the logits.
        labels_N: of the whole vocabulary, or ``IGNORE_INDEX``.
        first: the label of this rank's first column.

    Collectives: forward an all-reduce of N maxima, then one of 2 N numbers (sums of exponentials, logits of the
    labels), in float32 or wider; backward none, since each rank's gradient is of its own columns.
    """
    return _CrossEntropy.apply(logits_NV, labels_N, first, group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        top_N = wide_NV.amax(-1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
        wide_NV = wide_NV - top_N[:, None]
        column_N, mine_N, counts_N = labels_N - first, _within(labels_N, first, logits_NV), labels_N != IGNORE_INDEX
        target_N = wide_NV.gather(1, column_N.masked_fill(~mine_N, 0)[:, None])[:, 0].masked_fill(~mine_N, 0)
        both = torch.stack((wide_NV.exp_().sum(-1), target_N))
        dist.all_reduce(both, group=group)
        log_sum_N = both[0].log()
        # The logits as they came, not the wide ones: backward makes the softmax of them again.
        ctx.save_for_backward(logits_NV, labels_N, top_N + log_sum_N)
        ctx.first = first
        return (log_sum_N - both[1]).masked_fill(~counts_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, labels_N, log_sum_N = ctx.saved_tensors
        mine_N = _within(labels_N, ctx.first, logits_NV)
        grad_NV = (logits_NV.to(log_sum_N.dtype) - log_sum_N[:, None]).exp_()
        column_N1 = (labels_N - ctx.first).masked_fill(~mine_N, 0)[:, None]
        grad_NV.scatter_add_(1, column_N1, -mine_N[:, None].to(grad_NV.dtype))
        grad_NV *= grads[0]
        return grad_NV.masked_fill_((labels_N == IGNORE_INDEX)[:, None], 0).to(logits_NV.dtype), None, None, None


def _within(labels_N: Tensor, first: int, logits_NV: Tensor) -> Tensor:
    return (labels_N >= first) & (labels_N < first + logits_NV.shape[1])


def loss_in_parts(model: nn.Module, plan: Plan, chunks: int) -> None:
    """Let the heads of ``model`` go through the tokens of a micro-batch in ``chunks`` parts.

    Only one part's logits are alive at a time: backward makes them again, and what ``cross_entropy`` sends with them.
    The gradient of the head's weight is summed over parts in float32 or wider, in memory that backward takes for it.

    Raises:
        PlanError: the model has no head that takes parts.
    """
    if chunks == 1:
        return
    heads = [module for name, module in model.named_modules() if plan.style_of(name) == "head"]
    if not heads or not all(hasattr(head, "chunks") for head in heads):
        raise PlanError(f"{type(model).__name__} has no head with `chunks`; use memory.loss_chunks = 1, not {chunks}")
    for head in heads:
        head.chunks = chunks
