"""The shape of a Granite 3 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import above, key
from composer3d.models.llama.shape import RotaryShape

_MULTIPLIER = above(0, 1_000_000)


@dataclass(frozen=True)
class GraniteShape(RotaryShape):
    """Sizes of a Granite 3 (IBM 2024, Granite 3.0 Language Models), and its multipliers.

    The keys are those of its config.json.
    """

    embedding_multiplier: float = key(
        1.0, "factor of the embedding, before the first block", _MULTIPLIER
    )
    attention_multiplier: float | None = key(
        None, "factor of the scores of attention; absent: head width ^ -0.5", _MULTIPLIER
    )
    residual_multiplier: float = key(
        1.0, "factor of what each layer adds to the residual stream", _MULTIPLIER
    )
    logits_scaling: float = key(1.0, "divisor of the logits", _MULTIPLIER)

    @property
    def query_scale(self) -> float:
        """The factor of queries before attention, which divides scores by sqrt(head width)."""
        if self.attention_multiplier is None:
            return 1.0
        return self.attention_multiplier * self.head_width**0.5


_GRANITE_3: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "tied": True,
}
_2B: dict[str, Any] = {"attention_multiplier": 1 / 64, "logits_scaling": 8.0, **_GRANITE_3}
_8B: dict[str, Any] = {"attention_multiplier": 1 / 128, "logits_scaling": 16.0, **_GRANITE_3}

# debug-granite is our own. The other numbers are those of the config.json that is published with
# each model.
PRESETS: dict[str, GraniteShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-granite": GraniteShape(
        64,
        4,
        4,
        2,
        160,
        256,
        1e4,
        embedding_multiplier=3.0,
        attention_multiplier=0.1,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "granite3-2b": GraniteShape(2048, 40, 32, 8, 8192, 49155, 1e4, **_2B),
    "granite3-8b": GraniteShape(4096, 40, 32, 8, 12800, 49155, 1e4, **_8B),
}
