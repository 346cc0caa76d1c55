"""The head: logits over the vocabulary and the summed cross-entropy, whole or in parts.

Shapes: N tokens of a micro-batch (B x T), V vocabulary, C model width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.contract import IGNORE_INDEX


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Sum the cross-entropy over all labels but ``IGNORE_INDEX``.

    This is the default of the head's seam ``cross_entropy``. The result is a scalar in float32 or
    wider, because bfloat16 cannot hold a sum over thousands of tokens.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide_NV, labels_N, reduction="sum", ignore_index=IGNORE_INDEX)


class Head(nn.Module):
    """The head: ``head(h_BTC, labels_BT)`` returns the summed loss, a scalar in float32 or wider.

    Attributes:
        weight: (V, C).
        chunks: the number of parts into which the tokens are cut. Only one part's logits are in
            memory at a time (see ``_LossInParts``).
        cross_entropy: computes the summed loss from (logits_NV, labels_N). It is the seam that
            tensor parallelism replaces.
    """

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab, dim))
        self.chunks = 1
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def logits(self, h: Tensor) -> Tensor:
        """Compute the logits (..., V) of ``h`` (..., C) on one process."""
        return F.linear(h, self.weight)

    def forward(self, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        h_NC, labels_N = h_BTC.flatten(0, 1), labels_BT.flatten()
        if self.chunks == 1:
            return self._loss(h_NC, self.weight, labels_N)
        return _LossInParts.apply(self._loss, self.chunks, h_NC, self.weight, labels_N)

    def _loss(self, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor) -> Tensor:
        return self.cross_entropy(F.linear(h_NC, weight_VC), labels_N)


class _LossInParts(torch.autograd.Function):
    """A loss summed over parts of the tokens. Only one part's logits are in memory at a time.

    Backward computes the logits of each part again. It sums the gradient of the weight over the
    parts in float32 or wider, and rounds the sum once at the end: a sum in bfloat16 would lose the
    small contributions of single parts. During backward, the sum takes as much memory as the
    weight in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., Tensor],
        chunks: int,
        h_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(h_NC, weight_VC, labels_N)
        ctx.loss_of, ctx.chunks = loss_of, chunks
        parts = zip(h_NC.chunk(chunks), labels_N.chunk(chunks), strict=True)
        return torch.stack([loss_of(h, weight_VC, labels) for h, labels in parts]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h_NC, weight_VC, labels_N = ctx.saved_tensors
        needs_h, needs_weight = ctx.needs_input_grad[2:4]
        grad_NC = torch.empty_like(h_NC)
        wide = torch.promote_types(weight_VC.dtype, torch.float32)
        sum_VC = torch.zeros_like(weight_VC, dtype=wide) if needs_weight else None

        parts = (x.chunk(ctx.chunks) for x in (h_NC, labels_N, grad_NC))
        for h, labels, grad_h in zip(*parts, strict=True):
            with torch.enable_grad():
                h_leaf = h.detach().requires_grad_()
                weight_leaf = weight_VC.detach().requires_grad_(needs_weight)
                loss = ctx.loss_of(h_leaf, weight_leaf, labels)
            leaves = (h_leaf, weight_leaf) if needs_weight else (h_leaf,)
            part_grads = torch.autograd.grad(loss, leaves, grads[0])
            grad_h.copy_(part_grads[0])
            if sum_VC is not None:
                sum_VC += part_grads[1]
            del loss, part_grads  # before the next part allocates its own

        grad_VC = None if sum_VC is None else sum_VC.to(weight_VC.dtype)
        return None, None, grad_NC if needs_h else None, grad_VC, None
