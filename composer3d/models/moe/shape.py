"""The shape of a Llama with experts, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any, Literal

from composer3d.facts.ranges import MOST_EXPERTS, MOST_LAYERS, MOST_WIDTH, above, between, key
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.shape import is_nth


@dataclass(frozen=True)
class RoutedShape(RotaryShape):
    """Sizes of a decoder in which feed-forward layers are mixtures of experts.

    The coefficients of the balance are a part of it, because published configurations name them.
    Training alone reads them (``training_fields``).
    """

    experts: int = key(8, "experts of a layer", between(1, MOST_EXPERTS))
    experts_per_token: int = key(
        2, "experts that compute each token (top-k)", between(1, MOST_EXPERTS)
    )
    balance_loss: float = key(
        0.0,
        "coefficient of the balance loss, summed over layers, which is 1 for equal shares; 0: none",
        between(0, 1_000),
    )
    z_loss: float = key(
        0.0,
        "coefficient of the router's z-loss, mean(logsumexp(logits)^2); 0: none",
        between(0, 1_000),
    )

    @property
    def training_fields(self) -> tuple[str, ...]:
        """The coefficients of the balance."""
        return ("balance_loss", "z_loss")

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts, by its number, counted from 0."""
        return True

    @property
    def moe_layers(self) -> int:
        """The number of blocks with experts."""
        return sum(map(self.has_experts, range(self.n_layers)))


