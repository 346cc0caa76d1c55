"""The Gemma 3 decoder for text: Gemma 3 Technical Report (arXiv 2503.19786).

Norms stand before and after each layer, and their factor is 1 + weight. Of six blocks, five have a
sliding window, and positions of a base of their own. The names are those of ``models.llama``, and
``blocks.7.attn_post_norm.weight`` and ``blocks.7.ffn_post_norm.weight`` for the norms after layers.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import First, Last, RotaryDecoder


class OffsetNorm(nn.RMSNorm):
    """RMSNorm whose factor is 1 + weight, over the last dim: (..., C) to (..., C).

    It computes in float32 or wider, and rounds once at the end, as the published models do: in
    bfloat16, 1 + weight would lose most of a small weight.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = 1 + self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, factor, self.eps).to(x.dtype)


class GeluFeedForward(FeedForward):
    """GeGLU without biases (Shazeer 2020, arXiv 2002.05202): ``w2(gelu(w1(x)) * w3(x))``.

    ``ffn(x_BTC)`` returns (B, T, C). gelu is the approximation with tanh.
    """

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x_BTC), approximate="tanh") * self.w3(x_BTC))


class _Gemma3Attention(Attention):
    """Attention whose queries and keys are normalised in each head, by norms of 1 + weight."""

    def __init__(self, shape: Gemma3Shape, rope: Rope, window: int) -> None:
        super().__init__(
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rope=rope,
            window=window,
            query_scale=shape.query_scale,
        )
        self.q_norm = OffsetNorm(rope.head_dim, eps=shape.norm_eps)
        self.k_norm = OffsetNorm(rope.head_dim, eps=shape.norm_eps)


class _Gemma3First(First):
    """``first(tokens_BT, seq) -> h_BTC``: the embedding, times sqrt(dim).

    The factor is rounded to the dtype of the embedding, as that of the published models was: in
    bfloat16, the root of 1152 is 34.
    """

    def __init__(self, shape: Gemma3Shape) -> None:
        super().__init__(shape)
        self.factor = shape.dim**0.5

    def forward(self, tokens_BT: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = super().forward(tokens_BT, seq)
        return h_BTC * h_BTC.new_full((), self.factor)


class Gemma3Block(DecoderBlock):
    """One decoder block with norms before and after its layers: ``block(h_BTC, seq) -> h_BTC``.

    Args:
        shape: the shape of the whole model.
        rope: the rotary positions of the block.
        window: its sliding window; 0: none.
    """

    def __init__(self, shape: Gemma3Shape, rope: Rope, window: int) -> None:
        super().__init__()
        self.attn_norm = OffsetNorm(shape.dim, eps=shape.norm_eps)
        self.attn = _Gemma3Attention(shape, rope, window)
        self.attn_post_norm = OffsetNorm(shape.dim, eps=shape.norm_eps)
        self.ffn_norm = OffsetNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = GeluFeedForward(shape.dim, shape.ffn)
        self.ffn_post_norm = OffsetNorm(shape.dim, eps=shape.norm_eps)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        self.attn.prepare(seq, dtype)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn_post_norm(self.attn(self.attn_norm(h_BTC), seq=seq))
        return h_BTC + self.ffn_post_norm(self.ffn(self.ffn_norm(h_BTC)))


class _Gemma3Last(Last):
    """``last(h_BTC, seq, labels_BT) -> loss``, with a norm of 1 + weight."""

    def __init__(self, shape: Gemma3Shape) -> None:
        super().__init__(shape)
        self.norm = OffsetNorm(shape.dim, eps=shape.norm_eps)


class Gemma3(RotaryDecoder):
    """A Gemma 3 of one ``Gemma3Shape``. ``RotaryDecoder`` documents its arguments."""

    shape: Gemma3Shape
    first_class = _Gemma3First
    last_class = _Gemma3Last

    def make_block(self, layer: int, rope: Rope) -> Gemma3Block:
        """Build a block by its number. Those with a window have other positions."""
        window = self.shape.window_of(layer)
        if window:
            rope = replace(rope.unstretched(), theta=self.shape.rope_local_theta)
        return Gemma3Block(self.shape, rope, window)
