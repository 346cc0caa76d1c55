"""The shape of a GLM-4.5 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import above, key
from composer3d.models.deepseek.shape import PredictingShape
from composer3d.models.moe.shape import MoeShape


@dataclass(frozen=True)
class GlmShape(PredictingShape, MoeShape):
    """Sizes of a GLM-4.5 (GLM-4.5 Team 2025, arXiv 2508.06471).

    Of each head, the first ``rope_share`` is rotated. The rest knows no positions.
    """

    rope_share: float = key(
        0.5, "share of each head that is rotated: so many of its first numbers", above(0, 1)
    )

    @property
    def model_type(self) -> str:
        """The model_type of transformers whose names its files have."""
        return "glm4_moe"

    @property
    def rotated_width(self) -> int:
        """The numbers of a query, or of a key, that are rotated: its first ones, in pairs."""
        return max(2 * int(self.head_width * self.rope_share / 2), 2)


_GLM: dict[str, Any] = {
    "head_dim": 128,
    "qkv_bias": True,
    "experts_per_token": 8,
    "router": "sigmoid",
    "router_bias": True,
    "balance_loss": 1e-4,
}

# debug-glm is our own. The other numbers are those of the config.json that is published with each
# model, without the layer of multi-token prediction; NVIDIA's page of Megatron-Bridge on GLM 4.5
# has the same. The balance loss is that of section 2.4 of the report. GLM-4.6 has the shape of
# GLM-4.5.
PRESETS: dict[str, GlmShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-glm": GlmShape(
        64,
        4,
        4,
        2,
        160,
        256,
        1e4,
        head_dim=24,
        qkv_bias=True,
        qk_norm=True,
        experts=8,
        experts_per_token=2,
        expert_ffn=48,
        shared_ffn=48,
        dense_layers=1,
        router="sigmoid",
        router_bias=True,
        router_scale=2.5,
    ),
    "glm-4.5": GlmShape(
        5120,
        92,
        96,
        8,
        12288,
        151552,
        1e6,
        qk_norm=True,
        experts=160,
        expert_ffn=1536,
        shared_ffn=1536,
        dense_layers=3,
        router_scale=2.5,
        **_GLM,
    ),
    "glm-4.5-air": GlmShape(
        4096,
        46,
        96,
        8,
        10944,
        151552,
        1e6,
        experts=128,
        expert_ffn=1408,
        shared_ffn=1408,
        dense_layers=1,
        **_GLM,
    ),
}
