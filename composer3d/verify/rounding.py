"""What float32 may differ by in a proof: rounding, measured or bounded for each tensor, and nothing else.

A difference of one rounding in a gradient near zero is a whole learning rate in the weight: the first step of AdamW is
nearly the sign of the gradient. So in float32 every step is judged by itself. The one-process run computes in float64
on weights that float32 can hold, and the ranks begin each step with these weights.

- A gradient is compared with the exact one. ``measure_noise`` measures how far float32 alone, on one process, is from it.
- A weight is compared with a ``AdamWReplay``: the optimizer's step once more, in float64, from the rank's own gradients.
  The roundings of that step are few, and are bounded element by element.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable

Module = TypeVar("Module", bound=nn.Module)
# One rounding of a float32 number is at most 2^-24 of it. A weight is rounded three times: the factor of the decay, the
# product with it, the difference with the update.
_OF_WEIGHT = 2.0**-22
# Of the update: some twenty roundings a step, and the difference that the gradient norm, by which it is clipped, may
# have.
_OF_UPDATE = 2e-5
_SMALLEST_ROOT = 1e-21  # of a square that float32 loses (below 2^-149), its bias corrected


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
    """How far from ``exact`` float32 computes the gradients of ``model``, whose weights float32 can hold.

    Args:
        model: in float64.
        exact: its gradients by name.
        gradients_of: the gradients of a model, computed over so many samples at a time; 0 is all of them.

    Returns:
        For each tensor the largest distance of four runs: the batch whole and sample by sample, as it is and with every
        weight moved to a neighbouring float32 number, as an operation that rounds differently would.
    """
    plain = copy.deepcopy(model).float()
    moved = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            way = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, way * torch.inf))
    runs = [gradients_of(each, rows) for each in (plain, moved) for rows in (0, 1)]
    return {
        name: max(_norm(run[name].double() - tensor) for run in runs)
        for name, tensor in exact.items()
    }


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


class AdamWReplay:
    """AdamW on one rank's shards, computed once more in float64.

    Args:
        optim: its settings.
        norms: the exact gradient norm of each step, by which gradients are clipped.
        clipped: the same after clipping.

    Of the job it takes the gradients alone. Weights, moments, clipping and learning rate are its own.
    """

    def __init__(self, optim: OptimTable, norms: Sequence[float], clipped: Sequence[float]) -> None:
        self._optim, self._norms, self._clipped = optim, norms, clipped
        self._gradients: dict[str, Tensor | None] = {}
        # By name: first moment, second moment, first moment of absolute values, number of steps.
        self._state: dict[str, tuple[Any, Any, Any, int]] = {}

    def record_gradients(self, step: int, gradients: Mapping[str, Tensor | None]) -> None:
        """Keep the gradients of a step as the backward has left them: the job clips them in place."""
        norm, most = self._norms[step], self._clipped[step]
        scale = most / norm if most < norm else 1.0
        self._gradients = {
            name: None if grad is None else _local(grad) * scale for name, grad in gradients.items()
        }

    def remove_rounding(
        self, name: str, weight: Tensor, before: Tensor, *, lr: float, decayed: bool
    ) -> tuple[Tensor, Tensor]:
        """Take the step of one parameter, in float64, and take off its ``weight`` what rounding explains.

        Args:
            weight: what the job has made of the shard ``before``.
            decayed: whether the parameter has weight decay.

        Returns:
            The weight, moved towards what it should be by at most the bound of its rounding; and what it should be.
        """
        table, grad = self._optim, self._gradients[name]
        if grad is None:  # the optimizer leaves out what has no gradient
            return weight, before
        first, second, size, count = self._state.get(name, (0.0, 0.0, 0.0, 0))
        first = table.betas[0] * first + (1 - table.betas[0]) * grad
        second = table.betas[1] * second + (1 - table.betas[1]) * grad * grad
        # Where terms cancel, the roundings are those of the terms.
        size = table.betas[0] * size + (1 - table.betas[0]) * grad.abs()
        count += 1
        self._state[name] = first, second, size, count
        rate = lr / (1 - table.betas[0] ** count)
        root = (second / (1 - table.betas[1] ** count)).sqrt() + table.eps
        wanted = before * (1 - lr * table.weight_decay * decayed) - rate * first / root
        bound = (
            _OF_WEIGHT * before.abs() + (_OF_UPDATE + _SMALLEST_ROOT / root) * rate * size / root
        )
        off = weight - wanted
        return wanted + off.sign() * (off.abs() - bound).clamp(min=0), wanted


def _local(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.to("cpu", torch.float64, copy=True)
