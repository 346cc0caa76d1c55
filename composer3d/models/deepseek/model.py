"""The DeepSeek decoder: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437).

Attention has ``blocks.7.attn.wkv_a.weight`` and ``kv_norm`` (the latent of keys and values),
``keys.wkv_b`` (from it to all heads), ``queries.wq``, with ``query_rank`` also ``wq_a`` and
``q_norm`` (the latent of queries), and ``wo``. All other names are those of ``models.moe``.

The layers of multi-token prediction, which predict a second token in training, are left out.
"""

import torch
from torch import nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.deepseek.attention import LatentAttention
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.rope import Rope, shared_rope_table
from composer3d.models.llama.model import RotaryDecoder
from composer3d.models.moe.model import ExpertsBlock, moe_of


class _LatentBlock(DecoderBlock):
    """The attention of a pre-norm block, and the norm after it."""

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attn = LatentAttention(shape, rope)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        shared_rope_table(self.attn.rope, seq, dtype)


class _DenseBlock(_LatentBlock):
    """A block with a feed-forward layer: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__(shape, rope)
        self.ffn = FeedForward(shape.dim, shape.ffn)

    def forward(self, h_BTC: torch.Tensor, seq: SequenceInfo) -> torch.Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        return h_BTC + self.ffn(self.ffn_norm(h_BTC))


class _ExpertsBlock(ExpertsBlock, _LatentBlock):
    """A block with experts: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__(shape, rope)
        self.moe = moe_of(shape)


class Deepseek(RotaryDecoder):
    """A DeepSeek-V2 or V3 of one ``DeepseekShape``. ``RotaryDecoder`` documents its arguments."""

    shape: DeepseekShape

    def make_block(self, layer: int, rope: Rope) -> DecoderBlock:
        """Build a block; ``DeepseekShape.has_experts`` says whether it has experts."""
        block = _ExpertsBlock if self.shape.has_experts(layer) else _DenseBlock
        return block(self.shape, rope)
