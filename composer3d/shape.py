"""The shape of a model as plain numbers, and one row for each preset.

No torch here: the recipe, the planner and the drawings read shapes without loading it.
"""

from dataclasses import dataclass
from typing import Any

IGNORE_INDEX = -100  # a label that counts for nothing, torch's default


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama-style decoder. All counts are of the whole model, before anything is sharded."""

    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # key-value heads; fewer than n_heads is grouped-query attention
    ffn: int  # width of the gated feed-forward
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    head_dim: int | None = None  # None: dim / n_heads
    tied: bool = False  # embedding and head are one parameter, first.embed.weight
    qk_norm: bool = False  # RMSNorm of each head's query and key, before rotation (Qwen 3)
    qkv_bias: bool = False  # biases of the three input projections of attention (Qwen 2)
    window: int = 0  # a token sees itself and window - 1 tokens before it (Mistral 7B v0.1); 0: all before it
    # Llama 3.1's stretch of the rotary wavelengths; a factor of 1 leaves them as they are.
    rope_factor: float = 1.0
    rope_low_freq: float = 1.0
    rope_high_freq: float = 4.0
    rope_context: int = 8192  # context length of the model before it was stretched

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.n_heads


def _row(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn: int, vocab: int, theta: float = 5e5, **more: Any
) -> ModelShape:
    sizes: dict[str, Any] = {"n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "ffn": ffn}
    return ModelShape(dim=dim, vocab=vocab, rope_theta=theta, **sizes, **more)


_LLAMA_3_1: dict[str, Any] = {"rope_factor": 8.0}
_LLAMA_3_2: dict[str, Any] = {"rope_factor": 32.0, "tied": True}
_QWEN_3: dict[str, Any] = {"head_dim": 128, "qk_norm": True, "norm_eps": 1e-6}

# From the config.json that is published with each model. 405B, like all of 3.1, has Llama 3's sizes ("The Llama 3 Herd
# of Models", table 3) and stretched positions. llama-175b is no published model but GPT-3's depth, width and heads
# (Brown et al. 2020, table 2.1) in Llama's architecture, with the vocabulary of Narayanan et al. 2021: its gated ffn of
# 8/3 dim holds as many parameters as GPT-3's of 4 dim.
PRESETS: dict[str, ModelShape] = {
    #                    dim    layers heads kv  ffn     vocab   theta
    "debug-tiny": _row(64, 4, 4, 2, 160, 256, 1e4),
    "debug-small": _row(128, 4, 4, 2, 384, 256, 1e4),
    "debug-bench": _row(256, 8, 8, 4, 768, 2048, 1e4),
    "llama3-8b": _row(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": _row(8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": _row(16384, 126, 128, 8, 53248, 128256, **_LLAMA_3_1),
    "llama3.1-8b": _row(4096, 32, 32, 8, 14336, 128256, **_LLAMA_3_1),
    "llama3.1-70b": _row(8192, 80, 64, 8, 28672, 128256, **_LLAMA_3_1),
    "llama3.2-1b": _row(2048, 16, 32, 8, 8192, 128256, head_dim=64, **_LLAMA_3_2),
    "llama3.2-3b": _row(3072, 28, 24, 8, 8192, 128256, head_dim=128, **_LLAMA_3_2),
    "llama-175b": _row(12288, 96, 96, 96, 32768, 51200),
    "mistral-7b": _row(4096, 32, 32, 8, 14336, 32000, 1e4, window=4096),
    "mistral-7b-v0.3": _row(4096, 32, 32, 8, 14336, 32768, 1e6),
    "qwen3-0.6b": _row(1024, 28, 16, 8, 3072, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-1.7b": _row(2048, 28, 16, 8, 6144, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-4b": _row(2560, 36, 32, 8, 9728, 151936, 1e6, tied=True, **_QWEN_3),
    "qwen3-8b": _row(4096, 36, 32, 8, 12288, 151936, 1e6, **_QWEN_3),
    "qwen3-14b": _row(5120, 40, 40, 8, 17408, 151936, 1e6, **_QWEN_3),
    "qwen3-32b": _row(5120, 64, 64, 8, 25600, 151936, 1e6, **_QWEN_3),
}
