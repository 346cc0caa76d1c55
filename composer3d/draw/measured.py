"""Timelines of what a run has done, from its trace. No torch here."""

from collections import defaultdict
from contextlib import suppress
from itertools import chain
from statistics import fmean

from composer3d.draw.timeline import Timeline
from composer3d.facts.errors import PlanError
from composer3d.facts.trace import StepTrace, TracedEvent
from composer3d.planner.schedule import actions
from composer3d.planner.simulate import Span, StageTimes, simulate


def measured_timeline(step: StepTrace) -> Timeline:
    """Return the actions and waits of a traced step, from the begin of the first action on.

    Messages are left out: a trace has the waits for them, and not the times at which they travel.
    """
    origin_s = min(event.begin_s for row in step.events for event in row if event.is_action)
    spans: list[list[Span]] = []
    waits: list[list[TracedEvent]] = []
    for row in step.events:
        spans.append([])
        waits.append([])
        for event in row:
            begin_s, end_s = event.begin_s - origin_s, event.end_s - origin_s
            action = event.action
            if action is not None:
                spans[-1].append(Span((action,), begin_s, end_s))
            elif end_s > 0:
                waits[-1].append(TracedEvent(event.name, max(0.0, begin_s), end_s))
    head = step.heads[0]
    return Timeline(
        title=f"measured in step {head.step}: {_pipeline(step)}",
        spans=spans,
        messages=(),
        n_stages=head.pp * head.stages_per_rank,
        form=None,
        waits=waits,
    )


def replayed_timeline(step: StepTrace) -> Timeline:
    """Return the simulation of a traced step with the mean times of its own actions.

    Each rank runs the actions that it has run, in the same order, and messages take no time. So the
    difference from the measured timeline is what messages cost, and what makes actions uneven.
    """
    head = step.heads[0]
    measured = measured_timeline(step)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in measured.spans:
        for (action,), begin_s, end_s in row:
            seconds[action.stage, action.kind].append(end_s - begin_s)
    means = {key: fmean(found) for key, found in seconds.items()}
    # A schedule may lack a kind of action; then its time is not used.
    times = [
        StageTimes(*(means.get((stage, kind), 0.0) for kind in "FBIW"))
        for stage in range(measured.n_stages)
    ]
    cells = [[span.cell for span in row] for row in measured.spans]
    with suppress(PlanError):
        # A trace does not show which actions overlap: they send their messages together.
        planned = actions(head.schedule, head.pp, head.stages_per_rank, head.micro_batches)
        if [list(chain(*row)) for row in planned] == [list(chain(*row)) for row in cells]:
            cells = planned
    return Timeline(
        title=f"simulated with its mean times: {_pipeline(step)}",
        spans=simulate(cells, times),
        messages=(),
        n_stages=measured.n_stages,
        form=None,
    )


def _pipeline(step: StepTrace) -> str:
    """Return the schedule and the sizes of a traced step in words."""
    head = step.heads[0]
    return Timeline.title_of(head.schedule, head.pp, head.stages_per_rank, head.micro_batches)
