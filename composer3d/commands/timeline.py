"""``composer3d timeline``: draw the pipeline schedule of a recipe. It answers without torch."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from composer3d.draw.files import write_picture
from composer3d.draw.terminal import style_of
from composer3d.draw.timeline import Timeline, draw
from composer3d.draw.timeline_text import render
from composer3d.planner.schedule import actions, recipe_actions
from composer3d.planner.simulate import StageTimes, closed_form, sends, simulate
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.spec.errors import PlanError, UserError
from composer3d.spec.schedules import SCHEDULES, Cell

UNIT = "units"
UNIT_NOTE = (
    "1 unit: the forward of one micro-batch through all layers of a rank. A backward takes 2 units,"
    " 1 for the gradients of inputs and 1 for those of weights. All stages are equal, and messages"
    " take no time."
)


def run(
    *,
    recipe: str,
    sets: list[str],
    gpus: int | None,
    out: str | None,
    compare: str | None,
    as_json: bool,
) -> int:
    """Draw when each pipeline rank runs which action, and say how large the bubble is.

    Args:
        recipe: the recipe's file.
        sets: overrides, each ``table.key=value``.
        gpus: the number of processes that the mesh must fill; None: as the recipe says.
        out: an SVG file to write; None prints the picture with characters.
        compare: another schedule, which is drawn below.
        as_json: whether to print one JSON object instead of a picture with characters.

    Returns:
        The exit status 0.

    Raises:
        UserError: the recipe cannot be used, the other schedule cannot run it, or the file cannot
            be written.
    """
    chosen = load(recipe, sets, world_size=gpus).recipe
    if chosen.mesh.pp == 1:
        raise UserError(
            f"{recipe}: mesh.pp = 1, so there is no pipeline to draw; try --set mesh.pp=4 "
            f"--set parallel.schedule=1F1B"
        )
    timelines = [_of_recipe(chosen)]
    if compare is not None:
        timelines.append(_of_schedule(chosen, compare))

    mesh = chosen.mesh
    counts = f"{mesh.pp} pipeline ranks, {chosen.micro_batches} micro-batches"
    heading = f"{os.path.basename(recipe)}: {counts}"
    if out is not None:
        picture = draw(timelines, heading=heading, notes=[UNIT_NOTE], unit=UNIT)
        write_picture(out, picture)
    if as_json:
        answer = {
            "ok": True,
            "pp": mesh.pp,
            "micro_batches": chosen.micro_batches,
            "unit": UNIT_NOTE,
            "schedules": [_as_json(timeline) for timeline in timelines],
        }
        print(json.dumps(answer))
    elif out is None:
        print(
            heading, UNIT_NOTE, "", render(timelines, style_of(sys.stdout), UNIT), sep="\n", end=""
        )
    else:
        for timeline in timelines:
            print(f"{timeline.title}: {timeline.bubble_text()}")
        print(f"wrote {out}")
    return 0


def _of_recipe(recipe: Recipe) -> Timeline:
    parallel = recipe.parallel
    cells = recipe_actions(recipe.mesh.pp, parallel, recipe.micro_batches)
    name: str = parallel.schedule
    if name == "csv":
        name = os.path.basename(parallel.schedule_csv or "")
    return _timeline(name, cells, recipe, parallel.stages_per_rank)


def _of_schedule(recipe: Recipe, schedule: str) -> Timeline:
    """Return another schedule of the same recipe, with as many stages a rank if it allows that."""
    facts = SCHEDULES.get(schedule)
    if facts is None or schedule == "csv":
        names = ", ".join(name for name in SCHEDULES if name != "csv")
        raise UserError(f"--compare {schedule}: there is no such schedule; use one of {names}")
    per_rank = recipe.parallel.stages_per_rank
    if not facts.stages.least_per_rank <= per_rank <= facts.stages.most_per_rank:
        per_rank = facts.stages.default_per_rank
    try:
        cells = actions(schedule, recipe.mesh.pp, per_rank, recipe.micro_batches)
    except PlanError as error:
        raise UserError(
            f"--compare: {error}; change data.global_batch or data.micro_batch with --set"
        ) from None
    return _timeline(schedule, cells, recipe, per_rank)


def _timeline(
    name: str, cells: Sequence[Sequence[Cell]], recipe: Recipe, per_rank: int
) -> Timeline:
    """Simulate a schedule in units, where a stage takes 1/V of its rank's time."""
    pp, micro_batches = recipe.mesh.pp, recipe.micro_batches
    n_stages = pp * per_rank
    times = StageTimes(
        forward_s=1 / per_rank,
        backward_s=2 / per_rank,
        backward_input_s=1 / per_rank,
        backward_weight_s=1 / per_rank,
    )
    spans = simulate(cells, [times] * n_stages)
    stages = "1 stage a rank" if per_rank == 1 else f"V = {per_rank} stages a rank"
    return Timeline(
        title=f"{name}: P = {pp} ranks, {stages}, M = {micro_batches} micro-batches",
        spans=spans,
        messages=sends(spans, n_stages, 0.0),
        n_stages=n_stages,
        form=closed_form(name, pp, per_rank, micro_batches, times),
    )


def _as_json(timeline: Timeline) -> dict[str, Any]:
    found, form = timeline.bubble, timeline.form
    return {
        "title": timeline.title,
        "step": timeline.end_s,
        "bubble_of_total": found.of_total,
        "bubble_of_ideal": found.of_ideal,
        "closed_form": None if form is None else {"of_ideal": form.of_ideal, "is": form.formula},
        "in_flight": [timeline.in_flight(rank) for rank in range(len(timeline.spans))],
        "ranks": [
            [
                {"actions": [str(action) for action in cell], "start": start_s, "end": end_s}
                for cell, start_s, end_s in row
            ]
            for row in timeline.spans
        ],
    }
