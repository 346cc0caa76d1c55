"""The shape of a DeepSeek-V2 or V3, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import HEAD_DIM, MOST_WIDTH, between, key
from composer3d.models.moe.shape import ExpertsShape


@dataclass(frozen=True)
class DeepseekShape(ExpertsShape):
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

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.value_dim

    @property
    def plain_dim(self) -> int:
        """The numbers of a query and a key that are not rotated."""
        return self.head_width - self.rope_dim


_V2: dict[str, Any] = {
    "norm_eps": 1e-6,
    "head_dim": 192,
    "shared_ffn": 2 * 1408,
    "dense_layers": 1,
    "renormalise": False,
    "experts_per_token": 6,
}
_V3: dict[str, Any] = {
    "head_dim": 192,
    "router": "sigmoid",
    "router_bias": True,
    "experts_per_token": 8,
    "query_rank": 1536,
}

# debug-deepseek is our own. The other numbers are those of the config.json that is published with
# each model. None has the layers of multi-token prediction that V3's files hold.
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
        2048, 27, 16, 16, 10944, 102400, 1e4, experts=64, expert_ffn=1408, **_V2
    ),
}
