"""The shape of an OLMo 2 or 3 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass
from typing import Any

from composer3d.models.llama.shape import WindowedShape


@dataclass(frozen=True)
class Olmo2Shape(WindowedShape):
    """Sizes of an OLMo 2 (arXiv 2501.00656), or with windows, of an OLMo 3 (arXiv 2512.13961).

    It has no options of its own. A stretch of positions is that of blocks without a window.
    """


# debug-olmo2 and debug-olmo3 are our own. The other numbers are those of the config.json that is
# published with each model.
_OLMO_3: dict[str, Any] = {
    "window": 4096,
    "full_every": 4,
    "rope_scaling": "yarn",
    "rope_factor": 8.0,
}
PRESETS: dict[str, Olmo2Shape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta, norm_eps
    "debug-olmo2": Olmo2Shape(64, 4, 4, 2, 160, 256, 1e4, 1e-6),
    "debug-olmo3": Olmo2Shape(64, 4, 4, 2, 160, 256, 1e4, 1e-6, window=20, full_every=4),
    "olmo2-1b": Olmo2Shape(2048, 16, 16, 16, 8192, 100352, 5e5, 1e-6),
    "olmo2-7b": Olmo2Shape(4096, 32, 32, 32, 11008, 100352, 5e5, 1e-6),
    "olmo2-13b": Olmo2Shape(5120, 40, 40, 40, 13824, 100352, 5e5, 1e-6),
    "olmo2-32b": Olmo2Shape(5120, 64, 40, 8, 27648, 100352, 5e5, 1e-6),
    "olmo3-7b": Olmo2Shape(4096, 32, 32, 32, 11008, 100278, 5e5, 1e-6, **_OLMO_3),
    "olmo3-32b": Olmo2Shape(5120, 64, 40, 8, 27648, 100278, 5e5, 1e-6, **_OLMO_3),
}
