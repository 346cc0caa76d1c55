"""Draw pipeline schedules as people draw them: a row for each pipeline rank, time to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from composer3d.draw.svg import (
    FAINT,
    MARGIN,
    PAGE_INK,
    QUIET_INK,
    WIDTH,
    Area,
    Picture,
    text_width,
    wrap,
)
from composer3d.facts.schedules import Action
from composer3d.facts.trace import GRADIENTS, MESSAGES, WAITS, TracedEvent
from composer3d.planner.simulate import Bubble, ClosedForm, Send, Span, bubble, step_s

LABEL_WIDTH, COUNT_WIDTH = 62, 62  # left of the rows, and right of them
ROW_HEIGHT, ROW_GAP = 24, 9
_OVERVIEW_ROW_HEIGHT = 7
_FONT_SIZE = 9  # of the numbers of micro-batches
_MOST_STRIPS = 4

# The colours of Okabe and Ito, which people with any colour vision can tell apart.
_COLOURS = {"F": "#56B4E9", "B": "#D55E00", "I": "#E69F00", "W": "#009E73"}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: gradients of inputs",
    "W": "backward: gradients of weights",
}
WAIT_COLOURS = {MESSAGES: "#d2d6dd", GRADIENTS: "#CC79A7"}
IDLE, GRADIENT_INK, ACTIVATION_INK = "#f3f4f6", "#9a3b00", "#0b5a8f"


class TimeUnit(NamedTuple):
    """The unit in which a picture shows times."""

    word: str
    seconds: float

    def of(self, time_s: float) -> float:
        """Convert seconds to this unit."""
        return time_s / self.seconds


# A simulation without measured times counts its units as seconds.
UNITS = TimeUnit("units", 1.0)
MILLISECONDS = TimeUnit("ms", 1e-3)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One schedule with its times.

    Attributes:
        title: what is shown, such as the name of the schedule.
        spans: the cells of each pipeline rank.
        messages: the messages between ranks; empty leaves them out.
        n_stages: the number of stages of the whole pipeline.
        form: the closed form of the bubble, if there is one.
        waits: the measured waits of each pipeline rank; empty if nothing was measured.
    """

    title: str
    spans: Sequence[Sequence[Span]]
    messages: Sequence[Send]
    n_stages: int
    form: ClosedForm | None
    waits: Sequence[Sequence[TracedEvent]] = ()

    @staticmethod
    def title_of(schedule: str, pp: int, per_rank: int, micro_batches: int) -> str:
        """Return the name of a schedule and its sizes in words."""
        stages = "1 stage a rank" if per_rank == 1 else f"V = {per_rank} stages a rank"
        return f"{schedule}: P = {pp} ranks, {stages}, M = {micro_batches} micro-batches"

    @property
    def bubble(self) -> Bubble:
        """The share of time in which ranks wait."""
        return bubble(self.spans)

    @property
    def end_s(self) -> float:
        """The end of the last cell."""
        return step_s(self.spans)

    @cached_property
    def held(self) -> list[list[int]]:
        """The stages of each rank, in ascending order."""
        return [
            sorted({action.stage for span in row for action in span.cell}) for row in self.spans
        ]

    @cached_property
    def shades(self) -> dict[int, float]:
        """How dark each stage is drawn, from 0 to 1: the last stage of a rank is the darkest."""
        return {
            stage: 1.0 if len(stages) == 1 else 0.45 + 0.55 * index / (len(stages) - 1)
            for stages in self.held
            for index, stage in enumerate(stages)
        }

    def in_flight(self, rank: int) -> float:
        """Return the most micro-batches whose activations a rank holds, all its stages together.

        A forward of one of V stages counts 1/V. Activations are held until the whole backward, or
        its second half, has run.
        """
        held = most = 0
        for span in self.spans[rank]:
            held += sum(action.kind == "F" for action in span.cell)
            most = max(most, held)
            held -= sum(action.kind in "BW" for action in span.cell)
        return most / max(1, len(self.held[rank]))

    def wait_share(self, name: str) -> float:
        """Return the share of the step, over all ranks, in which ranks wait for this reason."""
        # A rank may wait for its gradients after the last action of all ranks.
        waited_s = sum(
            max(0.0, min(wait.end_s, self.end_s) - wait.begin_s)
            for row in self.waits
            for wait in row
            if wait.name == name
        )
        return waited_s / (self.end_s * len(self.spans)) if waited_s else 0.0

    def bubble_text(self) -> str:
        """Return the bubble in words, in both of its conventions."""
        found, form = self.bubble, self.form
        of_total = f"bubble: {found.of_total:.1%} of the step"
        of_ideal = f"{found.of_ideal:.1%} of the ideal time"
        if form is not None:
            of_total += f" = {form.formula_of_total}" if form.formula_of_total else ""
            of_ideal += f" = {form.formula}"
        text = f"{of_total}; {of_ideal}"
        if self.waits:
            shares = [f"{self.wait_share(name):.1%} {words}" for name, words in WAITS.items()]
            text += f"; {', '.join(shares)}"
        return text


