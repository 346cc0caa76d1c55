"""The Granite 3 decoder: a Llama with four multipliers (IBM 2024, Granite 3.0 Language Models).

They are those of muP (Yang et al. 2022, arXiv 2203.03466): with them, rates of learning that were
found on a narrow model serve a wide one. The names are those of ``models.llama``.
"""

import torch
from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.granite.shape import GraniteShape
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import First, Last, RotaryDecoder


class _GraniteFirst(First):
    """``first(tokens_BT, seq) -> h_BTC``: the embedding, times its multiplier."""

    def __init__(self, shape: GraniteShape) -> None:
        super().__init__(shape)
        self.multiplier = shape.embedding_multiplier

    def forward(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        return super().forward(tokens_BT, seq) * self.multiplier


class GraniteBlock(DecoderBlock):
    """One pre-norm decoder block whose layers count by a multiplier: ``block(h_BTC, seq)``."""

    def __init__(self, shape: GraniteShape, rope: Rope) -> None:
        super().__init__()
        self.multiplier = shape.residual_multiplier
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attn = Attention(
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rope=rope,
            query_scale=shape.query_scale,
        )
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape.dim, shape.ffn)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        self.attn.prepare(seq, dtype)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq) * self.multiplier
        return h_BTC + self.ffn(self.ffn_norm(h_BTC)) * self.multiplier


class _GraniteLast(Last):
    """``last(h_BTC, seq, labels_BT) -> loss``, with logits divided by ``logits_scaling``.

    The head is linear, so its input is divided, which has fewer numbers.
    """

    def __init__(self, shape: GraniteShape) -> None:
        super().__init__(shape)
        self.logits_scaling = shape.logits_scaling

    def logits(self, h_BTC: Tensor) -> Tensor:
        return self.head.logits(self.norm(h_BTC) / self.logits_scaling)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo, labels_BT: Tensor) -> Tensor:
        return self.head(self.norm(h_BTC) / self.logits_scaling, labels_BT)


class Granite(RotaryDecoder):
    """A Granite 3 of one ``GraniteShape``. ``RotaryDecoder`` documents its arguments."""

    shape: GraniteShape
    first_class = _GraniteFirst
    last_class = _GraniteLast

    def make_block(self, layer: int, rope: Rope) -> GraniteBlock:
        """Build a block by its number. All are alike."""
        return GraniteBlock(self.shape, rope)
