"""What each pipeline stage and each pipeline rank holds. No torch here."""

from typing import NamedTuple

from composer3d.facts.schedules import SCHEDULES, stages_of
from composer3d.planner.schedule import recipe_actions
from composer3d.recipe.schema import Recipe
from composer3d.recipe.stages import stage_ranges


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


def stage_layers(recipe: Recipe) -> list[StageLayers]:
    """Return what each stage of a recipe holds, in the order of stages.

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    cut = stage_ranges(recipe)
    last = len(cut) - 1
    return [
        StageLayers(stage, blocks, stage == 0, stage == last) for stage, blocks in enumerate(cut)
    ]


def checkpointed_stages_of_ranks(recipe: Recipe) -> set[frozenset[bool]]:
    """Return, for each pipeline rank, whether its stages have checkpointed blocks: yes, no, both.

    Raises:
        PlanError: as ``stages_by_rank``.
    """
    has = recipe.memory.checkpointing.blocks.has
    return {frozenset(has(0, stage) for stage in held) for held in stages_by_rank(recipe)}


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
