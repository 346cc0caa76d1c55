"""``composer3d timeline``: draw the pipeline of a recipe or of a run. It answers without torch."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.commands.arguments import (
    argument,
    gpus_option,
    gpus_per_node_option,
    json_option,
    picture_option,
    positive,
    recipe_argument,
    set_option,
)
from composer3d.commands.plan import find_device
from composer3d.draw.files import write_picture
from composer3d.draw.measured import measured_timeline, replayed_timeline
from composer3d.draw.terminal import style_of
from composer3d.draw.timeline import MILLISECONDS, UNITS, Timeline, TimeUnit, draw
from composer3d.draw.timeline_text import render
from composer3d.facts import trace
from composer3d.facts.errors import PlanError, UserError
from composer3d.facts.schedules import SCHEDULES, Cell
from composer3d.facts.text import one_line
from composer3d.planner.schedule import actions, recipe_actions
from composer3d.planner.search import Device
from composer3d.planner.simulate import StageTimes, closed_form, sends, simulate
from composer3d.planner.time import PipelineTimes, pipeline_times
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe

# Actions of a pipeline that pages and TensorBoard show. Each takes about 200 bytes of SVG.
MOST_ACTIONS = 6_000

UNIT_NOTE = (
    "1 unit: the forward of one micro-batch through all layers of a rank. A backward takes 2 units,"
    " 1 for the gradients of inputs and 1 for those of weights. All stages are equal, and messages"
    " take no time."
)


class Page(NamedTuple):
    """What is drawn.

    Attributes:
        heading: the first line.
        notes: lines below it.
        unit: the unit of time.
        timelines: one below the other.
        facts: what JSON says besides.
    """

    heading: str
    notes: list[str]
    unit: TimeUnit
    timelines: list[Timeline]
    facts: dict[str, Any]


EXAMPLES = (
    "composer3d timeline quickstart",
    "composer3d timeline llama-175b-512-3d --gpu H100 --compare GPipe -o timeline.svg",
    "composer3d timeline --measured runs/quickstart",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str | None = recipe_argument(is_optional=True)
    sets: Sequence[str] = set_option(needs=("RECIPE",))
    as_json: bool = json_option()
    gpus: int | None = gpus_option(needs=("RECIPE",))
    out: str | None = picture_option()
    compare: str | None = argument(
        "--compare",
        metavar="SCHEDULE",
        help="also draw this schedule, with the same ranks and micro-batches",
    )
    gpu: str | None = argument(
        "--gpu",
        needs=("RECIPE",),
        metavar="NAME|FILE",
        help="predict the times of layers and messages on a device, as in plan; without it, all "
        "stages are equal and messages take no time",
    )
    gpus_per_node: int = gpus_per_node_option(needs=("--gpu",))
    measured: str | None = argument(
        "--measured",
        metavar="RUN",
        help="draw what the run in this folder has done, from its trace (metrics.timeline_steps)",
    )
    step: int | None = argument(
        "--step",
        needs=("--measured",),
        metavar="N",
        type=positive,
        help="step of the run; default: the last traced one",
    )


def run(options: Options) -> int:
    """Draw when each pipeline rank runs which action, and say how large the bubble is.

    Raises:
        UserError: the recipe or the run cannot be used, the other schedule cannot run it, or the
            file cannot be written.
    """
    if options.measured is not None:
        page = page_of_run(options.measured, options.step)
        if options.recipe is not None or options.compare is not None:
            if options.recipe is None or options.gpu is None:
                raise UserError(
                    "--measured: only times in seconds can stand beside a run; name a RECIPE and "
                    "the device with --gpu, or leave out --compare and RECIPE"
                )
            predicted = _page_of_recipe(options.recipe, options)
            page.timelines.extend(predicted.timelines)
            page.notes.extend(predicted.notes)
    elif options.recipe is None:
        raise UserError("composer3d timeline: name a RECIPE, or a run with --measured RUN")
    else:
        page = _page_of_recipe(options.recipe, options)
    heading, notes, unit, timelines, facts = page
    if options.out is not None:
        write_picture(options.out, draw(timelines, heading=heading, notes=notes, unit=unit))
    if options.as_json:
        schedules = [_as_json(timeline, unit) for timeline in timelines]
        print(json.dumps({"ok": True, **facts, "unit": " ".join(notes), "schedules": schedules}))
    elif options.out is None:
        print(heading, *notes, "", render(timelines, style_of(sys.stdout), unit), sep="\n", end="")
    else:
        for timeline in timelines:
            print(f"{timeline.title}: {timeline.bubble_text()}")
        print(f"wrote {one_line(options.out)}")
    return 0


def page_of_run(run: str, step: int | None) -> Page:
    """Return what a run has done, and the simulation of the same actions."""
    found = trace.read(Path(run), step)
    head = found.heads[0]
    clock_ms = 1000 * max(head.clock_error_s for head in found.heads)
    notes = [
        "Times are measured, from the begin of the first action on. The clocks of ranks are within "
        f"{clock_ms:.2g} ms of rank 0's.",
        "Below, each action takes its mean time of this step, and messages take none.",
    ]
    counts = f"{head.pp} pipeline ranks, {head.micro_batches} micro-batches"
    return Page(
        heading=f"{one_line(run)}: {counts}",
        notes=notes,
        unit=MILLISECONDS,
        timelines=[measured_timeline(found), replayed_timeline(found)],
        facts={"pp": head.pp, "micro_batches": head.micro_batches, "step": head.step},
    )


def _page_of_recipe(recipe: str, options: Options) -> Page:
    """Return the simulated schedule of a recipe, and the one to compare it with."""
    device = (
        None
        if options.gpu is None
        else Device(hardware=find_device(options.gpu), per_node=options.gpus_per_node)
    )
    chosen = load(
        recipe, options.sets, world_size=options.gpus, check_files=device is None, may_import=True
    ).recipe
    if chosen.mesh.pp == 1:
        raise UserError(
            f"{recipe}: mesh.pp = 1, so there is no pipeline to draw; try --set mesh.pp=4 "
            f"--set parallel.schedule=1F1B"
        )
    timelines = [of_recipe(chosen, device)]
    if options.compare is not None:
        timelines.append(_of_schedule(chosen, options.compare, device))
    note = UNIT_NOTE
    if device is not None:
        note = (
            f"Times of {device.hardware.name} as composer3d plan predicts them, for layers and "
            "messages. The reduction of gradients and the optimizer come after them."
        )
    return Page(
        heading=f"{os.path.basename(recipe)}: {_counts(chosen)}",
        notes=[note],
        unit=UNITS if device is None else MILLISECONDS,
        timelines=timelines,
        facts={"pp": chosen.mesh.pp, "micro_batches": chosen.micro_batches},
    )


def of_recipe(recipe: Recipe, device: Device | None) -> Timeline:
    """Return the simulated schedule of a recipe, in seconds of a device, or in units."""
    parallel = recipe.parallel
    cells = recipe_actions(recipe.mesh.pp, parallel, recipe.micro_batches)
    name: str = parallel.schedule
    if name == "csv":
        name = os.path.basename(parallel.schedule_csv or "")
    return _timeline(name, cells, recipe, parallel.stages_per_rank, device)


def count_actions(recipe: Recipe) -> int:
    """Return the most actions that the pipeline of a recipe has, of all its ranks."""
    return 3 * recipe.mesh.pp * recipe.parallel.stages_per_rank * recipe.micro_batches


def draw_recipe(recipe: Recipe, name: str) -> str:
    """Return the drawing of the pipeline of a recipe, in units, as SVG."""
    return draw(
        [of_recipe(recipe, None)],
        heading=f"{name}: {_counts(recipe)}",
        notes=[UNIT_NOTE],
        unit=UNITS,
    )


def _counts(recipe: Recipe) -> str:
    return f"{recipe.mesh.pp} pipeline ranks, {recipe.micro_batches} micro-batches"


def _of_schedule(recipe: Recipe, schedule: str, device: Device | None) -> Timeline:
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
    # The layers are cut anew if the number of stages is another one.
    cut = recipe.parallel.stages if per_rank == recipe.parallel.stages_per_rank else None
    parallel: Any = replace(recipe.parallel, virtual_stages=per_rank, stages=cut)
    parallel = replace(parallel, schedule=schedule, schedule_csv=None)
    return _timeline(schedule, cells, replace(recipe, parallel=parallel), per_rank, device)


def _timeline(
    name: str,
    cells: Sequence[Sequence[Cell]],
    recipe: Recipe,
    per_rank: int,
    device: Device | None,
) -> Timeline:
    """Simulate a schedule, in seconds of a device, or in units: a stage takes 1/V of its rank."""
    pp, micro_batches = recipe.mesh.pp, recipe.micro_batches
    n_stages = pp * per_rank
    form = None
    if device is None:
        unit = StageTimes(
            forward_s=1 / per_rank,
            backward_s=2 / per_rank,
            backward_input_s=1 / per_rank,
            backward_weight_s=1 / per_rank,
        )
        times = PipelineTimes([unit] * n_stages, [0.0] * (n_stages - 1))
        form = closed_form(name, pp, per_rank, micro_batches, unit)
    else:
        times = pipeline_times(device.setup(recipe))
    spans = simulate(cells, times.stages, times.sends_s)
    return Timeline(
        title=Timeline.title_of(name, pp, per_rank, micro_batches),
        spans=spans,
        messages=sends(spans, n_stages, times.sends_s),
        n_stages=n_stages,
        form=form,
    )


def _as_json(timeline: Timeline, unit: TimeUnit) -> dict[str, Any]:
    found, form = timeline.bubble, timeline.form
    answer: dict[str, Any] = {
        "title": timeline.title,
        "step": unit.of(timeline.end_s),
        "bubble_of_total": found.of_total,
        "bubble_of_ideal": found.of_ideal,
        "closed_form": None if form is None else {"of_ideal": form.of_ideal, "is": form.formula},
        "in_flight": [timeline.in_flight(rank) for rank in range(len(timeline.spans))],
        "ranks": [
            [
                {
                    "actions": [str(action) for action in cell],
                    "start": unit.of(start_s),
                    "end": unit.of(end_s),
                }
                for cell, start_s, end_s in row
            ]
            for row in timeline.spans
        ],
    }
    if timeline.waits:
        answer["waits"] = {name: timeline.wait_share(name) for name in trace.WAITS}
    return answer
