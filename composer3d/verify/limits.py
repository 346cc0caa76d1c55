"""How long a proof may take, and from which sizes on it computes in parts. No torch here."""

from math import prod

from composer3d.facts.limits import PartLimits
from composer3d.recipe.schema import Recipe

# The seconds for one run of the reference or of the composed job, and for a rank that waits for
# another one there. Each rank of a compiled layout compiles its blocks, which takes minutes where
# many ranks share few cores. Meanwhile the ranks of later stages wait for their first message.
_RUN_S, _WAIT_S = 240.0, 60.0
_COMPILED_RUN_S, _COMPILED_WAIT_S = 960.0, 900.0


def run_limit_s(recipe: Recipe) -> float:
    """Return the seconds that one run of a small recipe may take."""
    return _COMPILED_RUN_S if recipe.compile.enabled else _RUN_S


def wait_limit_s(recipe: Recipe) -> float:
    """Return the seconds that a rank of a small recipe may wait for another one."""
    return _COMPILED_WAIT_S if recipe.compile.enabled else _WAIT_S


def limits_of_proof(recipe: Recipe) -> PartLimits:
    """Return lower limits than those of a job, as a proof has small tensors.

    A round has room for the matrices of two experts: a job computes those of several together.

    Args:
        recipe: a small recipe.
    """
    shapes = [row.shape for row in recipe.parameters.kinds.values()]
    experts = [prod(shape[1:]) for shape in shapes if len(shape) == 3]
    # Few tensors have a multiple of 50 elements, so that most have a part of a row, too.
    return PartLimits(elements_per_round=max(256, 2 * max(experts, default=0)), row=50, band=2)
