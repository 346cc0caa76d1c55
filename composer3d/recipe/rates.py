"""The learning rate and the weight decay of each parameter. No torch here."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from composer3d.recipe.schema import OptimGroup, OptimTable


class Rates(NamedTuple):
    """How an optimizer treats a parameter.

    Attributes:
        lr_factor: the learning rate of the schedule is multiplied by it.
        weight_decay: its weight decay.
    """

    lr_factor: float
    weight_decay: float


def rates_of(name: str, n_dims: int, optim: OptimTable) -> Rates:
    """Return the rates of a parameter.

    Without a group in ``optim.groups``, parameters with two dims or more have ``weight_decay``.
    Vectors, such as norm weights and biases, have none. The biases of experts are no vectors: one
    parameter has those of all experts.

    Args:
        name: the global name of the parameter.
        n_dims: the number of its dims.
        optim: the recipe's ``[optim]``.
    """
    usual_decay = optim.weight_decay if n_dims >= 2 else 0.0
    group = group_of(name, optim)
    if group is None:
        return Rates(1.0, usual_decay)
    return Rates(group.lr_factor, usual_decay if group.weight_decay is None else group.weight_decay)


def matrix_lr_factor(optim: OptimTable) -> float:
    """Return the factor of the schedule's learning rate for the matrices of ``optim.matrix_lr``."""
    return 1.0 if optim.matrix_lr is None else optim.matrix_lr / optim.lr


def group_of(name: str, optim: OptimTable) -> OptimGroup | None:
    """Return the first table of ``optim.groups`` with a glob that matches ``name``, if any does."""
    for group in optim.groups or ():
        if any(fnmatchcase(name, glob) for glob in group.train):
            return group
    return None
