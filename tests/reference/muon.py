"""Muon as its papers write it, one matrix after the other, in float64."""

import torch
from torch import Tensor

A, B, C, STEPS = 3.4445, -4.775, 2.0315, 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return what five steps of Newton-Schulz make of one matrix, by its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(STEPS):
        values = A * values + B * values**3 + C * values**5
    return left @ torch.diag(values) @ right


def step(
    weight: Tensor, momentum: Tensor, gradient: Tensor, *, lr: float, decay: float, rate: float
) -> tuple[Tensor, Tensor]:
    """Return a matrix and its momentum after a step, with a scale that matches AdamW's updates."""
    momentum = rate * momentum + (1 - rate) * gradient
    ahead = rate * momentum + (1 - rate) * gradient
    scale = 0.2 * max(weight.shape) ** 0.5
    return weight - lr * decay * weight - lr * scale * orthogonalise(ahead), momentum
