"""The layers of each pipeline stage, as ``parallel.compose`` cuts them. No torch here."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from composer3d.models.llama.shape import ModelShape
from composer3d.models.shape import DecoderShape
from composer3d.planner.parameters import (
    Parameter,
    block_parameters,
    first_parameters,
    known_shape,
    last_parameters,
)
from composer3d.planner.schedule import recipe_actions
from composer3d.recipe.schema import Recipe
from composer3d.spec.schedules import SCHEDULES, balanced_cut, stages_of


class StageLayers(NamedTuple):
    """What one stage holds.

    Attributes:
        stage: its number.
        blocks: its blocks.
        has_first: whether it holds the embedding.
        has_last: whether it holds the last norm and the head.
    """

    stage: int
    blocks: range
    has_first: bool
    has_last: bool


def stage_layers(recipe: Recipe, cut: Sequence[range] | None = None) -> list[StageLayers]:
    """Return what each stage of a recipe holds, in the order of stages.

    Args:
        recipe: a resolved recipe.
        cut: the blocks of each stage; None: those of a model whose parameters are known here.

    Raises:
        PlanError: there are fewer blocks than stages; or the architecture is a user's own, and
            ``cut`` is None.
    """
    if cut is None:
        known_shape(recipe.model)
        cut = stage_ranges(recipe)
    last = len(cut) - 1
    return [
        StageLayers(stage, blocks, stage == 0, stage == last) for stage, blocks in enumerate(cut)
    ]


def units_of_blocks(blocks: range, size: int) -> list[range]:
    """Cut the blocks of a stage into units of ``size``; the last one may be smaller.

    As ``parallel.data.fsdp.apply``.
    """
    return [blocks[begin : begin + size] for begin in range(0, len(blocks), size)]


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


def stages_by_rank(recipe: Recipe) -> list[list[int]]:
    """Return the stages that each pipeline rank holds, in ascending order.

    Raises:
        PlanError: the schedule is a file that cannot be read or run.
    """
    pp, parallel = recipe.mesh.pp, recipe.parallel
    if pp == 1:
        return [[0]]
    if parallel.schedule == "csv":
        rows = recipe_actions(pp, parallel, recipe.micro_batches)
        return [sorted({action.stage for cell in row for action in cell}) for row in rows]
    v_shaped = SCHEDULES[parallel.schedule].v_shaped
    per_rank = parallel.stages_per_rank
    return [stages_of(rank, pp, per_rank, v_shaped=v_shaped) for rank in range(pp)]


def _elements(parameters: list[Parameter]) -> int:
    return sum(parameter.elements for parameter in parameters)
