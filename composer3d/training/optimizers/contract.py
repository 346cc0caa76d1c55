"""What an optimizer is: it is built from a recipe's table, and steps as the device decides.

Nothing here depends on the rank: DTensors are used like tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.recipe.optimizers import OptimizerFacts
from composer3d.recipe.rates import Rates, rates_of
from composer3d.recipe.schema import OptimTable


class StageMatrices(NamedTuple):
    """Which parameters are matrices that an optimizer may work on as a whole, and who has them.

    Attributes:
        names: the global names of these parameters (F, C) or (E, F, C), also of other stages.
        group: the ranks that share a pipeline stage; None if that is this rank alone.
        device: that of the group.
    """

    names: frozenset[str]
    group: dist.ProcessGroup | None
    device: torch.device


NO_MATRICES = StageMatrices(frozenset(), None, torch.device("cpu"))


class Optimizer(torch.optim.Optimizer, ABC):
    """An optimizer of one rank's parameters.

    It keeps its state in ``state[parameter]``, under the names of ``facts``.

    Attributes:
        facts: its row of ``recipe.optimizers``.
        matrix_names: the parameters whose state is that of a matrix.
    """

    facts: ClassVar[OptimizerFacts]
    matrix_names: frozenset[str] = frozenset()

    @classmethod
    @abstractmethod
    def build(
        cls,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        table: OptimTable,
        matrices: StageMatrices,
    ) -> Self:
        """Build the optimizer as ``build_optimizer`` describes it."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step: each group has its factor of ``lr``."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_factor"]

    @abstractmethod
    def apply_gradients(self, *, divisor: Tensor, is_good: Tensor) -> None:
        """Divide all gradients by ``divisor`` and update the weights; nothing if not ``is_good``.

        The device decides: the host must not wait for either scalar. Only parameters in host
        memory (``memory.cpu_offload``) have to wait for them.

        Args:
            divisor: float64 scalar of at least 1.
            is_good: bool scalar. If it is false, no weight and no state changes.
        """


def groups_by_rates(
    named_parameters: Iterable[tuple[str, nn.Parameter]], table: OptimTable
) -> list[dict[str, Any]]:
    """Group the parameters that require a gradient by their rates (``recipe.rates``).

    Each group has the keys "params", "lr_factor" and "weight_decay".
    """
    groups: dict[Rates, list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups.setdefault(rates_of(name, parameter.ndim, table), []).append(parameter)
    return [{"params": parameters, **rates._asdict()} for rates, parameters in groups.items()]