class _Strip(NamedTuple):
    """A part of the time that is drawn in one block of rows."""

    start_s: float
    end_s: float


class _Scale(NamedTuple):
    """The place of a time in a strip, which begins at ``x``."""

    x: float
    strip: _Strip
    pixels_per_s: float

    def at(self, time_s: float) -> float:
        """Return the x of a time. Times outside of the strip are at its ends."""
        inside_s = min(max(time_s, self.strip.start_s), self.strip.end_s)
        return self.x + (inside_s - self.strip.start_s) * self.pixels_per_s


def draw(
    timelines: Sequence[Timeline], *, heading: str, notes: Sequence[str], unit: TimeUnit
) -> str:
    """Return an SVG picture of schedules, one below the other, on the same scale of time.

    If a schedule is too long for legible numbers, all schedules have an overview on the same scale,
    and each is cut into strips on a scale of its own. If there are more than ``_MOST_STRIPS``,
    those in the middle are left out, and the picture says so.

    Args:
        timelines: at least one.
        heading: the first line.
        notes: lines below it.
        unit: the unit of time.
    """
    picture = Picture()
    y = picture.heading(heading, notes)
    y = _legend(picture, y + 14, timelines)

    longest_s = max(timeline.end_s for timeline in timelines)
    legible_s = [_legible_s(timeline) for timeline in timelines]
    is_short = min(legible_s) >= longest_s
    for timeline, strip_s in zip(timelines, legible_s, strict=True):
        if is_short:
            y = _timeline(picture, timeline, y + 16, longest_s, None, unit)
        else:
            # Strips of equal length, so that the last one is not a stump.
            n_strips = ceil(timeline.end_s / strip_s - 1e-9)
            strip_s = timeline.end_s / n_strips
            y = _timeline(picture, timeline, y + 16, strip_s, longest_s, unit)
    return picture.document(WIDTH, y + MARGIN, heading)


