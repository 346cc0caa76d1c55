"""The GLM-4.5 decoder (GLM-4.5 Team 2025, arXiv 2508.06471).

The names are those of ``models.moe``, and of ``deepseek.prediction`` for multi-token prediction.
"""

from composer3d.models.deepseek.prediction import PredictingDecoder, PredictionBlock
from composer3d.models.glm.shape import GlmShape
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import Block
from composer3d.models.moe.model import MoeBlock, MoeLlama


class GlmPredictionBlock(PredictionBlock, MoeBlock):  # type: ignore[misc]  # a third argument
    """A depth of multi-token prediction, with the attention of the other blocks."""


class Glm(PredictingDecoder, MoeLlama):
    """A GLM-4.5 of one ``GlmShape``. ``RotaryDecoder`` documents its arguments."""

    shape: GlmShape

    def make_block(self, layer: int, rope: Rope) -> Block:
        """Build a block by its number; those of multi-token prediction are the last ones."""
        if layer >= self.shape.n_layers:
            return GlmPredictionBlock(self.shape, rope, layer)
        return super().make_block(layer, rope)
