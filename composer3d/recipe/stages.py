"""The blocks of each pipeline stage, as ``parallel.compose`` cuts them. No torch here."""

from functools import cache
from itertools import accumulate, pairwise

from composer3d.models.llama.shape import ModelShape
from composer3d.models.parameters import (
    Parameter,
    block_parameters,
    first_parameters,
    last_parameters,
)
from composer3d.models.shape import DecoderShape
from composer3d.recipe.schema import Recipe
from composer3d.spec.schedules import balanced_cut


def stage_ranges(recipe: Recipe) -> tuple[range, ...]:
    """Return the blocks of each stage, in the order of stages.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    n_stages = n_stages_of(recipe)
    if recipe.parallel.stages is not None and n_stages > 1:
        ends = tuple(accumulate(recipe.parallel.stages, initial=0))
        return tuple(range(begin, end) for begin, end in pairwise(ends))
    return _cut(recipe.model, n_stages)


@cache
def _cut(shape: DecoderShape, n_stages: int) -> tuple[range, ...]:
    """Cut the blocks into stages of about equal parameters.

    The embedding counts half, because forward only looks its parameters up; ``compose`` has the
    same rule. The blocks of a user's own architecture count as alike, with a Llama's parameters.
    """
    if isinstance(shape, ModelShape):
        blocks = [
            _elements(block_parameters(shape, layer, tp=1, sequence_parallel=True))
            for layer in range(shape.n_layers)
        ]
        first = _elements(first_parameters(shape)) / 2
        last = _elements(last_parameters(shape, sequence_parallel=True))
    else:
        attention = 2 * shape.dim * shape.head_width * (shape.n_heads + shape.n_kv_heads)
        ffn = 3 * shape.dim * max(shape.ffn, shape.experts * shape.expert_width)
        blocks = [attention + ffn] * shape.n_layers
        first, last = shape.vocab * shape.dim / 2, shape.vocab * shape.dim
    return tuple(balanced_cut(first, blocks, last, n_stages))


def n_stages_of(recipe: Recipe) -> int:
    """Return the number of stages of the whole pipeline; without a pipeline it is 1."""
    pp = recipe.mesh.pp
    return 1 if pp == 1 else pp * recipe.parallel.stages_per_rank


def _elements(parameters: list[Parameter]) -> int:
    return sum(parameter.elements for parameter in parameters)
