"""Plain rotary positions: pairs of elements are complex numbers."""

import cmath
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from composer3d.models.llama.shape import RotaryShape


def rotated_width(shape: RotaryShape) -> int:
    """How many numbers of a head are rotated: its first ones."""
    return int(shape.head_width * getattr(shape, "rope_share", 1.0))


def speeds(shape: RotaryShape) -> list[float]:
    """Radians that each pair turns in one position."""
    half = rotated_width(shape) // 2
    plain = [shape.rope_theta ** (-pair / half) for pair in range(half)]
    if shape.rope_scaling == "dynamic":
        return plain
    if shape.rope_scaling == "linear":
        return [speed / shape.rope_factor for speed in plain]
    stretch = _yarn if shape.rope_scaling == "yarn" else _llama3
    return [stretch(shape, pair, speed) for pair, speed in enumerate(plain)]


def _llama3(shape: RotaryShape, pair: int, speed: float) -> float:
    """Stretch long wavelengths, as Llama 3.1."""
    wavelength = 2 * math.pi / speed
    if wavelength > shape.rope_context / shape.rope_low_freq:
        return speed / shape.rope_factor
    if wavelength > shape.rope_context / shape.rope_high_freq:
        low, high = shape.rope_low_freq, shape.rope_high_freq
        unstretched = (shape.rope_context / wavelength - low) / (high - low)
        return (1 - unstretched) * speed / shape.rope_factor + unstretched * speed
    return speed


def _yarn(shape: RotaryShape, pair: int, speed: float) -> float:
    """Stretch long wavelengths, as section 3.2 of Peng et al.; by the pair, as their code."""
    # The pair, as a real number, that turns ``turns`` times in the context.
    first, last = (
        math.log(shape.rope_context / (2 * math.pi * turns), shape.rope_theta)
        * (rotated_width(shape) / 2)
        for turns in (shape.rope_beta_fast, shape.rope_beta_slow)
    )
    if shape.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(0, first), min(rotated_width(shape) - 1, last)
    if pair <= first:
        return speed
    if pair >= last:
        return speed / shape.rope_factor
    stretched = (pair - first) / (last - first)
    return (1 - stretched) * speed + stretched * speed / shape.rope_factor


def magnitude(shape: RotaryShape) -> float:
    """The factor of what is rotated: sqrt(1/t) of Peng et al., unless the shape has another."""
    if shape.rope_scaling != "yarn":
        return 1.0
    return shape.rope_attention_factor or 1 + math.log(shape.rope_factor) / 10


def rotations(shape: RotaryShape, positions: Sequence[int]) -> Tensor:
    """The complex factor of each position and pair, (T, D / 2)."""
    size = magnitude(shape)
    rows = [
        [size * cmath.exp(1j * position * speed) for speed in speeds(shape)]
        for position in positions
    ]
    return torch.tensor(rows, dtype=torch.complex128)


def turn_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs (x[i], x[i + D/2]) of (T, heads, D), as complex numbers, by ``turns``.

    What a head has besides stays as it is.
    """
    half = turns.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.complex(a, b) * turns[:, None]
    return torch.cat((turned.real, turned.imag, rest), -1)


def turn_neighbours(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs (x[2i], x[2i + 1]) of (T, heads, D) by ``turns``, as Meta's code does."""
    pairs = torch.view_as_complex(x.unflatten(-1, (x.shape[-1] // 2, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)
