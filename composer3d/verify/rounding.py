"""Separate rounding from errors in a float32 proof: measure or bound it for each tensor.

A difference of one rounding in a gradient near zero is a whole learning rate in the weight, because
the first step of AdamW is nearly the sign of the gradient. So in float32 every step is judged by
itself. The one-process run computes in float64 on weights that float32 can hold, and the ranks
begin each step with these weights.

- A gradient is compared with the exact one. ``measure_noise`` measures how far float32 alone, on
  one process, is from it.
- A weight is compared with an ``AdamWReplay``: the optimizer's step once more, in float64, from the
  rank's own gradients. That step has few roundings. They are bounded element by element.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable

Module = TypeVar("Module", bound=nn.Module)

# One rounding of a float32 number is at most 2^-24 of it. A weight is rounded three times: the
# factor of the decay, the product with it, and the difference with the update.
_WEIGHT_ROUNDING = 2.0**-22
# Some twenty roundings of the update in a step, and the possible error of the gradient norm that
# clips it.
_UPDATE_ROUNDING = 2e-5
# Float32 loses a square below 2^-149. This is the largest root of a second moment that lost one,
# after the correction of its bias.
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
    """Measure how far float32 gradients of ``model`` are from the exact ones.

    Args:
        model: in float64, with weights that float32 can hold.
        exact: its gradients by name.
        gradients_of: computes the gradients of a model, a number of samples at a time; 0 is all.

    Returns:
        For each tensor, the largest distance of four runs. The batch is computed whole and sample
        by sample, with the weights as they are and with every weight moved to a neighbouring
        float32 number. Moved weights stand for an operation that rounds differently.
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
        second_moment: the moving average of its square.
        absolute_moment: the moving average of its absolute value, which bounds the roundings of the
            first moment if its terms cancel.
        steps: the number of steps taken.
    """

    first_moment: Tensor
    second_moment: Tensor
    absolute_moment: Tensor
    steps: int


class AdamWReplay:
    """Compute AdamW on one rank's shards once more, in float64.

    Of the job it uses the gradients alone. Weights, moments, clipping and learning rate are its
    own.

    Args:
        optim: the settings of AdamW.
        norms: by step, the exact gradient norm, which gradients are clipped by.
        clipped: by step, the same norm after clipping.
    """

    def __init__(self, optim: OptimTable, norms: Sequence[float], clipped: Sequence[float]) -> None:
        self._optim, self._norms, self._clipped = optim, norms, clipped
        self._gradients: dict[str, Tensor | None] = {}
        self._states: dict[str, _State] = {}

    def record_gradients(self, step: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Copy and clip the gradients of a step, as backward left them.

        Call it before the job clips them, which it does in place.
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
        """Replay the step of one parameter, and remove from ``weight`` what rounding explains.

        Args:
            name: of the parameter.
            weight: the shard after the job's step.
            before: the shard before it.
            lr: the learning rate of the step.
            decayed: whether the parameter has weight decay.

        Returns:
            The job's weight, moved towards the replayed one by at most the bound of its rounding;
            and the replayed weight.
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
    """Copy this rank's shard of a tensor to the CPU, in float64."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.to("cpu", torch.float64, copy=True)
