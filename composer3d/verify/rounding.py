"""Tell rounding from errors: measure or bound the rounding of each number that a proof compares.

No fixed share of a number says how much rounding may move it. A sum of large terms that cancel is
rounded by a share of its terms. The gradient of a query that sees one key is such a sum: it is
zero, and what a computer finds instead is rounding alone. AdamW makes it worse. It divides a
gradient by the root of its second moment, which can be as small as the gradient. So one rounding
of a gradient near zero can change a weight by a whole learning rate, or by far more if
``optim.betas`` lets the second moment forget.

For this reason a proof judges every step by itself, in both dtypes. The ranks begin each step with
the weights of the one-process run. Then nothing is left that AdamW could amplify:

- A loss or a gradient is compared with that of one process in float64, from the same weights.
  ``measure_noise`` measures how far rounding alone moves it: the same batch is computed again in
  the dtype of the proof, in another order, and from weights that are one rounding away.
- A weight is compared with an ``AdamWReplay``, which repeats the optimizer's step in float64 from
  the rank's own gradients, that have been judged already. A step has few roundings. They are
  bounded element by element, from the terms of the sums.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable

Module = TypeVar("Module", bound=nn.Module)


class _Roundings(NamedTuple):
    """The roundings of a step of AdamW in one dtype.

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


def round_to_float32(model: nn.Module) -> None:
    """Round the weights of a float64 model to numbers that float32 can hold, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.float())


class Results(NamedTuple):
    """What a model computes from a batch: its mean loss, and its gradients by name.

    The gradients have the shapes of the parameters.
    """

    loss: float
    gradients: Mapping[str, Tensor]


class Noise(NamedTuple):
    """How far rounding alone moves the results of one process.

    Attributes:
        loss: the largest distance of a loss.
        gradients: the largest norm of the difference of each gradient, by name.
        norm_of_all: the norm of the gradients of all parameters, also of those that do not train.
            It is the size of what backward adds up, also if each trained gradient is zero.
    """

    loss: float
    gradients: dict[str, float]
    norm_of_all: float


def noisy_copies(model: Module, dtype: torch.dtype, trainable: Sequence[str]) -> list[Module]:
    """Copy a float64 model, with weights that ``dtype`` can hold, for ``measure_noise``.

    Args:
        model: the model. It is not changed.
        dtype: the dtype of the copies.
        trainable: the names of the parameters that can have a gradient. In the copies they have.

    Returns:
        A copy with the same weights, and one in which each weight is moved to a neighbouring
        number of ``dtype``. It stands for operations that round differently.
    """
    plain = copy.deepcopy(model).to(dtype)
    for name in trainable:
        plain.get_parameter(name).requires_grad_()
    moved = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            direction = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, direction * torch.inf))
    return [plain, moved]


def measure_noise(
    copies: Sequence[Module], exact: Results, compute: Callable[[Module, int], Results]
) -> Noise:
    """Measure how far the results of ``copies`` are from the exact ones, on one process.

    Args:
        copies: the result of ``noisy_copies``.
        exact: what the model itself computes. Its gradients have the shapes of the parameters.
        compute: computes the results of a model, from a number of samples at a time; 0 means all
            at once.

    Returns:
        The largest distances in four runs: each copy computes the batch whole, and sample by
        sample.
    """
    runs = [compute(copied, rows) for copied in copies for rows in (0, 1)]
    return Noise(
        loss=max(abs(run.loss - exact.loss) for run in runs),
        gradients={
            name: max(_norm(run.gradients[name].double() - tensor) for run in runs)
            for name, tensor in exact.gradients.items()
        },
        norm_of_all=math.hypot(*map(_norm, runs[0].gradients.values())),
    )


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


class _State(NamedTuple):
    """The state of AdamW for one shard, in float64.

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


class AdamWReplay:
    """Repeats the steps of AdamW on one rank's shards, in float64.

    It takes only the gradients and their norm from the composed job, both of which are compared
    with the reference. It computes moments and clipping itself, and takes the weights and the
    learning rate of the reference.

    Args:
        optim: the settings of AdamW.
        dtype: the dtype of the composed job's parameters and optimizer.
    """

    def __init__(self, optim: OptimTable, dtype: torch.dtype) -> None:
        self._optim, self._roundings = optim, _ROUNDINGS[dtype]
        self._gradients: dict[str, Tensor | None] = {}
        self._states: dict[str, _State] = {}

    def record_gradients(
        self, gradients: Mapping[str, Tensor | None], *, norm: float, max_norm: float
    ) -> None:
        """Copy this rank's shards of a step's gradients, and clip the copies. No collective.

        Call it after backward and before the job clips the gradients in place.

        Args:
            gradients: tensors or DTensors by the name of the parameter, with its shape and
                placements; None for no gradient.
            norm: the norm of all gradients of the job.
            max_norm: the largest norm after clipping; 0 means no clipping.
        """
        scale = max_norm / norm if 0 < max_norm < norm else 1.0
        self._gradients = {
            name: None if gradient is None else _local_float64(gradient) * scale
            for name, gradient in gradients.items()
        }

    def remove_rounding(
        self, name: str, weight: Tensor, before: Tensor, *, lr: float, decayed: bool
    ) -> tuple[Tensor, Tensor]:
        """Replay the last recorded step of one parameter, and remove rounding from ``weight``.

        Call it once for each parameter and step. It advances the moments.

        Args:
            name: the name of the parameter.
            weight: this rank's shard after the job's step, in float64 on the CPU.
            before: the same shard before the step, in float64 on the CPU.
            lr: the learning rate of the step.
            decayed: whether the parameter has weight decay.

        Returns:
            Two tensors of the shard's shape. The first is ``weight``, moved towards the replayed
            weight by at most the bound of its rounding. The second is the replayed weight.
        """
        gradient = self._gradients[name]
        if gradient is None:
            # The optimizer skips a parameter that has no gradient.
            return weight, before

        state = self._advance(name, gradient)
        table, roundings = self._optim, self._roundings
        corrections = [1 - beta**state.steps for beta in table.betas]
        step_size = lr / corrections[0]
        root = (state.second_moment / corrections[1]).sqrt() + table.eps
        decay = lr * table.weight_decay if decayed else 0.0
        expected = before * (1 - decay) - step_size * state.first_moment / root

        update = roundings.update + _POWER_ROUNDING * sum(1 / number for number in corrections)
        update_bound = (update + roundings.smallest_root / root) * step_size
        bound = roundings.weight * before.abs() + update_bound * state.absolute_moment / root
        diff = weight - expected
        return expected + diff.sign() * (diff.abs() - bound).clamp(min=0), expected

    def _advance(self, name: str, gradient: Tensor) -> _State:
        """Add a gradient to the moments of a parameter."""
        beta1, beta2 = self._optim.betas
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


def _local_float64(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's shard of a tensor, in float64 on the CPU."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.to("cpu", torch.float64, copy=True)
