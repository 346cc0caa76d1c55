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
    n_heads: int  # query heads; head_dim is dim / n_heads
    n_kv_heads: int  # key-value heads; fewer than n_heads is grouped-query attention
    ffn: int  # width of the gated feed-forward
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


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
