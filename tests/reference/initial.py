"""Plain initial weights: splitmix64 and Box-Muller in Python's own numbers."""

import hashlib
import math
import re

from composer3d.models.llama.shape import ModelShape

_64_BITS = (1 << 64) - 1
_26_BITS = (1 << 26) - 1


def initial_weight(shape: ModelShape, seed: int, name: str, index: int) -> float:
    """The initial value of element ``index`` of a parameter of Llama."""
    if name.endswith("norm.weight"):
        return 1.0
    std = 0.02 / math.sqrt(2 * shape.n_layers) if re.search(r"\.(wo|w2)\.", name) else 0.02
    return std * normal_number(f"{seed}/{name}", index)


def normal_number(text: str, index: int) -> float:
    """The normal number of element ``index``; ``text`` is the seed and the parameter's name."""
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    x = ((index + 1) * 0x9E3779B97F4A7C15 + key) & _64_BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _64_BITS
    x ^= x >> 31
    # Box-Muller of two numbers between 0 and 1, each of 26 bits. The first is never 0.
    first = ((x >> 38 & _26_BITS) + 0.5) / 2**26
    second = (x >> 12 & _26_BITS) / 2**26
    return math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)
