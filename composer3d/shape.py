"""The shape of a model as plain numbers, and one row for each preset.

No torch here: the recipe, the planner and the drawings read shapes without loading it.
"""

from dataclasses import dataclass

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
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn: int, vocab: int, theta: float = 5e5
) -> ModelShape:
    return ModelShape(
        dim=dim, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, ffn=ffn, vocab=vocab, rope_theta=theta
    )


# Sizes of Llama 3: "The Llama 3 Herd of Models", table 3, and the models' published config.json.
PRESETS: dict[str, ModelShape] = {
    #                  dim    layers heads kv  ffn     vocab
    "debug-tiny": _row(64, 4, 4, 2, 160, 256, 1e4),
    "debug-small": _row(128, 4, 4, 2, 384, 256, 1e4),
    "debug-bench": _row(256, 8, 8, 4, 768, 2048, 1e4),
    "llama3-8b": _row(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": _row(8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": _row(16384, 126, 128, 8, 53248, 128256),
}