def _legible_s(timeline: Timeline) -> float:
    """Return the longest time of a strip in which the numbers of micro-batches fit their cells."""
    durations_s = sorted(
        span.end_s - span.start_s
        for row in timeline.spans
        for span in row
        if span.end_s > span.start_s
    )
    if not durations_s:
        return timeline.end_s or 1.0
    # Some measured cells may be very short; they stay without a number.
    short_s = durations_s[len(durations_s) // 20]
    digits = max(
        len(str(action.micro_batch))
        for row in timeline.spans
        for span in row
        for action in span.cell
    )
    return _plot_width() * short_s / (text_width("0" * digits, _FONT_SIZE) + 1)


def _plot_width() -> float:
    return WIDTH - 2 * MARGIN - LABEL_WIDTH - COUNT_WIDTH


def _timeline(
    picture: Picture,
    timeline: Timeline,
    y: float,
    strip_s: float,
    overview_s: float | None,
    unit: TimeUnit,
) -> float:
    """Draw one schedule, with an overview of ``overview_s`` seconds; return the y below it."""
    picture.text(MARGIN, y + 14, timeline.title, size=14, bold=True)
    y += 32
    for line in wrap(timeline.bubble_text(), 12, WIDTH - 2 * MARGIN):
        picture.text(MARGIN, y, line, size=12)
        y += 17

    strips = _strips(timeline.end_s, strip_s)
    shown = strips
    if overview_s is not None:
        y = _overview(picture, timeline, y, overview_s, unit)
    if len(strips) > _MOST_STRIPS:
        half = _MOST_STRIPS // 2
        shown = [*strips[:half], *strips[-half:]]
    for index, strip in enumerate(shown):
        if index and strip.start_s > shown[index - 1].end_s:
            begin, end = unit.of(shown[index - 1].end_s), unit.of(strip.start_s)
            gap = f"{begin:.4g} to {end:.4g} {unit.word} are left out here"
            picture.text(WIDTH / 2, y + 12, gap, size=12, anchor="middle", ink=QUIET_INK)
            y += 24
        y = _draw_strip(picture, timeline, strip, y, strip_s, unit, is_first=index == 0)
    return y


def _strips(end_s: float, strip_s: float) -> list[_Strip]:
    count = max(1, ceil(end_s / strip_s - 1e-9))
    return [_Strip(index * strip_s, min(end_s, (index + 1) * strip_s)) for index in range(count)]


def _overview(
    picture: Picture, timeline: Timeline, y: float, longest_s: float, unit: TimeUnit
) -> float:
    """Draw the whole schedule without numbers, on the scale of the longest one."""
    whole = _Strip(0.0, timeline.end_s)
    scale = _Scale(MARGIN + LABEL_WIDTH, whole, _plot_width() / longest_s)
    pitch = _OVERVIEW_ROW_HEIGHT + 1
    picture.text(
        MARGIN + LABEL_WIDTH - 8, y + 10, "whole step", size=10, anchor="end", ink=QUIET_INK
    )
    for row in timeline.spans:
        width = timeline.end_s * scale.pixels_per_s
        picture.rectangle(Area(scale.x, y, width, _OVERVIEW_ROW_HEIGHT), fill=IDLE)
        for span in row:
            _cell(picture, span, scale, y, _OVERVIEW_ROW_HEIGHT, timeline, unit, numbers=False)
        y += pitch
    return y + 14


def _draw_strip(
    picture: Picture,
    timeline: Timeline,
    strip: _Strip,
    y: float,
    strip_s: float,
    unit: TimeUnit,
    *,
    is_first: bool,
) -> float:
    """Draw the rows of all ranks for a part of the time; return the y below them."""
    scale = _Scale(MARGIN + LABEL_WIDTH, strip, _plot_width() / strip_s)
    right = scale.at(strip.end_s)
    if is_first:
        picture.text(WIDTH - MARGIN, y + 9, "in flight", size=10, anchor="end", ink=QUIET_INK)
    y += 14
    tops = [y + rank * (ROW_HEIGHT + ROW_GAP) for rank in range(len(timeline.spans))]
    for rank, (row, top) in enumerate(zip(timeline.spans, tops, strict=True)):
        picture.text(MARGIN, top + 16, f"rank {rank}", size=12)
        picture.rectangle(Area(scale.x, top, right - scale.x, ROW_HEIGHT), fill=IDLE)
        for wait in timeline.waits[rank] if timeline.waits else ():
            left, width = scale.at(wait.begin_s), scale.at(wait.end_s) - scale.at(wait.begin_s)
            if width > 0.2:  # pixels; most waits find their message there already
                box = Area(left, top, width, ROW_HEIGHT)
                picture.rectangle(box, fill=WAIT_COLOURS[wait.name])
        for span in row:
            if span.start_s < strip.end_s - 1e-9 and span.end_s > strip.start_s + 1e-9:
                _cell(picture, span, scale, top, ROW_HEIGHT, timeline, unit, numbers=True)
        if is_first:
            held = f"{timeline.in_flight(rank):.4g}"
            picture.text(WIDTH - MARGIN, top + 16, held, size=12, anchor="end")
    _messages(picture, timeline, strip, scale, tops)
    bottom = tops[-1] + ROW_HEIGHT
    _axis(picture, scale, strip, bottom, unit)
    if strip.end_s < timeline.end_s - 1e-9:
        words = "goes on below"
        picture.text(WIDTH - MARGIN, bottom + 31, words, size=10, anchor="end", ink=QUIET_INK)
    return bottom + 34


def _cell(
    picture: Picture,
    span: Span,
    scale: _Scale,
    top: float,
    height: float,
    timeline: Timeline,
    unit: TimeUnit,
    *,
    numbers: bool,
) -> None:
    """Draw the part of a cell that is in the strip; actions that overlap share its height."""
    left = scale.at(span.start_s)
    width = scale.at(span.end_s) - left
    part = height / len(span.cell)
    for index, action in enumerate(span.cell):
        box = Area(left, top + index * part, width, part)
        tip = ""
        if numbers:
            tip = f"{_sentence(action)}, {unit.of(span.start_s):.6g} to {unit.of(span.end_s):.6g}"
        stroke = "#ffffff" if numbers else None
        fill = _mix(_COLOURS[action.kind], timeline.shades[action.stage])
        picture.rectangle(box, fill=fill, stroke=stroke, stroke_width=0.8, tip=tip)
        label = str(action.micro_batch)
        if numbers and text_width(label, _FONT_SIZE) <= width:
            base = box.middle_y + 0.36 * _FONT_SIZE
            picture.text(box.middle_x, base, label, size=_FONT_SIZE, anchor="middle", ink="#000000")


def _sentence(action: Action) -> str:
    return f"stage {action.stage}, {_NAMES[action.kind]}, micro-batch {action.micro_batch}"


def _mix(colour: str, share: float) -> str:
    """Mix a colour with white."""
    parts = [int(colour[index : index + 2], 16) for index in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in parts)


def _messages(
    picture: Picture,
    timeline: Timeline,
    strip: _Strip,
    scale: _Scale,
    tops: Sequence[float],
) -> None:
    """Draw messages between neighbouring rows as lines. Others leave the picture and come back."""
    rank_of = {stage: rank for rank, stages in enumerate(timeline.held) for stage in stages}
    for message in timeline.messages:
        source, target = rank_of[message.from_stage], rank_of[message.to_stage]
        ink = GRADIENT_INK if message.is_gradient else ACTIVATION_INK
        down = target > source
        # A line in the gap between two rows, or two stubs at the edges of both.
        begin_y = tops[source] + (ROW_HEIGHT if down else 0)
        end_y = tops[target] + (0 if down else ROW_HEIGHT)
        ends = [(message.start_s, begin_y), (message.end_s, end_y)]
        if abs(target - source) == 1:
            if strip.start_s <= message.start_s and message.end_s <= strip.end_s + 1e-9:
                (x0, y0), (x1, y1) = [(scale.at(time_s), at_y) for time_s, at_y in ends]
                picture.line(x0, y0, x1, y1, ink=ink, width=1.2)
            continue
        # The stub at the sender points to the receiver, and the other one to the sender.
        towards = 1 if down else -1
        for (time_s, at_y), sign in zip(ends, (towards, -towards), strict=True):
            if strip.start_s <= time_s <= strip.end_s:
                x = scale.at(time_s)
                picture.line(x, at_y, x, at_y + sign * (ROW_GAP / 2 - 0.5), ink=ink, width=1.2)


def _axis(picture: Picture, scale: _Scale, strip: _Strip, y: float, unit: TimeUnit) -> None:
    """Draw marks at round times, at least 60 pixels apart."""
    step = _round_step(unit.of(60 / scale.pixels_per_s))
    index = ceil(unit.of(strip.start_s) / step - 1e-9)
    while index * step <= unit.of(strip.end_s) + 1e-9:
        x = scale.at(index * step * unit.seconds)
        picture.line(x, y + 3, x, y + 7, ink=QUIET_INK)
        label = f"{index * step:.6g}"
        if index == 0:
            label += f" {unit.word}"
        picture.text(x, y + 18, label, size=10, anchor="middle", ink=QUIET_INK)
        index += 1


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    power = 1.0
    while power >= least:
        power /= 10
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _legend(picture: Picture, y: float, timelines: Sequence[Timeline]) -> float:
    """Draw the meaning of colours and lines; return the y below."""
    kinds = {
        action.kind
        for timeline in timelines
        for row in timeline.spans
        for span in row
        for action in span.cell
    }
    x = float(MARGIN)
    for kind in "FBIW":
        if kind in kinds:
            picture.rectangle(Area(x, y, 16, 12), fill=_COLOURS[kind])
            picture.text(x + 22, y + 10, _NAMES[kind], size=12)
            x += 22 + text_width(_NAMES[kind], 12) + 14
    idle = [("idle", IDLE)]
    if any(timeline.waits for timeline in timelines):
        idle = [(words, WAIT_COLOURS[name]) for name, words in WAITS.items()]
        idle.append(("idle otherwise", IDLE))
        x, y = float(MARGIN), y + 20
    for words, colour in idle:
        picture.rectangle(Area(x, y, 16, 12), fill=colour, stroke=FAINT)
        picture.text(x + 22, y + 10, words, size=12)
        x += 22 + text_width(words, 12) + 14
    if any(timeline.messages for timeline in timelines):
        lines = (("activations sent", ACTIVATION_INK), ("gradients sent", GRADIENT_INK))
        for words, ink in lines:
            picture.line(x + 2, y, x + 2, y + 12, ink=ink, width=1.6)
            picture.text(x + 10, y + 10, words, size=12)
            x += 10 + text_width(words, 12) + 14

    rules = "A number is a micro-batch."
    if any(len(stages) > 1 for timeline in timelines for stages in timeline.held):
        rules += " The later stages of a rank are darker."
    if any(len(span.cell) > 1 for timeline in timelines for row in timeline.spans for span in row):
        rules += " A cell with two halves is a forward and a backward that overlap."
    rules += (
        ' "in flight": micro-batches whose activations a rank holds at most; a stage of V counts'
        " 1/V."
    )
    for line in wrap(rules, 12, WIDTH - 2 * MARGIN):
        y += 20
        picture.text(MARGIN, y + 10, line, size=12, ink=PAGE_INK)
    return y + 14
