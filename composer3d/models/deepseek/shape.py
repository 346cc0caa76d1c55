"""The shape of a DeepSeek-V2 or V3, and one row for each preset. No torch here."""

from dataclasses import dataclass, replace
from typing import Any, Self

from composer3d.facts.ranges import HEAD_DIM, MOST_DEPTHS, MOST_WIDTH, above, between, key
from composer3d.models.moe.shape import ExpertsShape
from composer3d.models.rotary import yarn_attention_factor


@dataclass(frozen=True)
class PredictingShape(ExpertsShape):
    """An ``ExpertsShape`` with multi-token prediction (arXiv 2412.19437, section 2.2)."""

    mtp_layers: int = key(
        0,
        "depths of multi-token prediction, each a block that predicts one token more; 0: none",
        between(0, MOST_DEPTHS),
    )
    mtp_loss: float = key(
        0.3,
        "coefficient of the mean loss of mtp_layers; DeepSeek-V3 began with 0.3 and ended with 0.1",
        above(0, 1_000),
    )

    @property
    def training_fields(self) -> tuple[str, ...]:
        """The coefficients of losses, and the rate of the biases."""
        return (*super().training_fields, "mtp_loss")

    @property
    def without_mtp(self) -> Self:
        """The shape of the model without multi-token prediction, as it generates text."""
        return replace(self, mtp_layers=0, mtp_loss=PredictingShape.mtp_loss)

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts; those of multi-token prediction always do."""
        return layer >= self.n_layers or super().has_experts(layer)


@dataclass(frozen=True)
class DeepseekShape(PredictingShape):
    """Sizes of a decoder with multi-head latent attention and experts (arXiv 2405.04434).

    ``head_dim`` is the width of a head's query and key. Its last ``rope_dim`` numbers are rotated.
    Each head has keys and values of its own: ``n_kv_heads`` equals ``n_heads``.
    """

    query_rank: int = key(
        0, "width of the latent that queries come from; 0: they come from x", between(0, MOST_WIDTH)
    )
    kv_rank: int = key(
        512, "width of the latent that keys and values come from", between(1, MOST_WIDTH)
    )
    rope_dim: int = key(
        64, "rotated numbers of a query and a key; all heads share the key's", HEAD_DIM
    )
    value_dim: int = key(128, "width of a head's value, at most head_dim", between(1, 1 << 14))

    rope_score_mscale: float = key(
        0.0,
        "yarn: scores are multiplied by (0.1 m ln(rope_factor) + 1)^2, and m is this; 0: by 1",
        between(0, 1_000),
    )

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.value_dim

    @property
    def latent_width(self) -> int:
        """The width of a latent of keys and values, with the rotated part of the key."""
        return self.kv_rank + self.rope_dim

    @property
    def query_scale(self) -> float:
        """The factor of queries before attention, which divides scores by sqrt(head width)."""
        if self.rope_scaling != "yarn":
            return 1.0
        return yarn_attention_factor(self.rope_factor, self.rope_score_mscale) ** 2

    @property
    def rotated_width(self) -> int:
        """The numbers of a query, or of a key, that are rotated: its last ones."""
        return self.rope_dim

    @property
    def plain_dim(self) -> int:
        """The numbers of a query and a key that are not rotated."""
        return self.head_width - self.rope_dim


_HEADS: dict[str, Any] = {"head_dim": 192, "kv_rank": 512, "rope_dim": 64, "value_dim": 128}
# The positions of 4,096 tokens, stretched. mscale equals mscale_all_dim in the published files.
_YARN: dict[str, Any] = {
    "rope_scaling": "yarn",
    "rope_context": 4096,
    "rope_attention_factor": 1.0,
}
_V2: dict[str, Any] = {
    "norm_eps": 1e-6,
    "experts_per_token": 6,
    "dense_layers": 1,
    "renormalise": False,
    "balance_loss": 1e-3,
    "rope_factor": 40.0,
    "rope_score_mscale": 0.707,
    **_HEADS,
    **_YARN,
}
_V3: dict[str, Any] = {"router": "sigmoid", "router_bias": True, **_HEADS}
_LARGE_V3: dict[str, Any] = {
    "norm_eps": 1e-6,
    "query_rank": 1536,
    "experts_per_token": 8,
    "expert_ffn": 2048,
    "shared_ffn": 2048,
    "rope_score_mscale": 1.0,
    **_V3,
    **_YARN,
}

# debug-deepseek is our own. The other numbers are those of the config.json that is published with
# each model, without the layer of multi-token prediction of DeepSeek-V3. The balance loss of
# DeepSeek-V2 is ``aux_loss_alpha`` there, which the authors' code adds for each layer and sequence;
# that of DeepSeek-V3 is the alpha of its report (arXiv 2412.19437, section 4.2).
PRESETS: dict[str, DeepseekShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-deepseek": DeepseekShape(
        64,
        4,
        4,
        4,
        160,
        256,
        1e4,
        head_dim=24,
        query_rank=32,
        kv_rank=24,
        rope_dim=8,
        value_dim=20,
        experts=8,
        experts_per_token=2,
        expert_ffn=48,
        shared_ffn=48,
        dense_layers=1,
        router="sigmoid",
        router_bias=True,
        router_scale=2.5,
        expert_groups=4,
        groups_per_token=2,
    ),
    "deepseek-v2-lite": DeepseekShape(
        2048, 27, 16, 16, 10944, 102400, 1e4, experts=64, expert_ffn=1408, shared_ffn=2816, **_V2
    ),
    "deepseek-v2": DeepseekShape(
        5120,
        60,
        128,
        128,
        12288,
        102400,
        1e4,
        query_rank=1536,
        experts=160,
        expert_ffn=1536,
        shared_ffn=3072,
        router_scale=16.0,
        expert_groups=8,
        groups_per_token=3,
        group_best="one",
        **_V2,
    ),
    "deepseek-v3": DeepseekShape(
        7168,
        61,
        128,
        128,
        18432,
        129280,
        1e4,
        experts=256,
        dense_layers=3,
        router_scale=2.5,
        balance_loss=1e-4,
        rope_factor=40.0,
        expert_groups=8,
        groups_per_token=4,
        **_LARGE_V3,
    ),
    "moonlight-16b-a3b": DeepseekShape(
        2048,
        27,
        16,
        16,
        11264,
        163840,
        5e4,
        1e-5,
        experts=64,
        experts_per_token=6,
        expert_ffn=1408,
        shared_ffn=2816,
        dense_layers=1,
        router_scale=2.446,
        **_V3,
    ),
    "kimi-k2": DeepseekShape(
        7168,
        61,
        64,
        64,
        18432,
        163840,
        5e4,
        experts=384,
        dense_layers=1,
        router_scale=2.827,
        rope_factor=32.0,
        rope_beta_fast=1.0,
        **_LARGE_V3,
    ),
}
