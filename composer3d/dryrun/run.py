"""The dry run of a whole job: each pipeline rank in turn, those that are alike only once.

This module imports no torch; the worker processes do.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from composer3d.dryrun.report import DryRun, StageReport
from composer3d.dryrun.routing import check_skew
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool, WorkerError

# The time for one pipeline rank, and how many run at the same time.
_LIMIT_S = 3600.0
_MOST_AT_ONCE = 8

# Schedules in which every rank does the same in the same order, apart from the ends.
_SAME_ON_ALL_RANKS = frozenset({"GPipe", "LoopedBFS"})


def dry_run(recipe: Recipe, *, skew: float = 1.0) -> DryRun:
    """Run a step of each pipeline rank on tensors without data, in worker processes.

    A process runs one pipeline rank, as a fresh rank of a fresh world does. As many run at a time
    as this machine has cores, at most ``_MOST_AT_ONCE``.

    Args:
        recipe: the whole recipe.
        skew: rows of the busiest rank of ep, divided by the mean; 1: experts get equal numbers.

    Raises:
        UserError: the recipe cannot be composed.
        WorkerError: a worker failed for another reason.
    """
    check_skew(recipe, skew)
    begin = time.monotonic()
    pp = recipe.mesh.pp
    reports: dict[int, StageReport] = {}
    with Pool() as pool:
        representatives = [0] * pp
        if pp > 1:
            representatives = _representatives(pool, recipe)
        distinct = sorted(set(representatives))
        at_once = min(_cores(), _MOST_AT_ONCE)
        for first in range(0, len(distinct), at_once):
            batch = distinct[first : first + at_once]
            for report in run_ranks(pool, [(recipe, rank) for rank in batch], skew=skew):
                reports[report.stage] = report
    stages = tuple(reports[like].at(stage) for stage, like in enumerate(representatives))
    return DryRun(world_size=recipe.world_size, seconds=time.monotonic() - begin, stages=stages)


def run_ranks(
    pool: Pool, jobs: Sequence[tuple[Recipe, int]], *, skew: float = 1.0
) -> list[StageReport]:
    """Run several jobs at the same time, each a pipeline rank of a recipe, in a process of its own.

    Raises what ``dry_run`` raises.
    """
    return _run(pool, "run_one_of", {"jobs": list(jobs), "skew": skew}, len(jobs))


def _representatives(pool: Pool, recipe: Recipe) -> list[int]:
    """Return, for each pipeline rank, the first one that does the same."""
    if recipe.parallel.schedule not in _SAME_ON_ALL_RANKS:
        # Ranks differ in the number of micro-batches that they hold at a time.
        return list(range(recipe.mesh.pp))
    (contents,) = _run(pool, "describe_stages", {"recipe": recipe}, 1)
    return [contents.index(content) for content in contents]


def _run(pool: Pool, function: str, arguments: dict[str, Any], processes: int) -> list[Any]:
    try:
        return pool.run(
            f"composer3d.dryrun.stage:{function}",
            arguments,
            world_size=processes,
            limit_s=_LIMIT_S,
        )
    except WorkerError as error:
        raise (error.user_error or error) from None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
