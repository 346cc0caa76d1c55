"""The DeepSeek decoder: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437).

Attention has ``blocks.7.attn.wkv_a.weight`` and ``kv_norm`` (the latent of keys and values),
``keys.wkv_b`` (from it to all heads), ``queries.wq``, with ``query_rank`` also ``wq_a`` and
``q_norm`` (the latent of queries), and ``wo``. ``prediction`` has the names of multi-token
prediction. All other names are those of ``models.moe``.
"""

import torch

from composer3d.models.contract import DecoderBlock
from composer3d.models.deepseek.block import LatentDenseBlock, LatentExpertsBlock
from composer3d.models.deepseek.prediction import PredictingLast, PredictionBlock
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import RotaryDecoder


class Deepseek(RotaryDecoder):
    """A DeepSeek-V2 or V3 of one ``DeepseekShape``. ``RotaryDecoder`` documents its arguments."""

    shape: DeepseekShape
    last_class = PredictingLast

    def __init__(
        self, shape: DeepseekShape, *, dtype: torch.dtype = torch.float32, device: str = "meta"
    ) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self.mtp_layers = shape.mtp_layers
        if shape.mtp_layers:
            self.last.embed.weight = self.first.embed.weight

    def make_block(self, layer: int, rope: Rope) -> DecoderBlock:
        """Build a block; ``DeepseekShape.has_experts`` says whether it has experts."""
        if layer >= self.shape.n_layers:
            return PredictionBlock(self.shape, rope)
        block = LatentExpertsBlock if self.shape.has_experts(layer) else LatentDenseBlock
        return block(self.shape, rope)
