"""The small recipe with which ``verify`` repeats an exact proof in float32."""

from collections.abc import Sequence
from dataclasses import replace

from composer3d.facts.errors import UserError
from composer3d.recipe.schema import MeshTable, Recipe
from composer3d.verify.shrink import shrink_to, without_float8

STEPS = 2  # The first step clips its gradients, and the second one has a random batch.

# A mesh of two ranks has one of these axes: the first one that the job has, too.
_AXES = ("dp_shard", "cp", "tp", "dp_replicate")


def is_used_by(full: Recipe) -> bool:
    """Return whether a job computes in float32 or narrower, so that these kernels matter."""
    return full.precision.params != "float64"


def small_recipe(full: Recipe, small_recipes: Sequence[Recipe]) -> Recipe:
    """Return a small recipe that runs, in float32, what a proof in float64 cannot run.

    In float64, the gradients of a clipped step are divided before the optimizer's fused kernel, and
    experts are multiplied one after another. In a job, the kernel divides, and one kernel takes all
    experts. This depends on no mesh, so two ranks are enough. Nothing is compiled, as float64 has
    proven the compiled layout. Products in float8 are products in float32 here: rounding to float8
    would hide what is wrong.

    Args:
        full: the whole recipe.
        small_recipes: the small recipes that stand for it. The smallest of them is taken if
            ``full`` cannot have a mesh of two ranks.
    """
    plain = _without_compiler(without_float8(full))
    try:
        return shrink_to(plain, _mesh_of_two(full.mesh))
    except UserError:
        smallest = min(small_recipes, key=lambda small: small.world_size)
        return _without_compiler(without_float8(smallest))


def _without_compiler(recipe: Recipe) -> Recipe:
    return replace(
        recipe,
        compile=replace(recipe.compile, enabled=False),
        parallel=replace(recipe.parallel, async_tp=False),
    )


def _mesh_of_two(mesh: MeshTable) -> MeshTable:
    """Return a mesh of two ranks with an axis of ``mesh``; of one rank if it has pp alone."""
    small = MeshTable(dp_shard=1)
    for axis in _AXES:
        if getattr(mesh, axis) > 1:
            return replace(small, **{axis: 2}, ep=min(2, mesh.ep))
    return small
