"""The shape of a Phi-3 or Phi-4 as plain numbers, and one row for each preset. No torch here."""

from dataclasses import dataclass

from composer3d.models.llama.shape import ModelShape


@dataclass(frozen=True)
class Phi3Shape(ModelShape):
    """Sizes of a Phi-3 (Abdin et al. 2024, arXiv 2404.14219) or a Phi-4 (arXiv 2412.08905).

    They are those of a Llama. Only names and layout in files of Hugging Face are others.
    """


# debug-phi3 is our own. The other numbers are those of the config.json that is published with each
# model. In Phi-3, a token sees itself and 2,046 before it.
PRESETS: dict[str, Phi3Shape] = {
    # dim, n_layers, n_heads, n_kv_heads, ffn, vocab, rope_theta
    "debug-phi3": Phi3Shape(64, 4, 4, 2, 160, 256, 1e4, window=48),
    "phi-3-mini-4k": Phi3Shape(3072, 32, 32, 32, 8192, 32064, 1e4, window=2047),
    "phi-3-medium-4k": Phi3Shape(5120, 40, 40, 10, 17920, 32064, 1e4, window=2047),
    "phi-4": Phi3Shape(5120, 40, 40, 10, 17920, 100352, 250_000.0),
}
