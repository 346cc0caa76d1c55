"""The blocks of each pipeline stage, as ``pipeline.stage_cut`` cuts them. No torch here."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

from composer3d.facts.schedules import balanced_cut
from composer3d.models.registry import architecture
from composer3d.models.table import Row
from composer3d.recipe.schema import Model, Recipe


def stage_ranges(recipe: Recipe) -> tuple[range, ...]:
    """Return the blocks of each stage, in the order of stages.

    Those of multi-token prediction are on the last one, with the head.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    n_stages = n_stages_of(recipe)
    if recipe.parallel.stages is not None and n_stages > 1:
        ends = tuple(accumulate(recipe.parallel.stages, initial=0))
        cut = tuple(range(begin, end) for begin, end in pairwise(ends))
    else:
        cut = _cut(recipe.model, n_stages)
    return (*cut[:-1], range(cut[-1].start, recipe.model.all_layers))


@cache
def _cut(shape: Model, n_stages: int) -> tuple[range, ...]:
    """Cut the main model's blocks into stages of about equal parameters.

    The embedding counts half, because forward only looks its parameters up. The rule stands in
    ``pipeline.stage_cut`` too, which needs torch.
    """
    table = architecture(shape.architecture).table_of(shape)
    blocks = list(map(_elements, table.blocks))
    main, predicting = blocks[: shape.n_layers], blocks[shape.n_layers :]
    first, last = _elements(table.first) / 2, _elements(table.last) + sum(predicting)
    return tuple(balanced_cut(first, main, last, n_stages))


def n_stages_of(recipe: Recipe) -> int:
    """Return the number of stages of the whole pipeline; without a pipeline it is 1."""
    pp = recipe.mesh.pp
    return 1 if pp == 1 else pp * recipe.parallel.stages_per_rank


def _elements(rows: Sequence[Row]) -> int:
    """Count the elements of a unit. Of tied parameters, it holds one."""
    return sum({row.tied_to or row.name: row.elements for row in rows}.values())
