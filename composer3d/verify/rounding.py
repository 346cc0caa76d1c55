"""Tell rounding from errors in a float32 proof: measure or bound the rounding of each tensor.

The first step of AdamW is nearly the sign of the gradient. So one rounding of a gradient near zero
can change a weight by a whole learning rate. For this reason a float32 proof judges every step by
itself. The one-process run computes in float64 on weights that float32 can hold, and the ranks
begin each step with these weights.

- A gradient is compared with the exact gradient. ``measure_noise`` measures how far the gradient of
  one process in float32 is from the exact one.
- A weight is compared with an ``AdamWReplay``, which repeats the optimizer's step in float64 from
  the rank's own gradients. A step has few roundings. They are bounded element by element.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable

Module = TypeVar("Module", bound=nn.Module)

# The relative error of one rounding to float32 is at most 2^-24. A weight has three roundings: the
# factor of the decay, the product with this factor, and the subtraction of the update.
_WEIGHT_ROUNDING = 2.0**-22
# The relative error of an update: about twenty roundings, and the error of the gradient norm by
# which the gradient is clipped.
_UPDATE_ROUNDING = 2e-5
# A square below 2^-149 underflows in float32. This number bounds the root of a bias-corrected
# second moment that has lost such a square.
_SMALLEST_ROOT = 1e-21


def round_to_float32(model: nn.Module) -> None:
    """Round the weights of a float64 model to numbers that float32 can hold, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.float())


def measure_noise(
    model: Module,
    exact: Mapping[str, Tensor],
    gradients_of: Callable[[Module, int], Mapping[str, Tensor]],
) -> dict[str, float]:
    """Measure how far float32 gradients of ``model`` are from the exact ones, on one process.

    Args:
        model: a float64 model, with weights that float32 can hold. It is not changed.
        exact: the gradients of ``model`` in float64, by name, with the shapes of the parameters.
        gradients_of: a function of a model and a number of samples. It returns the model's
            gradients by name, computed from that many samples at a time; 0 means all at once.

    Returns:
        For each name, the largest norm of the difference in four runs. The batch is computed whole
        and sample by sample, with the weights as they are and with every weight moved to a
        neighbouring float32 number. The moved weights stand for operations that round differently.
    """
    plain = copy.deepcopy(model).float()
    moved = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            direction = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, direction * torch.inf))

    runs = [gradients_of(copied, rows) for copied in (plain, moved) for rows in (0, 1)]
    return {
        name: max(_norm(run[name].double() - tensor) for run in runs)
        for name, tensor in exact.items()
    }


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

    It takes only the gradients from the composed job. It computes moments and clipping itself, and
    takes the weights and the learning rate of the reference.

    Args:
        optim: the settings of AdamW.
        norms: the exact gradient norm of each step, by which gradients are clipped.
        clipped: the exact gradient norm of each step after clipping.
    """

    def __init__(self, optim: OptimTable, norms: Sequence[float], clipped: Sequence[float]) -> None:
        self._optim, self._norms, self._clipped = optim, norms, clipped
        self._gradients: dict[str, Tensor | None] = {}
        self._states: dict[str, _State] = {}

    def record_gradients(self, step: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Copy this rank's shards of a step's gradients, and clip the copies. No collective.

        Call it after backward and before the job clips the gradients in place.

        Args:
            step: the step, counted from 0.
            gradients: tensors or DTensors by the name of the parameter, with its shape and
                placements; None for no gradient.
        """
        norm, max_norm = self._norms[step], self._clipped[step]
        scale = max_norm / norm if max_norm < norm else 1.0
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
        table = self._optim
        beta1, beta2 = table.betas
        step_size = lr / (1 - beta1**state.steps)
        root = (state.second_moment / (1 - beta2**state.steps)).sqrt() + table.eps
        decay = lr * table.weight_decay if decayed else 0.0
        expected = before * (1 - decay) - step_size * state.first_moment / root

        weight_bound = _WEIGHT_ROUNDING * before.abs()
        update_bound = (_UPDATE_ROUNDING + _SMALLEST_ROOT / root) * step_size
        bound = weight_bound + update_bound * state.absolute_moment / root
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
