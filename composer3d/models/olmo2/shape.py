"""The shape of an OLMo 2 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass

from composer3d.models.llama.shape import RotaryShape


@dataclass(frozen=True)
class Olmo2Shape(RotaryShape):
    """Sizes of an OLMo 2 (arXiv 2501.00656). It has no options of its own."""


# debug-olmo2 is our own. The other numbers are those of the config.json that is published with each
# model.
PRESETS: dict[str, Olmo2Shape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta, norm_eps
    "debug-olmo2": Olmo2Shape(64, 4, 4, 2, 160, 256, 1e4, 1e-6),
    "olmo2-1b": Olmo2Shape(2048, 16, 16, 16, 8192, 100352, 5e5, 1e-6),
    "olmo2-7b": Olmo2Shape(4096, 32, 32, 32, 11008, 100352, 5e5, 1e-6),
    "olmo2-13b": Olmo2Shape(5120, 40, 40, 40, 13824, 100352, 5e5, 1e-6),
    "olmo2-32b": Olmo2Shape(5120, 64, 40, 8, 27648, 100352, 5e5, 1e-6),
}
