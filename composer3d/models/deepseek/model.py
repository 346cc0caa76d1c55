"""The DeepSeek decoder: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437).

Attention has ``blocks.7.attn.wkv_a.weight`` and ``kv_norm`` (the latent of keys and values),
``keys.wkv_b`` (from it to all heads), ``queries.wq``, with ``query_rank`` also ``wq_a`` and
``q_norm`` (the latent of queries), and ``wo``. ``prediction`` has the names of multi-token
prediction. All other names are those of ``models.moe``.
"""

from composer3d.models.contract import DecoderBlock
from composer3d.models.deepseek.block import LatentDenseBlock, LatentExpertsBlock
from composer3d.models.deepseek.prediction import LatentPredictionBlock, PredictingDecoder
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.layers.rope import Rope


class Deepseek(PredictingDecoder):
    """A DeepSeek-V2 or V3 of one ``DeepseekShape``. ``RotaryDecoder`` documents its arguments."""

    shape: DeepseekShape

    def make_block(self, layer: int, rope: Rope) -> DecoderBlock:
        """Build a block; ``DeepseekShape.has_experts`` says whether it has experts."""
        if layer >= self.shape.n_layers:
            return LatentPredictionBlock(self.shape, rope)
        block = LatentExpertsBlock if self.shape.has_experts(layer) else LatentDenseBlock
        return block(self.shape, rope)
