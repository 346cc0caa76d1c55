"""Llama: the dense decoder of Touvron et al. 2023 (arXiv 2302.13971) and the Llama 3 herd (arXiv 2407.21783).

The model contract, which a user's own model may follow as well: a module with ``first``, ``blocks`` and ``last``.
Parameters keep one global name each whatever the layout: ``first.embed.weight``, ``blocks.7.attn.wq.weight``,
``last.head.weight``; of a tied pair the first counts. Qwen 2 and 3 and Mistral are the same code of another shape.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
        # backward, so that there are never those of all tokens.
        self.chunks = 1
        # The seam of tensor parallelism.
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight)

    def forward(self, h_BTC: Tensor, labels_BT: Tensor) -> Tensor:
        h_NC, labels_N = h_BTC.flatten(0, 1), labels_BT.flatten()
        if self.chunks == 1:
            return self._loss(h_NC, labels_N)
        losses = [
            # preserve_rng_state: no random numbers are drawn here.
            checkpoint(self._loss, h, labels, use_reentrant=False, preserve_rng_state=False)
            for h, labels in zip(h_NC.chunk(self.chunks), labels_N.chunk(self.chunks), strict=True)
        ]
        return torch.stack(losses).sum()

    def _loss(self, h_NC: Tensor, labels_N: Tensor) -> Tensor:
        return self.cross_entropy(self.logits(h_NC), labels_N)


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
