"""Llama: the dense decoder of Touvron et al. 2023 (arXiv 2302.13971) and the Llama 3 herd (arXiv 2407.21783).

The model contract, which a user's own model may follow as well: a module with ``first``, ``blocks`` and ``last``.
Parameters keep one global name each whatever the layout: ``first.embed.weight``, ``blocks.7.attn.wq.weight``,
``last.head.weight``; of a tied pair the first counts. Qwen 2 and 3 and Mistral are the same code of another shape.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.layers import Block, Decoder, Seq
from composer3d.shape import IGNORE_INDEX, ModelShape


class First(nn.Module):
    """``first(tokens_BT, seq) -> h_BTC``: the embedding."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)

    def forward(self, tokens_BT: Tensor, seq: Seq) -> Tensor:
        return self.embed(tokens_BT)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The cross-entropy summed over labels that count, a scalar of float32 or wider; default of a head's seam.

    Sums of thousands of tokens do not fit bfloat16.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return F.cross_entropy(wide_NV, labels_N, reduction="sum", ignore_index=IGNORE_INDEX)


class Head(nn.Module):
    """``head(h_BTC, labels_BT) -> summed loss``: logits over the vocabulary, and their cross-entropy."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab, dim))
        # Parts that the tokens go through in, one after another. Of several, each makes its logits once more in
        # backward, so that there are never those of all tokens; see ``_InParts``.
        self.chunks = 1
        # The seam of tensor parallelism.
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight)

    def forward(self, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        h_NC, labels_N = h_BTC.flatten(0, 1), labels_BT.flatten()
        if self.chunks == 1:
            return self._loss(h_NC, self.weight, labels_N)
        return _InParts.apply(self._loss, self.chunks, h_NC, self.weight, labels_N)

    def _loss(self, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor) -> Tensor:
        return self.cross_entropy(F.linear(h_NC, weight_VC), labels_N)


class _InParts(torch.autograd.Function):
    """A loss summed over parts of the tokens, of which one at a time has its logits in memory.

    Backward makes the logits of each part again. It sums the weight's gradient over the parts in float32 or wider, and
    rounds the sum once: in bfloat16 each further part would lose what is less than a rounding of the sum so far. While
    it runs, that sum takes the memory of one weight in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[..., Tensor], chunks: int, h_NC: Tensor, weight_VC: Tensor, labels_N: Tensor
    ) -> Tensor:
        ctx.save_for_backward(h_NC, weight_VC, labels_N)
        ctx.loss_of, ctx.chunks = loss_of, chunks
        parts = zip(h_NC.chunk(chunks), labels_N.chunk(chunks), strict=True)
        return torch.stack([loss_of(h, weight_VC, labels) for h, labels in parts]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h_NC, weight_VC, labels_N = ctx.saved_tensors
        of_h, of_weight = ctx.needs_input_grad[2:4]
        grad_NC = torch.empty_like(h_NC)
        wide = torch.promote_types(weight_VC.dtype, torch.float32)
        grad_VC = torch.zeros_like(weight_VC, dtype=wide) if of_weight else None
        parts = (x.chunk(ctx.chunks) for x in (h_NC, labels_N, grad_NC))
        for h, labels, grad_h in zip(*parts, strict=True):
            with torch.enable_grad():
                leaves = h.detach().requires_grad_(), weight_VC.detach().requires_grad_(of_weight)
                loss = ctx.loss_of(leaves[0], leaves[1], labels)
            found = torch.autograd.grad(loss, leaves if of_weight else leaves[:1], grads[0])
            grad_h.copy_(found[0])
            if grad_VC is not None:
                grad_VC += found[1]
        whole_VC = None if grad_VC is None else grad_VC.to(weight_VC.dtype)
        return None, None, grad_NC if of_h else None, whole_VC, None


class Last(nn.Module):
    """``last(h_BTC, seq, labels_BT) -> loss``: final norm, head, and the cross-entropy summed over valid labels.

    It is a sum, not a mean, since only the whole job knows the count of valid tokens that it must be divided by.
    """

    def __init__(self, vocab: int, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = Head(vocab, dim)

    def logits(self, h_BTC: Tensor) -> Tensor:
        """(B, T, vocabulary), on one process."""
        return self.head.logits(self.norm(h_BTC))

    def forward(self, h_BTC: Tensor, seq: Seq, labels_BT: Tensor) -> Tensor:
        return self.head(self.norm(h_BTC), labels_BT)


class Llama(Decoder):
    """A Llama of one ``ModelShape``, built and left uninitialised where ``device`` says; "meta" allocates nothing.

    Called whole, it is one process's model: ``model(tokens_BT, labels_BT, positions_BT, documents_BT) -> summed loss``.
    """

    def __init__(self, shape: ModelShape, *, dtype: torch.dtype = torch.float32, device: str = "meta") -> None:
        super().__init__()
        self.shape = shape
        with torch.device(device):
            self.first = First(shape.vocab, shape.dim)
            self.blocks = nn.ModuleDict({str(i): Block(shape) for i in range(shape.n_layers)})
            self.last = Last(shape.vocab, shape.dim, shape.norm_eps)
        if shape.tied:
            self.last.head.weight = self.first.embed.weight
        self.to(dtype)

    def forward(
        self, tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        seq = Seq(positions_BT, documents_BT)
        h_BTC = self.first(tokens_BT, seq)
        for block in self.blocks.values():
            h_BTC = block(h_BTC, seq)
        return self.last(h_BTC, seq, labels_BT)
