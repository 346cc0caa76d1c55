"""From which sizes on a proof computes in parts. No torch here."""

from math import prod

from composer3d.facts.limits import Limits
from composer3d.recipe.schema import Recipe


def limits_of_proof(recipe: Recipe) -> Limits:
    """Return lower limits than those of a job, as a proof has small tensors.

    A round has room for the matrices of two experts: a job computes those of several together.

    Args:
        recipe: a small recipe.
    """
    shapes = [row.shape for row in recipe.parameters.kinds.values()]
    experts = [prod(shape[1:]) for shape in shapes if len(shape) == 3]
    # Few tensors have a multiple of 50 elements, so that most have a part of a row, too.
    return Limits(elements_per_round=max(256, 2 * max(experts, default=0)), row=50, band=2)
