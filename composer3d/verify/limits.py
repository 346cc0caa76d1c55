"""How long a proof may take, and from which sizes on it computes in parts. No torch here."""

from collections import defaultdict
from functools import lru_cache
from math import prod

from composer3d.facts.limits import PartLimits
from composer3d.planner.traffic import rounds_of_matrices
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


@lru_cache(maxsize=256)
def limits_of_proof(recipe: Recipe) -> PartLimits:
    """Return lower limits than those of a job, as a proof has small tensors.

    Args:
        recipe: a small recipe.
    """
    # Few tensors have a multiple of 50 elements, so that most have a part of a row, too.
    return PartLimits(
        elements_per_round=_room_for_two(recipe), row=50, initial_weights=1000, band=2
    )


def _room_for_two(recipe: Recipe) -> int:
    """Return the size of two matrices, so that there are several rounds, and several in a round.

    They are the two largest of the rank that owns the most matrices, or its largest if it owns two.
    """
    if not recipe.optim.optimizer.has_matrices:
        return 1
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for pp_rank in range(recipe.mesh.pp):
        for units in rounds_of_matrices(recipe, pp_rank):
            for unit in units:
                sizes[pp_rank, unit.owner].append(prod(unit.box.shape))
    of_owners = sorted(sizes.values(), key=len)
    first, *rest = sorted(of_owners[-1], reverse=True) if of_owners else [1]
    return first + rest[0] if len(rest) > 1 else first
