"""The OLMo 2 decoder: 2 OLMo 2 Furious (arXiv 2501.00656); and OLMo 3 (arXiv 2512.13961).

An OLMo 3 has windows in most blocks, and stretches positions only in the others.

The names are those of ``models.llama``. ``blocks.7.attn.q_norm.weight`` has a number for each
element of all heads together.
"""

import torch
from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import RotaryDecoder
from composer3d.models.olmo2.shape import Olmo2Shape


class HeadsNorm(nn.RMSNorm):
    """RMSNorm of each token over all its heads together: ``norm(x_BTHD) -> x_BTHD``."""

    def forward(self, x_BTHD: Tensor) -> Tensor:
        return super().forward(x_BTHD.flatten(-2)).unflatten(-1, x_BTHD.shape[-2:])


class _Olmo2Attention(Attention):
    """Attention whose queries and keys are normalised over all heads, before the rotation."""

    def __init__(self, shape: Olmo2Shape, rope: Rope, window: int) -> None:
        super().__init__(
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rope=rope,
            window=window,
        )
        self.q_norm = HeadsNorm(shape.n_heads * rope.head_dim, eps=shape.norm_eps)
        self.k_norm = HeadsNorm(shape.n_kv_heads * rope.head_dim, eps=shape.norm_eps)


class Olmo2Block(DecoderBlock):
    """One decoder block with norms after its layers: ``block(h_BTC, seq) -> h_BTC``.

    Args:
        shape: the shape of the whole model.
        rope: the rotary positions of the block.
        window: its sliding window; 0: none.
    """

    def __init__(self, shape: Olmo2Shape, rope: Rope, window: int) -> None:
        super().__init__()
        self.attn = _Olmo2Attention(shape, rope, window)
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape.dim, shape.ffn)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        self.attn.prepare(seq, dtype)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn_norm(self.attn(h_BTC, seq=seq))
        return h_BTC + self.ffn_norm(self.ffn(h_BTC))


class Olmo2(RotaryDecoder):
    """An OLMo 2 or 3 of one ``Olmo2Shape``. ``RotaryDecoder`` documents its arguments."""

    shape: Olmo2Shape

    def make_block(self, layer: int, rope: Rope) -> Olmo2Block:
        """Build a block by its number. One with a window has positions without a stretch."""
        window = self.shape.window_of(layer)
        return Olmo2Block(self.shape, rope.unstretched() if window else rope, window)
