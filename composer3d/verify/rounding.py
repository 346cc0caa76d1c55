"""Tell rounding from errors: measure or bound the rounding of each number that a proof compares.

No fixed share of a number says how much rounding may move it. A sum of large terms that cancel is
rounded by a share of its terms. The gradient of a query that sees one key is such a sum: it is
zero, and what a computer finds instead is rounding alone. An optimizer can make it worse: one that
divides by the size of the gradients before turns the rounding of a gradient near zero into a step
of a whole learning rate (``training.optimizers``).

For this reason a proof judges every step by itself, in both dtypes. The ranks begin each step with
the weights of the one-process run. Then nothing is left that the optimizer could amplify:

- A loss or a gradient is compared with that of one process in float64, from the same weights.
  ``measure_noise`` measures how far rounding alone moves it: the same batch is computed again in
  the dtype of the proof, in another order, and from weights that are one rounding away.
- A weight is compared with an ``OptimizerProof``, which repeats the optimizer's step in float64
  from the rank's own gradients, that have been judged already, and bounds its few roundings.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def round_to_float32(model: nn.Module) -> None:
    """Round the weights of a float64 model to numbers that float32 can hold, in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.float())


class StepResults(NamedTuple):
    """What a model computes from a batch: its mean loss, and its gradients by name.

    The gradients have the shapes of the parameters. ``mtp_losses`` is what each depth of
    multi-token prediction adds to the loss.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    mtp_losses: tuple[float, ...] = ()


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
    copies: Sequence[Module], exact: StepResults, compute: Callable[[Module, int], StepResults]
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
