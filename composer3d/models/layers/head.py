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
        keeps_gradients: whether the parts compute their gradients with the loss, in forward.
        cross_entropy: computes the summed loss from (logits_NV, labels_N). It is the seam that
            tensor parallelism replaces.
    """

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab, dim))
        self.chunks, self.keeps_gradients = 1, False
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def logits(self, h: Tensor) -> Tensor:
        """Compute the logits (..., V) of ``h`` (..., C) on one process."""
        return F.linear(h, self.weight)

    def forward(self, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        h_NC, labels_N = h_BTC.flatten(0, 1), labels_BT.flatten()
        if self.chunks == 1:
            return self._loss(h_NC, self.weight, labels_N)
        at_once = self.keeps_gradients and torch.is_grad_enabled()
        return _LossInParts.apply(self._loss, self.chunks, at_once, h_NC, self.weight, labels_N)

    def _loss(self, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor) -> Tensor:
        return self.cross_entropy(F.linear(h_NC, weight_VC), labels_N)


class _LossInParts(torch.autograd.Function):
    """A loss summed over parts of the tokens. Only one part's logits are in memory at a time.

    The gradients of a part need its logits, too. There are two ways to have them:

    - at once: forward computes each part's gradients of a loss whose own gradient is 1, and
      backward multiplies them by its gradient. From forward to backward they take as much memory
      as the input, and as the weight in float32.
    - later: backward computes the logits of each part again. Micro-batches that wait for their
      backward then keep nothing but the input.

    The gradient of the weight is summed over the parts in float32 or wider, and rounded once at
    the end: a sum in bfloat16 would lose the small contributions of single parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., Tensor],
        chunks: int,
        at_once: bool,
        h_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        ctx.at_once, ctx.dtype = at_once, weight_VC.dtype
        if at_once:
            parts = _Parts(loss_of, chunks, needs_weight=ctx.needs_input_grad[4])
            loss, *ctx.gradients = parts.gradients(h_NC, weight_VC, labels_N, None)
            return loss
        ctx.save_for_backward(h_NC, weight_VC, labels_N)
        ctx.parts = _Parts(loss_of, chunks, needs_weight=ctx.needs_input_grad[4])
        return ctx.parts.loss(h_NC, weight_VC, labels_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.at_once:
            # They are multiplied in their own memory, so this works once.
            grad_NC, sum_VC = ctx.gradients
            del ctx.gradients
            grad_NC *= grads[0]
            if sum_VC is not None:
                sum_VC *= grads[0]
        else:
            _, grad_NC, sum_VC = ctx.parts.gradients(*ctx.saved_tensors, grads[0])
        grad_VC = None if sum_VC is None else sum_VC.to(ctx.dtype)
        return None, None, None, grad_NC if ctx.needs_input_grad[3] else None, grad_VC, None


class _Parts:
    """Computes with the tokens in parts.

    Args:
        loss_of: the summed loss of hidden states, weight and labels.
        chunks: the number of parts.
        needs_weight: whether the weight trains.
    """

    def __init__(self, loss_of: Callable[..., Tensor], chunks: int, *, needs_weight: bool) -> None:
        self._loss_of, self._chunks, self._needs_weight = loss_of, chunks, needs_weight

    def loss(self, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor) -> Tensor:
        """Return the loss, without gradients."""
        parts = zip(h_NC.chunk(self._chunks), labels_N.chunk(self._chunks), strict=True)
        return torch.stack([self._loss_of(h, weight_VC, labels) for h, labels in parts]).sum()

    def gradients(
        self, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, grad: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the loss, the gradient of ``h_NC``, and that of the weight in float32 or wider.

        Args:
            h_NC, weight_VC, labels_N: see the top of this file.
            grad: the gradient of the loss; None: 1.
        """
        grad_NC = torch.empty_like(h_NC)
        wide = torch.promote_types(weight_VC.dtype, torch.float32)
        sum_VC = torch.zeros_like(weight_VC, dtype=wide) if self._needs_weight else None
        losses = []
        parts = (x.chunk(self._chunks) for x in (h_NC, labels_N, grad_NC))
        for h, labels, grad_h in zip(*parts, strict=True):
            with torch.enable_grad():
                h_leaf = h.detach().requires_grad_()
                weight_leaf = weight_VC.detach().requires_grad_(self._needs_weight)
                loss = self._loss_of(h_leaf, weight_leaf, labels)
            leaves = (h_leaf, weight_leaf) if self._needs_weight else (h_leaf,)
            part_grads = torch.autograd.grad(loss, leaves, grad)
            grad_h.copy_(part_grads[0])
            if sum_VC is not None:
                sum_VC += part_grads[1]
            losses.append(loss.detach())
            del loss, part_grads  # before the next part allocates its own
        return torch.stack(losses).sum(), grad_NC, sum_VC
