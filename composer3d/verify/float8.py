"""Float8 products of the one-process reference of ``verify``, written again as plain arithmetic.

The rules of ``parallel.float8``, in float64:

- A number is rounded to float32, and then to the nearest multiple of its e4m3 spacing, ties to
  even, after it is multiplied by a scale.
- A scale is the largest power of two that brings the largest number to at most 448.
- In outputs, each row of the input and of the weight has its own scale. In input gradients, each
  row of the gradient has its own, and the weight has one.
- Weight gradients round nothing.
- Each expert is a layer by itself, and whole on its rank.

A rank of tp takes its scales from the part of a matrix that it holds. So the reference computes
each layer in as many parts, and joins or adds them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from composer3d.models.contract import ShardingPlan
from composer3d.models.layers.moe import Experts, Groups

_LARGEST = 448.0
_SMALLEST_AMAX = 1e-12
_FRACTION_BITS = 3
_SMALLEST_EXPONENT = -6  # smaller numbers have its spacing
# A change of a number by less than this, relative to the largest of its matrix, is not seen.
_SMALLEST_CHANGE = 1e-10


class Rounding:
    """Rounds matrices, and keeps the smallest distance of a number from a change of its rounding.

    Attributes:
        closest: the smallest distance to a point halfway between two e4m3 numbers, relative to the
            largest number of the matrix. If two runs differ by more than that, a number may be
            rounded up in one of them, and down in the other.
    """

    def __init__(self) -> None:
        self.closest = float("inf")

    def rows(self, x: Tensor) -> Tensor:
        """Round each row of x, (..., K), with its own scale. The result is (..., K) in float64."""
        return self._round(x, x.abs().amax(-1, keepdim=True))

    def whole(self, x: Tensor) -> Tensor:
        """Round a matrix, (M, K), with one scale. The result is (M, K) in float64."""
        return self._round(x, x.abs().amax())

    def _round(self, x: Tensor, amax: Tensor) -> Tensor:
        scale = torch.exp2(torch.floor(torch.log2(_LARGEST / amax.clamp(min=_SMALLEST_AMAX))))
        scaled = (x * scale).to(torch.float32).to(torch.float64)
        exponent = _exponent(scaled).clamp(min=_SMALLEST_EXPONENT)
        spacing = torch.exp2(exponent - _FRACTION_BITS)
        self._watch((x * scale).abs(), spacing, scale, x.abs().max())
        return (scaled / spacing).round() * spacing / scale

    def _watch(self, scaled: Tensor, spacing: Tensor, scale: Tensor, largest: Tensor) -> None:
        """Update ``closest`` by the positive numbers ``scaled``."""
        halfway = ((scaled / spacing).floor() + 0.5) * spacing
        # Numbers that float32 cannot tell from the point halfway are rounded to even, so that the
        # rounding changes a half of float32's spacing below or above it.
        half_of_float32 = torch.exp2(_exponent(halfway) - 24)
        distance = ((scaled - halfway).abs() - half_of_float32).abs() / scale
        matters = spacing / scale > _SMALLEST_CHANGE * largest
        if matters.any():
            self.closest = min(self.closest, (distance[matters].min() / largest).item())


def _exponent(x: Tensor) -> Tensor:
    """Return n in float64, where 1 <= |x| / 2^n < 2."""
    return (torch.frexp(x).exponent - 1).to(torch.float64)


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        return rounding.rows(x) @ rounding.rows(weight).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        input_grad = ctx.rounding.rows(grad) @ ctx.rounding.whole(weight)
        return input_grad, grad.flatten(0, -2).T @ x.flatten(0, -2), None


def use_float8(model: nn.Module, plan: ShardingPlan, tp: int) -> Rounding:
    """Let the layers that the plan names multiply in float8, as ``tp`` ranks would.

    Returns:
        What rounds their operands.
    """
    rounding = Rounding()
    for name, module in model.named_modules():
        if not plan.multiplies_in_float8(name):
            continue
        if isinstance(module, Experts):
            module.product = partial(_by_expert, rounding)
        elif isinstance(module, nn.Linear):
            forward: Callable[..., Tensor] = _rows
            if plan.style_of(name) == "column":
                forward = _columns
            elif plan.style_of(name) == "kv_column":
                # ``models.fit.check`` refuses a plan without it.
                assert plan.kv_heads is not None
                forward = partial(_kv_columns, heads=plan.kv_heads)
            module.forward = partial(forward, module, rounding, tp)  # type: ignore[method-assign]
    return rounding


def _by_expert(rounding: Rounding, rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    return torch.cat(
        [
            _EmulatedProduct.apply(x, weight, rounding) if len(x) else x @ weight.T
            for x, weight in groups.pairs(rows, weights)
        ]
    )


def _columns(layer: nn.Linear, rounding: Rounding, tp: int, x: Tensor) -> Tensor:
    parts = [_EmulatedProduct.apply(x, part, rounding) for part in layer.weight.chunk(tp)]
    out = torch.cat(parts, -1)
    return out if layer.bias is None else out + layer.bias


def _kv_columns(layer: nn.Linear, rounding: Rounding, tp: int, x: Tensor, *, heads: int) -> Tensor:
    """Compute all heads; with fewer heads than ranks, repeat each for the ranks that share it.

    Each of these ranks rounds the gradient from its own queries.
    """
    if heads >= tp:
        return _columns(layer, rounding, tp, x)
    weights = layer.weight.chunk(heads)
    biases = [0.0] * heads if layer.bias is None else layer.bias.chunk(heads)
    parts = []
    for rank in range(tp):
        head = rank * heads // tp
        parts.append(_EmulatedProduct.apply(x, weights[head], rounding) + biases[head])
    return torch.cat(parts, -1)


def _rows(layer: nn.Linear, rounding: Rounding, tp: int, x: Tensor) -> Tensor:
    parts = zip(x.chunk(tp, -1), layer.weight.chunk(tp, 1), strict=True)
    return sum(
        (_EmulatedProduct.apply(x_part, weight_part, rounding) for x_part, weight_part in parts),
        start=torch.zeros((), dtype=x.dtype),
    )
