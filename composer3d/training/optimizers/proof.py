"""What ``verify`` judges an optimizer's step by. It shares no code with the step that it judges.

A proof does not compare the weights of a rank with those of the one-process training alone. An
optimizer may amplify the rounding of a gradient (``verify.rounding``), so its step is repeated in
float64 from the rank's own gradients, which have been judged already.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable


class ReplayedStep(NamedTuple):
    """The step of one shard in float64.

    Attributes:
        weight: the shard after the step.
        bound: how far rounding may move each element of it; with the shard's shape.
        norm_bound: how far rounding may move each matrix of it besides, in the Frobenius norm: a
            number for each, (1, 1) or (E, 1, 1). None: not at all.
    """

    weight: Tensor
    bound: Tensor
    norm_bound: Tensor | None = None


class OptimizerProof(ABC):
    """Repeats the steps of an optimizer on one rank's shards, in float64.

    It takes only the gradients and their norm from the composed job, both of which are compared
    with the reference. It computes states and clipping itself, and takes the weights and the
    learning rate of the reference.

    Args:
        optim: the settings of the optimizer.
        dtype: the dtype of the composed job's parameters and optimizer.
        matrices: the names of the parameters that ``recipe.matrices`` finds.

    Attributes:
        optim, matrices: as given.
        gradients: this rank's shards of the last recorded gradients, clipped, in float64.
    """

    def __init__(
        self, optim: OptimTable, dtype: torch.dtype, matrices: frozenset[str] = frozenset()
    ) -> None:
        self.optim, self.dtype, self.matrices = optim, dtype, matrices
        self.gradients: dict[str, Tensor | None] = {}

    @staticmethod
    @abstractmethod
    def plain(
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optim: OptimTable,
        matrices: frozenset[str],
    ) -> torch.optim.Optimizer:
        """Return the optimizer of the plain training, which has one process and float64.

        It has the learning rate of a step, times "lr_factor", in each of its ``param_groups``.
        Parameters without a gradient must stay as they are.
        """

    @abstractmethod
    def step(self, name: str, gradient: Tensor, before: Tensor, *, lr: float) -> ReplayedStep:
        """Repeat one step of one parameter, and advance the state that is kept of it.

        Args:
            name: the name of the parameter.
            gradient: the clipped gradient of this rank's shard, with its shape, in float64 on the
                CPU.
            before, lr: as in ``remove_rounding``.
        """

    def record_gradients(
        self, gradients: Mapping[str, Tensor | None], *, norm: float, max_norm: float
    ) -> None:
        """Copy this rank's shards of a step's gradients, and clip the copies.

        Call it after backward and before the job clips the gradients in place. No collective,
        unless the optimizer needs more than its own shards.

        Args:
            gradients: tensors or DTensors by the name of the parameter, with its shape and
                placements; None for no gradient.
            norm: the norm of all gradients of the job.
            max_norm: the largest norm after clipping; 0 means no clipping.
        """
        scale = max_norm / norm if 0 < max_norm < norm else 1.0
        self.gradients = {
            name: None if gradient is None else _local_float64(gradient) * scale
            for name, gradient in gradients.items()
        }

    def remove_rounding(
        self, name: str, weight: Tensor, before: Tensor, *, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Replay the last recorded step of one parameter, and remove rounding from ``weight``.

        Call it once for each parameter and step. It advances the state of the parameter.

        Args:
            name: the name of the parameter.
            weight: this rank's shard after the job's step, in float64 on the CPU.
            before: the same shard before the step, in float64 on the CPU.
            lr: the learning rate of the step, before ``optim.groups`` changes it.

        Returns:
            Two tensors of the shard's shape. The first is ``weight``, moved towards the replayed
            weight by at most the bound of its rounding. The second is the replayed weight.
        """
        gradient = self.gradients[name]
        if gradient is None:
            # The optimizer skips a parameter that has no gradient.
            return weight, before
        expected, bound, norm_bound = self.step(name, gradient, before, lr=lr)
        diff = weight - expected
        diff = diff.sign() * (diff.abs() - bound).clamp(min=0)
        if norm_bound is not None:
            norm = diff.norm(dim=(-2, -1), keepdim=True)
            diff *= (1 - norm_bound / norm.clamp(min=1e-300)).clamp(min=0)
        return expected + diff, expected


def rates_in_proof(name: str, parameter: Tensor, optim: OptimTable) -> tuple[float, float]:
    """Return the factor of a parameter's learning rate, and its weight decay.

    ``recipe.rates`` says the same, and is what the proof judges: so this is written a second time.

    Args:
        name: the global name of the parameter.
        parameter: the parameter of any shape, or a shard of it with as many dims.
        optim: the recipe's ``[optim]``.
    """
    factor, decay = 1.0, optim.weight_decay if parameter.dim() > 1 else 0.0
    # The first table of the recipe counts, so it comes last here.
    for group in reversed(optim.groups or ()):
        if any(fnmatch.fnmatchcase(name, glob) for glob in group.train):
            usual = optim.weight_decay if parameter.dim() > 1 else 0.0
            factor = group.lr_factor
            decay = usual if group.weight_decay is None else group.weight_decay
    return factor, decay


def _local_float64(tensor: Tensor) -> Tensor:
    """Return a copy of this rank's shard of a tensor, in float64 on the CPU."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.to("cpu", torch.float64, copy=True)
