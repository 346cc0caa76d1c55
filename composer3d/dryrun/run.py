"""The dry run of a whole job: each pipeline rank in turn, those that are alike only once.

This module imports no torch; the worker processes do.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from composer3d.dryrun.replay import TapedStage
from composer3d.dryrun.report import DryRun, StageReport
from composer3d.dryrun.routing import check_skew
from composer3d.facts.schedules import Action
from composer3d.planner.schedule import recipe_actions
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool, WorkerError, usable_cores

# The time for one pipeline rank, and how many run at the same time.
_LIMIT_S = 3600.0
_MOST_AT_ONCE = 8

# With more stages on a rank, torch's runtime gathers parameters at times that depend on the whole
# order of actions, and not only on the action before.
STAGES_THAT_REPLAY = 3


def dry_run(recipe: Recipe, *, skew: float = 1.0) -> DryRun:
    """Run a step on tensors without data, in worker processes.

    A process runs one pipeline rank, as a fresh rank of a fresh world does. As many run at a time
    as this machine has cores, at most ``_MOST_AT_ONCE``. Of the pipeline ranks that hold equal
    layers, the first one runs; its actions are put together in the order of the others.

    Args:
        recipe: the whole recipe.
        skew: rows of the busiest rank of ep, divided by the mean; 1: experts get equal numbers.

    Raises:
        UserError: the recipe cannot be composed.
        WorkerError: a worker failed for another reason.
    """
    check_skew(recipe, skew)
    begin = time.monotonic()
    with Pool() as pool:

        def tape(ranks: Sequence[int]) -> Iterator[TapedStage]:
            calls = [{"recipe": recipe, "pp_rank": rank, "skew": skew} for rank in ranks]
            return _tape(pool, calls)

        reported = report_all(pool, recipe, tape)
    reports = [report for report, _ in reported]
    seconds = time.monotonic() - begin
    return DryRun(world_size=recipe.world_size, seconds=seconds, stages=tuple(reports))


def report_all(
    pool: Pool, recipe: Recipe, tape: Callable[[Sequence[int]], Iterable[TapedStage]]
) -> list[tuple[StageReport, int]]:
    """Return the report of every pipeline rank, and the one that has run for it, or itself.

    Args:
        pool: starts the process that compares what pipeline ranks hold.
        recipe: the whole recipe.
        tape: runs some pipeline ranks.

    Raises what ``dry_run`` raises.
    """
    pp = recipe.mesh.pp
    found: dict[int, tuple[StageReport, int]] = {}
    orders = [rank_actions(recipe, rank) for rank in range(pp)]
    representatives = _representatives(pool, recipe)
    while len(found) < pp:
        missing = [rank for rank in range(pp) if rank not in found]
        # One run for each kind of rank. It may lack an action of another rank of its kind, and
        # then that one runs as well.
        first_of = {representatives[rank]: rank for rank in reversed(missing)}
        for taped in tape(sorted(first_of.values())):
            for rank in missing:
                if representatives[rank] == representatives[taped.stage]:
                    report = taped.report(rank, orders[rank])
                    if report is not None:
                        found[rank] = report, taped.stage
            assert taped.stage in found  # it has run all of its own actions
    return [found[rank] for rank in range(pp)]


def run_ranks(
    pool: Pool, jobs: Sequence[tuple[Recipe, int]], *, skew: float = 1.0
) -> list[StageReport]:
    """Run several jobs, each a pipeline rank of a recipe, in a process of its own.

    Raises what ``dry_run`` raises.
    """
    calls = [{"recipe": recipe, "pp_rank": rank, "skew": skew} for recipe, rank in jobs]
    reports = []
    for taped, (recipe, rank) in zip(_tape(pool, calls), jobs, strict=True):
        report = taped.report(rank, rank_actions(recipe, rank))
        assert report is not None
        reports.append(report)
    return reports


def rank_actions(recipe: Recipe, pp_rank: int) -> list[Action]:
    """Return the actions of a pipeline rank, in order; without a pipeline, only the forwards."""
    cells = recipe_actions(recipe.mesh.pp, recipe.parallel, recipe.micro_batches)[pp_rank]
    actions = [action for cell in cells for action in cell]
    return actions if recipe.mesh.pp > 1 else [a for a in actions if a.kind == "F"]


def _tape(pool: Pool, calls: Sequence[dict[str, Any]]) -> Iterator[TapedStage]:
    return run_each(pool, "composer3d.dryrun.stage:tape_stage", calls)


def _representatives(pool: Pool, recipe: Recipe) -> list[int]:
    """Return for each pipeline rank the one that runs for it: the first that holds equal stages."""
    pp = recipe.mesh.pp
    if pp == 1 or recipe.parallel.stages_per_rank > STAGES_THAT_REPLAY:
        return list(range(pp))
    (first_alike,) = run_each(pool, "composer3d.dryrun.stage:first_alike", [{"recipe": recipe}])
    return list(first_alike)


def run_each(pool: Pool, task: str, calls: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Run ``task`` (``module:function``) with each of some arguments, each in a process of its own.

    As many run at the same time as this machine has cores, at most ``_MOST_AT_ONCE``.

    Yields what each returns, in their order. Raises what ``dry_run`` raises.
    """
    width = min(usable_cores(), _MOST_AT_ONCE)
    try:
        yield from pool.run_each(task, calls, at_once=width, limit_s=_LIMIT_S)
    except WorkerError as error:
        raise (error.user_error or error) from None
