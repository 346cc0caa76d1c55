"""How FSDP cuts the tensors of a model, which a proof must show. No torch here."""

from typing import Literal

from composer3d.planner.traffic import cut_of, sharded_shape
from composer3d.recipe.schema import Recipe

# How FSDP shards the rows of a tensor. "even": all ranks hold equal numbers of rows. "the last has
# fewer": the last rank holds fewer than the first, but at least one.
Cut = Literal["even", "the last has fewer", "some have none"]


def cut_of_rows(rows: int, shards: int) -> Cut:
    """Return how rows are cut into equal shards, the last of which may be smaller or empty."""
    if rows % shards == 0:
        return "even"
    return "the last has fewer" if -(-rows // shards) * (shards - 1) < rows else "some have none"


def cuts_of_tensors(recipe: Recipe) -> dict[str, Cut]:
    """Return how FSDP cuts each kind of parameter that it shards, on the first tp and ep rank.

    In the names, ``*`` stands for the number of a block.

    Raises PlanError as ``Recipe.parameters``.
    """
    mesh, parallel = recipe.mesh, recipe.parallel
    found: dict[str, Cut] = {}
    for name, row in recipe.parameters.kinds.items():
        cut = cut_of(row, recipe.model, tp=mesh.tp, sequence_parallel=parallel.sequence_parallel)
        shards = mesh.efsdp if cut == "experts" else mesh.dp_shard * mesh.cp
        if parallel.zero and shards > 1 and not row.tied_to:
            shape, dim = sharded_shape(row, cut, mesh)
            found[name] = cut_of_rows(shape[dim], shards)
    return found
