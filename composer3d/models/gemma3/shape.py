"""The shape of a Gemma 3 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import between, key
from composer3d.models.llama.shape import WindowedShape


@dataclass(frozen=True)
class Gemma3Shape(WindowedShape):
    """Sizes of a Gemma 3 that reads text alone (arXiv 2503.19786).

    ``rope_theta`` and a stretch of positions are those of blocks without a window.
    """

    rope_local_theta: float = key(
        10_000.0, "base of the rotary embedding in blocks with a window", between(1, 10**12)
    )
    query_pre_attn_scalar: int | None = key(
        None,
        "scores of attention are divided by its square root; absent: the width of a head",
        between(1, 1_000_000),
    )

    @property
    def qk_norm(self) -> bool:
        """Whether each head's query and key are normalised: always."""
        return True

    @property
    def wide_norms(self) -> bool:
        """Whether norms compute in float32 or wider, whatever their input is: always."""
        return True

    @property
    def query_scale(self) -> float:
        """The factor of queries before attention, which divides scores by sqrt(head width)."""
        return (self.head_width / (self.query_pre_attn_scalar or self.head_width)) ** 0.5


# debug-gemma3 is our own. The other numbers are those of the config.json that is published with
# each model.
_GEMMA_3: dict[str, Any] = {"head_dim": 256, "tied": True, "window": 512, "full_every": 6}
PRESETS: dict[str, Gemma3Shape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta, norm_eps
    "debug-gemma3": Gemma3Shape(
        *(64, 4, 4, 2, 160, 256, 1e4, 1e-6),
        head_dim=32,
        window=20,
        full_every=3,
        rope_local_theta=1e2,
        query_pre_attn_scalar=24,
    ),
    "gemma3-270m": Gemma3Shape(640, 18, 4, 1, 2048, 262144, 1e6, 1e-6, **_GEMMA_3),
    "gemma3-1b": Gemma3Shape(1152, 26, 4, 1, 6912, 262144, 1e6, 1e-6, **_GEMMA_3),
}
