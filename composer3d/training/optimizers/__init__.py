"""Optimizers: one file each, beside the reference that ``verify`` judges its step by.

``contract`` says what an optimizer is, and ``proof`` what its reference is. What the layers below
need to know of an optimizer is its row in ``recipe.optimizers``, which names both classes.
"""

from collections.abc import Iterable

from torch import nn

from composer3d.models.registry import architecture, resolve
from composer3d.parallel import Stages
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import OptimTable, Recipe
from composer3d.training.optimizers.contract import NO_MATRICES, Optimizer, StageMatrices

__all__ = ["Optimizer", "build_optimizer", "build_stages_optimizer"]


def build_stages_optimizer(stages: Stages, recipe: Recipe) -> Optimizer:
    """Build the recipe's optimizer over the parameters of this rank's stages.

    Collective over the ranks of a stage: an optimizer of matrices forms a group of them.
    """
    matrices, mesh = NO_MATRICES, stages.mesh
    if recipe.optim.optimizer.has_matrices:
        names = matrices_of(architecture(recipe.model.architecture), recipe.model, recipe.optim)
        matrices = StageMatrices(names, mesh.stage_group, mesh.device)
    return build_optimizer(stages.named_parameters(), recipe.optim, matrices)


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    table: OptimTable,
    matrices: StageMatrices = NO_MATRICES,
) -> Optimizer:
    """Build the recipe's optimizer over parameters of this rank.

    Parameters that do not require a gradient are left out.

    Args:
        named_parameters: from ``Stages.named_parameters``.
        table: the recipe's ``[optim]``.
        matrices: which of them are matrices, for an optimizer that treats these in another way.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    optimizer: Optimizer = resolve(table.optimizer.code).build(named_parameters, table, matrices)
    return optimizer
