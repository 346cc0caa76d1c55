"""Plain rotary positions: pairs of elements are complex numbers."""

import cmath
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from composer3d.models.llama.shape import RotaryShape


def speeds(shape: RotaryShape) -> list[float]:
    """Radians that each pair turns in one position, with Llama 3.1's stretched wavelengths."""
    half = shape.head_width // 2
    found = []
    for pair in range(half):
        speed = shape.rope_theta ** (-pair / half)
        wavelength = 2 * math.pi / speed
        if wavelength > shape.rope_context / shape.rope_low_freq:
            speed /= shape.rope_factor
        elif wavelength > shape.rope_context / shape.rope_high_freq:
            low, high = shape.rope_low_freq, shape.rope_high_freq
            unstretched = (shape.rope_context / wavelength - low) / (high - low)
            speed = (1 - unstretched) * speed / shape.rope_factor + unstretched * speed
        found.append(speed)
    return found


def rotations(shape: RotaryShape, positions: Sequence[int]) -> Tensor:
    """e^(i angle) of each position and pair, (T, D / 2)."""
    rows = [[cmath.exp(1j * position * speed) for speed in speeds(shape)] for position in positions]
    return torch.tensor(rows, dtype=torch.complex128)


def turn_halves(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs (x[i], x[i + D/2]) of (T, heads, D), as complex numbers, by ``turns``."""
    a, b = x.chunk(2, -1)
    turned = torch.complex(a, b) * turns[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def turn_neighbours(x: Tensor, turns: Tensor) -> Tensor:
    """Multiply the pairs (x[2i], x[2i + 1]) of (T, heads, D) by ``turns``, as Meta's code does."""
    pairs = torch.view_as_complex(x.unflatten(-1, (x.shape[-1] // 2, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)