@dataclass(frozen=True)
class ExpertsShape(RoutedShape):
    """A ``RoutedShape`` with dense blocks, shared experts and other routers."""

    expert_ffn: int | None = key(
        None, "width of an expert; absent: ffn", between(1, 4 * MOST_WIDTH)
    )
    shared_ffn: int = key(
        0,
        "width of the shared expert, which computes every token; 0: none",
        between(0, 4 * MOST_WIDTH),
    )
    shared_gate: bool = key(
        False, "weigh the shared expert by the sigmoid of a logit of each token, as in Qwen 2"
    )
    dense_layers: int = key(
        0, "number of first blocks without experts, as in DeepSeek-V3", between(0, MOST_LAYERS)
    )
    moe_every: int = key(
        1, "blocks n, 2n, 3n ... (counted from 1) have experts; 1: all", between(1, MOST_LAYERS)
    )
    router: Literal["softmax", "sigmoid"] = key(
        "softmax", "scores: softmax over all experts (Mixtral, Qwen 3), or sigmoid (DeepSeek-V3)"
    )
    renormalise: bool = key(True, "divide the weights of a token's experts by their sum")
    router_scale: float = key(1.0, "factor of the weights of experts", above(0, 1_000))
    expert_groups: int = key(
        1,
        "groups of experts; a token chooses groups first, as in DeepSeek-V3",
        between(1, MOST_EXPERTS),
    )
    groups_per_token: int = key(
        1, "groups that a token chooses, of expert_groups", between(1, MOST_EXPERTS)
    )
    group_best: Literal["two", "one"] = key(
        "two",
        "scores of a group that are added to choose groups: its two best, as in DeepSeek-V3, or "
        "the best one, as in DeepSeek-V2",
    )
    router_bias: bool = key(
        False, "balance without a loss: a bias of each expert in the choice, moved after each step"
    )
    bias_rate: float = key(1e-3, "how far router_bias moves in a step", between(0, 1))

    @property
    def training_fields(self) -> tuple[str, ...]:
        """The coefficients of the balance, and the rate of the biases."""
        return ("bias_rate", *super().training_fields)

    @property
    def expert_width(self) -> int:
        """The width of an expert."""
        return self.expert_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts, by its number, counted from 0."""
        return layer >= self.dense_layers and is_nth(layer, self.moe_every)


@dataclass(frozen=True)
class MoeShape(ExpertsShape, ModelShape):
    """Sizes of a Llama with experts: a Mixtral, a Qwen 2 or a Qwen 3."""

    @property
    def model_type(self) -> str:
        """The model_type of transformers that is nearest, and whose names its files have."""
        if self.shared_gate:
            return "qwen2_moe"
        return "qwen3_moe" if self.qk_norm else "mixtral"


_MIXTRAL: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "rope_theta": 1e6}
_QWEN_2: dict[str, Any] = {
    "qkv_bias": True,
    "shared_gate": True,
    "renormalise": False,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_QWEN_3: dict[str, Any] = {
    "experts": 128,
    "experts_per_token": 8,
    "head_dim": 128,
    "qk_norm": True,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
}

# From the config.json that is published with each model. ``ffn`` is the width of dense layers,
# and that of experts where ``expert_ffn`` is absent. transformers pools the layers in its balance
# loss: router_aux_loss_coef x K / layers pulls on each layer as ``balance_loss`` does
# (docs/experts.md). deepseek-v3-gqa has the sizes of DeepSeek-V3 (arXiv 2412.19437), but plain
# attention of 128 heads in place of multi-head latent attention, so it is no published model. The
# rows of GShard (arXiv 2006.16668) and Switch (arXiv 2101.03961) take the number of experts,
# their width and how many a token uses from those papers, in the architecture of Llama: a decoder
# with a gated feed-forward.
PRESETS: dict[str, MoeShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab
    "debug-moe": MoeShape(64, 4, 4, 2, 96, 256, 1e4, experts=8, experts_per_token=2),
    "debug-bench-moe": MoeShape(256, 8, 8, 4, 384, 2048, 1e4, experts=8, experts_per_token=2),
    "debug-small-moe": MoeShape(128, 4, 4, 2, 192, 256, 1e4, experts=8, experts_per_token=2),
    "debug-moe-shared": MoeShape(
        64,
        4,
        4,
        2,
        160,
        256,
        1e4,
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
    "mixtral-8x7b": MoeShape(4096, 32, 32, 8, 14336, 32000, balance_loss=0.02 * 2 / 32, **_MIXTRAL),
    "mixtral-8x22b": MoeShape(
        6144, 56, 48, 8, 16384, 32768, balance_loss=1e-3 * 2 / 56, **_MIXTRAL
    ),
    "qwen1.5-moe-a2.7b": MoeShape(
        2048,
        24,
        16,
        16,
        5632,
        151936,
        experts=60,
        experts_per_token=4,
        expert_ffn=1408,
        shared_ffn=5632,
        balance_loss=1e-3 * 4 / 24,
        **_QWEN_2,
    ),
    "qwen2-57b-a14b": MoeShape(
        3584,
        28,
        28,
        4,
        18944,
        151936,
        experts=64,
        experts_per_token=8,
        expert_ffn=2560,
        shared_ffn=20480,
        balance_loss=1e-3 * 8 / 28,
        **_QWEN_2,
    ),
    "qwen3-30b-a3b": MoeShape(
        2048, 48, 32, 4, 6144, 151936, expert_ffn=768, balance_loss=1e-3 * 8 / 48, **_QWEN_3
    ),
    "qwen3-235b-a22b": MoeShape(
        4096, 94, 64, 4, 12288, 151936, expert_ffn=1536, balance_loss=1e-3 * 8 / 94, **_QWEN_3
    ),
    "deepseek-v3-gqa": MoeShape(
        7168,
        61,
        128,
        128,
        18432,
        129280,
        1e4,
        norm_eps=1e-6,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_ffn=2048,
        dense_layers=3,
        router="sigmoid",
        router_bias=True,
        router_scale=2.5,
        expert_groups=8,
        groups_per_token=4,
        balance_loss=1e-4,
        head_dim=128,
    ),
    "gshard-like-top2": MoeShape(
        1024,
        12,
        16,
        16,
        8192,
        64000,
        experts=128,
        experts_per_token=2,
        moe_every=2,
        head_dim=128,
        balance_loss=0.01,
    ),
    "switch-like-top1": MoeShape(
        768,
        12,
        12,
        12,
        2048,
        32128,
        experts=128,
        experts_per_token=1,
        moe_every=2,
        renormalise=False,
        balance_loss=0.01,
        z_loss=1e-3,
    ),
}
