"""The shape of a gpt-oss as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.facts.ranges import above, key
from composer3d.models.llama.shape import WindowedShape
from composer3d.models.moe.shape import RoutedShape


@dataclass(frozen=True)
class GptOssShape(RoutedShape, WindowedShape):
    """Sizes of a gpt-oss (OpenAI 2025, arXiv 2508.10925). ``ffn`` is the width of an expert.

    The gate of an expert is x * sigmoid(``gate_slope`` * x), of x of at most ``gate_limit``. It
    multiplies the up projection, cut to plus and minus ``gate_limit``, plus 1.
    """

    gate_slope: float = key(1.702, "slope of the sigmoid in an expert's gate", above(0, 1_000))
    gate_limit: float = key(
        7.0, "bound of an expert's gate and up projection, before they multiply", above(0, 1_000)
    )

    @property
    def has_sinks(self) -> bool:
        """Whether each query head has a sink: always."""
        return True


# The published config.json of both has YaRN with a factor of 32, from 4,096 tokens.
_GPT_OSS: dict[str, Any] = {
    "head_dim": 64,
    "window": 128,
    "full_every": 2,
    "experts_per_token": 4,
    "rope_scaling": "yarn",
    "rope_factor": 32.0,
    "rope_truncate": False,
    "rope_context": 4096,
}

# debug-gpt-oss is our own. The other numbers are those of the config.json that is published with
# each model.
PRESETS: dict[str, GptOssShape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-gpt-oss": GptOssShape(
        64,
        4,
        4,
        2,
        48,
        256,
        1e4,
        window=20,
        full_every=2,
        experts=8,
        experts_per_token=2,
        gate_limit=1.5,
    ),
    "gpt-oss-20b": GptOssShape(2880, 24, 64, 8, 2880, 201088, 1.5e5, experts=32, **_GPT_OSS),
    "gpt-oss-120b": GptOssShape(2880, 36, 64, 8, 2880, 201088, 1.5e5, experts=128, **_GPT_OSS),
}
