"""AdamW's step in plain PyTorch, in float64, with the bound of its rounding.

AdamW divides a gradient by the root of its second moment, which can be as small as the gradient. So
one rounding of a gradient near zero can change a weight by a whole learning rate, or by far more if
``optim.betas`` lets the second moment forget. From the rank's own gradients a step has few
roundings. They are bounded element by element, from the terms of the sums.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers.proof import OptimizerProof, ReplayedStep, rates_in_proof


class _Roundings(NamedTuple):
    """The roundings of a step in one dtype.

    Attributes:
        weight: relative to the weight. It has three roundings: the factor of the decay, the
            product with this factor, and the subtraction of the update.
        update: the relative error of an update: about twenty roundings, and that of the divisor
            by which the gradient is clipped.
        smallest_root: bounds the root of a bias-corrected second moment that has lost a square,
            because small squares underflow.
    """

    weight: float
    update: float
    smallest_root: float


# One rounding is at most 2^-24 in float32, and 2^-53 in float64.
_ROUNDINGS = {
    torch.float32: _Roundings(weight=2.0**-22, update=2e-5, smallest_root=1e-21),
    torch.float64: _Roundings(weight=2.0**-51, update=2.0**-46, smallest_root=1e-160),
}
# Every implementation computes the corrections of moments, 1 - beta^steps, in float64. It rounds
# the power, which is close to 1 if beta is, so this error is relative to 1.
_POWER_ROUNDING = 2.0**-51


class _State(NamedTuple):
    """The state of one shard, in float64.

    Attributes:
        first_moment: the moving average of the gradient.
        second_moment: the moving average of the squared gradient.
        absolute_moment: the moving average of the gradient's absolute value. It bounds the
            roundings of the first moment, also if the terms of the first moment cancel.
        steps: the number of steps taken.
    """

    first_moment: Tensor
    second_moment: Tensor
    absolute_moment: Tensor
    steps: int


class AdamWProof(OptimizerProof):
    """Repeats the steps of AdamW on one rank's shards, in float64."""

    def __init__(
        self, optim: OptimTable, dtype: torch.dtype, matrices: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(optim, dtype, matrices)
        self._states: dict[str, _State] = {}

    @staticmethod
    def plain(
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim: OptimTable,
        matrices: frozenset[str] = frozenset(),
    ) -> torch.optim.Optimizer:
        """Return an AdamW with a group for each parameter."""
        groups = []
        for name, parameter in named_parameters:
            factor, decay = rates_in_proof(name, parameter, optim)
            groups.append({"params": [parameter], "lr_factor": factor, "weight_decay": decay})
        return torch.optim.AdamW(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False
        )

    def step(self, name: str, gradient: Tensor, before: Tensor, *, lr: float) -> ReplayedStep:
        """Repeat one step of one parameter, all of whose tensors have the shape of this shard."""
        state = self._advance(name, gradient)
        table, roundings = self.optim, _ROUNDINGS[self.dtype]
        factor, weight_decay = rates_in_proof(name, before, table)
        lr *= factor
        corrections = [1 - beta**state.steps for beta in table.betas]
        step_size = lr / corrections[0]
        root = (state.second_moment / corrections[1]).sqrt() + table.eps
        expected = before * (1 - lr * weight_decay) - step_size * state.first_moment / root

        update = roundings.update + _POWER_ROUNDING * sum(1 / number for number in corrections)
        update_bound = (update + roundings.smallest_root / root) * step_size
        bound = roundings.weight * before.abs() + update_bound * state.absolute_moment / root
        return ReplayedStep(expected, bound)

    def _advance(self, name: str, gradient: Tensor) -> _State:
        """Add a gradient to the moments of a parameter."""
        beta1, beta2 = self.optim.betas
        zeros = torch.zeros_like(gradient)
        state = self._states.get(name, _State(zeros, zeros, zeros, steps=0))
        state = _State(
            first_moment=beta1 * state.first_moment + (1 - beta1) * gradient,
            second_moment=beta2 * state.second_moment + (1 - beta2) * gradient * gradient,
            absolute_moment=beta1 * state.absolute_moment + (1 - beta1) * gradient.abs(),
            steps=state.steps + 1,
        )
        self._states[name] = state
        return state
