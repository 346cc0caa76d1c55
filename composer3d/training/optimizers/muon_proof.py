"""Muon's step in plain PyTorch, in float64, with the bound of its rounding.

Newton-Schulz is a polynomial of the matrix, so a rounding grows by at most the slope of that
polynomial for singular values, step by step: by 3.4 to the power of 5 with the usual coefficients,
however small the singular values are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.parallel.init import local_part
from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers.adamw_proof import AdamWProof
from composer3d.training.optimizers.proof import OptimizerProof, ReplayedStep, rates_in_proof

# As ``torch.optim.Muon`` has it: a matrix with a smaller norm is not enlarged to 1.
_SMALLEST_NORM = 1e-7
# Bounds the rounding of one step of Newton-Schulz, in units of the dtype's and of the size of a
# matrix whose singular values are all as large as they can be. It has three products, whose sums
# round as random walks do.
_ROUNDINGS_OF_STEP = 16.0


class _Moments(NamedTuple):
    """The moving average of a gradient, and that of its absolute value, which bounds roundings."""

    value: Tensor
    absolute: Tensor


class _Update(NamedTuple):
    """What a whole parameter moves by, without the learning rate.

    Attributes:
        value: with the shape of the parameter.
        bound: how far rounding may move each matrix of it, in the Frobenius norm: (1, 1) or
            (E, 1, 1).
    """

    value: Tensor
    bound: Tensor


class MuonProof(OptimizerProof):
    """Repeats the steps of Muon in float64, of whole matrices, from the ranks' own gradients."""

    def __init__(
        self, optim: OptimTable, dtype: torch.dtype, matrices: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(optim, dtype, matrices)
        self._others = AdamWProof(optim, dtype)
        self._moments: dict[str, _Moments] = {}
        self._updates: dict[str, _Update] = {}
        self._boxes: dict[str, tuple[slice, ...]] = {}

    @staticmethod
    def plain(
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim: OptimTable,
        matrices: frozenset[str],
    ) -> torch.optim.Optimizer:
        """Return a Muon that takes one matrix after the other."""
        return _PlainMuon(list(named_parameters), optim, matrices)

    def record_gradients(
        self, gradients: Mapping[str, Tensor | None], *, norm: float, max_norm: float
    ) -> None:
        """Copy this rank's gradients, and those of the other parts of its matrices.

        Collective over all ranks of the job. Shapes as in ``OptimizerProof``.
        """
        super().record_gradients(gradients, norm=norm, max_norm=max_norm)
        own: dict[str, tuple[tuple[slice, ...], Tensor]] = {}
        wholes: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            if gradient is None or name not in self.matrices:
                continue
            clipped = self.gradients[name]
            assert clipped is not None
            offset = local_part(gradient)[1]
            self._boxes[name] = tuple(
                slice(first, first + size)
                for first, size in zip(offset, clipped.shape, strict=True)
            )
            own[name] = (self._boxes[name], clipped)
            wholes[name] = torch.zeros(gradient.shape, dtype=torch.float64)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        for of_rank in gathered:
            for name in of_rank.keys() & wholes.keys():
                box, part = of_rank[name]
                wholes[name][box] = part
        self._updates = {name: self._advance(name, whole) for name, whole in wholes.items()}

    def step(self, name: str, gradient: Tensor, before: Tensor, *, lr: float) -> ReplayedStep:
        """Repeat one step of one parameter; that of a matrix is known from its whole gradient.

        Shapes as in ``OptimizerProof``.
        """
        if name not in self.matrices:
            return self._others.step(name, gradient, before, lr=lr)
        table, update = self.optim, self._updates[name]
        factor, weight_decay = _rates(name, before, table)
        lr *= factor
        rate = lr * _scale(update.value.shape[-2:], table)
        box = self._boxes[name]
        expected = before * (1 - lr * weight_decay) - rate * update.value[box]
        # The rows of experts that this rank holds; one matrix has no such dim.
        norm_bound = rate * update.bound[box[:-2]]
        eps = torch.finfo(self.dtype).eps
        bound = 4 * eps * (before.abs() + rate * update.value[box].abs())
        return ReplayedStep(expected, bound, norm_bound)

    def _advance(self, name: str, gradient: Tensor) -> _Update:
        """Add a whole gradient to the moments of its parameter, and orthogonalise the result."""
        momentum = self.optim.momentum
        before = self._moments.get(name, _Moments(torch.zeros(()), torch.zeros(())))
        after = _Moments(
            momentum * before.value + (1 - momentum) * gradient,
            momentum * before.absolute + (1 - momentum) * gradient.abs(),
        )
        self._moments[name] = after
        value, absolute = after
        if self.optim.nesterov:
            value = (1 - momentum) * gradient + momentum * value
            absolute = (1 - momentum) * gradient.abs() + momentum * absolute
        if gradient.dim() == 2:
            update, bound = _orthogonalise(value, absolute, self.optim, self.dtype)
            return _Update(update, torch.full((1, 1), bound, dtype=torch.float64))
        pairs = [
            _orthogonalise(*matrix, self.optim, self.dtype)
            for matrix in zip(value, absolute, strict=True)
        ]
        bounds = torch.tensor([bound for _, bound in pairs], dtype=torch.float64)
        return _Update(torch.stack([update for update, _ in pairs]), bounds[:, None, None])


def _orthogonalise(
    matrix: Tensor, absolute: Tensor, table: OptimTable, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Run Newton-Schulz on (F, C) in float64, and bound what it would round in ``dtype``.

    Returns:
        The result, and a bound of the Frobenius norm of its error.
    """
    a, b, c = table.newton_schulz
    eps = torch.finfo(dtype).eps
    norm = max(matrix.norm().item(), _SMALLEST_NORM)
    # The sums of the moments round by their terms, and these may cancel.
    error = 8 * eps * absolute.norm().item() / norm + 4 * eps
    x, largest = matrix / norm, 1.0
    for _ in range(table.newton_schulz_steps):
        values = torch.linspace(0.0, largest, 1000, dtype=torch.float64)
        # What the step makes of singular values, and its slope.
        moved = a * values + b * values**3 + c * values**5
        slope = (a + 3 * b * values**2 + 5 * c * values**4).abs().max().item()
        terms = abs(a) * largest + abs(b) * largest**3 + abs(c) * largest**5
        of_step = _ROUNDINGS_OF_STEP * eps * terms * math.sqrt(min(matrix.shape))
        error = 1.01 * slope * error + of_step
        largest = 1.01 * moved.abs().max().item()
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x, error


def _rates(name: str, parameter: Tensor, table: OptimTable) -> tuple[float, float]:
    """Return the factor of a matrix's learning rate, and its weight decay."""
    factor, decay = rates_in_proof(name, parameter, table)
    return factor if table.matrix_lr is None else factor * table.matrix_lr / table.lr, decay


def _scale(shape: Sequence[int], table: OptimTable) -> float:
    """Return the factor of the learning rate of a matrix of this shape."""
    rows, columns = shape
    if table.lr_scale == "original":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


class _PlainMuon(torch.optim.Optimizer):
    """Muon of whole matrices in float64, and AdamW of all else."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        optim: OptimTable,
        matrices: frozenset[str],
    ) -> None:
        self._table = optim
        others = [(name, parameter) for name, parameter in named if name not in matrices]
        self._others = AdamWProof.plain(others, optim)
        self._of_matrices: list[dict[str, Any]] = []
        for name, parameter in named:
            if name in matrices:
                factor, decay = _rates(name, parameter, optim)
                group = {"params": [parameter], "lr_factor": factor, "weight_decay": decay}
                self._of_matrices.append(group)
        super().__init__([*self._others.param_groups, *self._of_matrices], {"lr": optim.lr})
        self._others.param_groups = self.param_groups[: len(self._others.param_groups)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        table = self._table
        self._others.step()
        for group in self._of_matrices:
            (weight,), lr = group["params"], group["lr"]
            if weight.grad is None:
                continue
            state = self.state[weight]
            average = state.get("average", torch.zeros_like(weight))
            average = table.momentum * average + (1 - table.momentum) * weight.grad
            state["average"] = average
            ahead = (1 - table.momentum) * weight.grad + table.momentum * average
            update = ahead if table.nesterov else average
            matrices = update.reshape(-1, *update.shape[-2:])
            moved = [_orthogonalise(m, m.abs(), table, m.dtype)[0] for m in matrices]
            rate = lr * _scale(weight.shape[-2:], table)
            weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_(rate * torch.stack(moved).view_as(weight))
