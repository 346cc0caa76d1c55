"""The blocks of a DeepSeek-V2 or V3 with multi-head latent attention, without and with experts."""

import torch
from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.models.deepseek.attention import LatentAttention
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.ffn import FeedForward
from composer3d.models.layers.rope import Rope, shared_rope_table
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


class LatentDenseBlock(_LatentBlock):
    """A block with a feed-forward layer: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__(shape, rope)
        self.ffn = FeedForward(shape.dim, shape.ffn)

    def forward(self, h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        h_BTC = h_BTC + self.attn(self.attn_norm(h_BTC), seq=seq)
        return h_BTC + self.ffn(self.ffn_norm(h_BTC))


class LatentExpertsBlock(ExpertsBlock, _LatentBlock):
    """A block with experts: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(self, shape: DeepseekShape, rope: Rope) -> None:
        super().__init__(shape, rope)
        self.moe = moe_of(shape)
