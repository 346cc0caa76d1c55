"""Timelines of runs: every event of a trace is drawn, and shares are those of the trace."""

import pytest

from composer3d.draw.measured import measured_timeline, replayed_timeline
from composer3d.draw.terminal import Style
from composer3d.draw.timeline import MILLISECONDS, WAIT_COLOURS, draw
from composer3d.draw.timeline_text import render
from composer3d.facts.schedules import SCHEDULES
from composer3d.facts.trace import StepTrace, TracedEvent, TraceHead
from composer3d.planner.schedule import actions
from composer3d.planner.simulate import StageTimes, bubble, simulate
from tests.draw.pictures import outside, overlapping_rectangles, overlapping_texts, read

PP, MICRO_BATCHES = 4, 8
TIMES = StageTimes(0.02, 0.05, 0.02, 0.03)
BEGIN_S = 0.7  # of the first action


def traced(schedule: str, times: StageTimes = TIMES) -> StepTrace:
    """The trace of a run that does what the simulation says, with a wait before each action."""
    per_rank = SCHEDULES[schedule].stages.default_per_rank
    cells = actions(schedule, PP, per_rank, MICRO_BATCHES)
    spans = simulate(cells, [times] * PP * per_rank)
    heads, events = [], []
    for rank, row in enumerate(spans):
        heads.append(
            TraceHead(
                step=2,
                pp_rank=rank,
                pp=PP,
                schedule=schedule,
                stages_per_rank=per_rank,
                micro_batches=MICRO_BATCHES,
                device="cpu",
                started_unix_s=0.0,
                clock_error_s=0.0,
            )
        )
        events.append([])
        end_s = BEGIN_S
        for cell, start_s, _ in row:
            if BEGIN_S + start_s > end_s + 1e-9:
                events[-1].append(TracedEvent("messages", end_s, BEGIN_S + start_s))
            end_s = BEGIN_S + start_s
            for action in cell:  # torch runs actions that overlap one after the other
                begin_s, seconds = end_s, times["FBIW".index(action.kind)]
                end_s = begin_s + seconds
                events[-1].append(TracedEvent(str(action), begin_s, end_s))
        events[-1].append(TracedEvent("gradients", end_s, end_s + 0.01))
    return StepTrace(heads, events)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "csv"])
def test_a_trace_of_the_simulation_has_its_bubble(schedule: str) -> None:
    per_rank = SCHEDULES[schedule].stages.default_per_rank
    cells = actions(schedule, PP, per_rank, MICRO_BATCHES)
    expected = bubble(simulate(cells, [TIMES] * PP * per_rank))
    step = traced(schedule)
    for drawn in (measured_timeline(step), replayed_timeline(step)):
        assert drawn.bubble.of_total == pytest.approx(expected.of_total)
        assert drawn.n_stages == PP * per_rank
    measured = measured_timeline(step)
    assert measured.spans[0][0].start_s == 0
    # All waits but those after the last action of a rank are in the trace.
    last_s = sum(measured.end_s - row[-1].end_s for row in measured.spans)
    reductions_s = sum(min(0.01, measured.end_s - row[-1].end_s) for row in measured.spans)
    total_s = measured.end_s * PP
    assert measured.wait_share("messages") == pytest.approx(expected.of_total - last_s / total_s)
    assert measured.wait_share("gradients") == pytest.approx(reductions_s / total_s)


def test_the_picture_has_every_event() -> None:
    step = traced("ZBVZeroBubble")
    timelines = [measured_timeline(step), replayed_timeline(step)]
    picture = draw(timelines, heading="a run", notes=["a note"], unit=MILLISECONDS)
    page = read(picture)
    cells = [rectangle for rectangle in page.rectangles if rectangle.tip]
    n_actions = sum(event.is_action for row in step.events for event in row)
    assert len(cells) == 2 * n_actions
    assert overlapping_rectangles(cells) == []
    assert overlapping_texts(page) == []
    assert outside(page) == []
    waits = sum(event.name == "messages" for row in step.events for event in row)
    assert picture.count(f'fill="{WAIT_COLOURS["messages"]}"') == waits + 1  # and the legend
    first = next(cell.tip for cell in cells if "stage 0, forward, micro-batch 0" in cell.tip)
    assert first.endswith("0 to 20")  # milliseconds
    words = " ".join(text.words for text in page.texts)
    assert "waiting for messages of other pipeline ranks" in words
    assert "reducing gradients over data-parallel ranks" in words


def test_characters_show_the_run_in_milliseconds() -> None:
    step = traced("1F1B")
    text = render([measured_timeline(step)], Style(160, False, False), MILLISECONDS)
    assert "measured in step 2: 1F1B: P = 4 ranks" in text
    assert f"{1000 * 11 * (TIMES.forward_s + TIMES.backward_s):.4g} ms" in text


def test_the_simulation_takes_the_mean_times_of_each_stage() -> None:
    step = traced("1F1B")
    # Stage 0 takes 0.01 s longer for one of its forwards, at its end.
    row = step.events[0]
    last = max(index for index, event in enumerate(row) if "F" in event.name)
    later = [
        TracedEvent(name, begin_s + 0.01 * (index > last), end_s + 0.01 * (index >= last))
        for index, (name, begin_s, end_s) in enumerate(row)
    ]
    changed = step._replace(events=[later, *step.events[1:]])
    (first, *_), *_ = replayed_timeline(changed).spans
    assert first.end_s == pytest.approx(TIMES.forward_s + 0.01 / MICRO_BATCHES)
