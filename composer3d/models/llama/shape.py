"""The shape of a Llama as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import (
    HEAD_DIM,
    MOST_LAYERS,
    MOST_TOKENS,
    Column,
    above,
    between,
    key,
)
from composer3d.models.rotary import RopeScaling, YarnRamp, yarn_attention_factor, yarn_ramp
from composer3d.models.shape import DecoderShape, is_nth

# How often a pair turns at an end of YaRN's ramp, which is computed from 1 over this number.
_TURNS = between(1e-6, 1_000_000)


@dataclass(frozen=True)
class RotaryShape(DecoderShape):
    """Sizes of a decoder with RMSNorm, rotary positions and a gated feed-forward layer.

    What its attention does besides, an architecture says in a class of its own.
    """

    rope_theta: float = key(500_000.0, "base of the rotary embedding", between(1, 10**12))
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", between(1e-20, 1))
    head_dim: int | None = key(None, "width of a head; absent: dim / n_heads", HEAD_DIM)
    tied: bool = key(
        False,
        "embedding and head are one parameter, first.embed.weight",
        column=Column("tied", {"no": False, "yes": True}),
    )
    rope_scaling: RopeScaling = key(  # noqa: RUF009 - a Literal with a name
        "llama3",
        "way of the stretch: as Llama 3.1, linear, yarn, or dynamic (only up to rope_context)",
    )
    rope_factor: float = key(
        1.0,
        "stretch of rotary wavelengths; 1 does nothing",
        between(1, 1_000_000),
    )
    rope_low_freq: float = key(
        1.0,
        "llama3: wavelengths above rope_context / this are stretched in full",
        above(0, 1_000_000),
    )
    rope_high_freq: float = key(
        4.0,
        "llama3: wavelengths below rope_context / this are not stretched",
        above(0, 1_000_000),
    )
    rope_context: int = key(
        8192, "context length that the model had before the stretch", between(1, MOST_TOKENS)
    )
    rope_beta_fast: float = key(
        32.0,
        "yarn: pairs that turn more often in rope_context tokens are not stretched",
        _TURNS,
    )
    rope_beta_slow: float = key(
        1.0,
        "yarn: pairs that turn less often in rope_context tokens are stretched in full",
        _TURNS,
    )
    rope_truncate: bool = key(True, "yarn: stretch from a whole pair on, to a whole pair")
    rope_attention_factor: float | None = key(
        None,
        "yarn: factor of rotated queries and keys; absent: 0.1 ln(rope_factor) + 1",
        above(0, 1_000),
    )

    @property
    def attention_factor(self) -> float:
        """The factor of rotated queries, and of rotated keys."""
        if self.rope_scaling != "yarn":
            return 1.0
        return self.rope_attention_factor or yarn_attention_factor(self.rope_factor)

    @property
    def rotated_width(self) -> int:
        """The numbers of a query, or of a key, that are rotated: all of a head."""
        return self.head_width

    @property
    def yarn_ramp(self) -> YarnRamp | None:
        """Which rotated pairs YaRN slows down; None: with these settings, it could not."""
        return yarn_ramp(
            head_dim=self.rotated_width,
            theta=self.rope_theta,
            context=self.rope_context,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            truncate=self.rope_truncate,
        )

    @property
    def stretched_context(self) -> int | None:
        """The context length that the stretch is for; None: it is not stretched, or not known."""
        if self.rope_factor == 1 or self.rope_scaling == "linear":
            return None
        return self.most_tokens or int(self.rope_context * self.rope_factor)

    @property
    def most_tokens(self) -> int | None:
        """The length beyond which the stretch would depend on that of the sequence."""
        is_dynamic = self.rope_factor != 1 and self.rope_scaling == "dynamic"
        return self.rope_context if is_dynamic else None


@dataclass(frozen=True)
class WindowedShape(RotaryShape):
    """A ``RotaryShape`` of which all blocks, or all but every N-th, may have a sliding window."""

    window: int = key(
        0,
        "sliding window: a token sees itself and window - 1 before it; 0: all",
        between(0, MOST_TOKENS),
    )
    full_every: int = key(
        0,
        "with a window, blocks n, 2n, 3n ... (counted from 1) see all tokens; 0: none does",
        between(0, MOST_LAYERS),
    )


@dataclass(frozen=True)
class ModelShape(WindowedShape):
    """Sizes of a Llama, a Mistral, a Qwen 2, a Qwen 3 or a SmolLM3."""

    qk_norm: bool = key(
        False, "RMSNorm of each head's query and key, before rotation, as in Qwen 3"
    )
    qkv_bias: bool = key(False, "biases of the query, key and value projections, as in Qwen 2")
    nope_every: int = key(
        0,
        "blocks n, 2n, 3n ... (counted from 1) have no rotary positions, as in SmolLM3; 0: all do",
        between(0, MOST_LAYERS),
    )

    def is_rotary(self, block: int) -> bool:
        """Whether a block has rotary positions, by its number in the whole model, from 0."""
        return not is_nth(block, self.nope_every)


_LLAMA_3_2: dict[str, Any] = {"rope_factor": 32.0, "tied": True}
_DEEPSEEK_CODER: dict[str, Any] = {
    "norm_eps": 1e-6,
    "rope_scaling": "linear",
    "rope_factor": 4.0,
}
_QWEN_3: dict[str, Any] = {"head_dim": 128, "qk_norm": True, "norm_eps": 1e-6}

# The debug models are our own. The other numbers are those of the config.json that is published
# with each model. 405B, like all of Llama 3.1, has the sizes of Llama 3 ("The Llama 3 Herd of
# Models", table 3) and stretched positions. llama-175b is not a published model: it has the depth,
# width and heads of GPT-3 (Brown et al. 2020, table 2.1), the architecture of Llama, and the
# vocabulary of Narayanan et al. 2021. Its gated ffn has a width of 8/3 dim, and so as many
# parameters as GPT-3's ffn of 4 dim.
PRESETS: dict[str, ModelShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-tiny": ModelShape(64, 4, 4, 2, 160, 256, 1e4),
    "debug-small": ModelShape(128, 4, 4, 2, 384, 256, 1e4),
    "debug-bench": ModelShape(256, 8, 8, 4, 768, 2048, 1e4),
    "llama3-8b": ModelShape(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": ModelShape(8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": ModelShape(16384, 126, 128, 8, 53248, 128256, rope_factor=8.0),
    "llama3.1-8b": ModelShape(4096, 32, 32, 8, 14336, 128256, rope_factor=8.0),
    "llama3.1-70b": ModelShape(8192, 80, 64, 8, 28672, 128256, rope_factor=8.0),
    "llama3.2-1b": ModelShape(2048, 16, 32, 8, 8192, 128256, head_dim=64, **_LLAMA_3_2),
    "llama3.2-3b": ModelShape(3072, 28, 24, 8, 8192, 128256, head_dim=128, **_LLAMA_3_2),
    "deepseek-coder-6.7b": ModelShape(4096, 32, 32, 32, 11008, 32256, 1e5, **_DEEPSEEK_CODER),
    "deepseek-coder-33b": ModelShape(7168, 62, 56, 8, 19200, 32256, 1e5, **_DEEPSEEK_CODER),
    "llama-175b": ModelShape(12288, 96, 96, 96, 32768, 51200),
    "mistral-7b": ModelShape(4096, 32, 32, 8, 14336, 32000, 1e4, window=4096),
    "mistral-7b-v0.3": ModelShape(4096, 32, 32, 8, 14336, 32768, 1e6),
    "smollm3-3b": ModelShape(2048, 36, 16, 4, 11008, 128256, 5e6, 1e-6, tied=True, nope_every=4),
    "qwen3-0.6b": ModelShape(1024, 28, 16, 8, 3072, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-1.7b": ModelShape(2048, 28, 16, 8, 6144, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-4b": ModelShape(2560, 36, 32, 8, 9728, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-8b": ModelShape(4096, 36, 32, 8, 12288, 151936, 1e6, **_QWEN_3),
    "qwen3-14b": ModelShape(5120, 40, 40, 8, 17408, 151936, 1e6, **_QWEN_3),
    "qwen3-32b": ModelShape(5120, 64, 64, 8, 25600, 151936, 1e6, **_QWEN_3),
}
