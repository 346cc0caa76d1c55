"""Optimizers: one file each, beside the reference that ``verify`` judges its step by.

``contract`` says what an optimizer is, and ``proof`` what its reference is. What the layers below
need to know of an optimizer is its row in ``recipe.optimizers``, which names both classes.
"""

from collections.abc import Iterable

from torch import nn

from composer3d.models.registry import resolve
from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers.contract import Optimizer

__all__ = ["Optimizer", "build_optimizer"]


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], table: OptimTable
) -> Optimizer:
    """Build the recipe's optimizer over the parameters of this rank.

    Parameters that do not require a gradient are left out.

    Args:
        named_parameters: from ``Stages.named_parameters``.
        table: the recipe's ``[optim]``.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    optimizer: Optimizer = resolve(table.optimizer.code).build(named_parameters, table)
    return optimizer
