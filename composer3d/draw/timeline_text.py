"""Draw pipeline schedules with characters: a line for each pipeline rank, time to the right."""

from collections.abc import Sequence
from math import ceil

from composer3d.draw.terminal import Style
from composer3d.draw.timeline import Timeline, TimeUnit
from composer3d.facts.schedules import Action
from composer3d.planner.simulate import Span

# Of the 256 colours of terminals, those nearest to the colours of the picture.
_COLOURS = {"F": 74, "B": 166, "I": 178, "W": 36}
_LEGEND = (
    "F forward, B backward, I and W its halves (gradients of inputs, of weights), {idle} idle; "
    "{number}; the later stages of a rank have small letters"
)
_MOST_STRIPS = 3


def render(timelines: Sequence[Timeline], style: Style, unit: TimeUnit) -> str:
    """Return schedules as text, one below the other, on the same scale of time.

    A short schedule shows the letter and the number of each action where it starts. A long one
    shows one letter for each column: what the rank does in the middle of that time.
    """
    label_width = max(len(f"rank {len(timeline.spans) - 1}") for timeline in timelines) + 2
    columns = style.width - label_width - 2
    scale = _detailed_scale(timelines)
    longest_s = max(timeline.end_s for timeline in timelines)
    is_detailed = ceil(longest_s * scale - 1e-9) <= _MOST_STRIPS * columns
    if not is_detailed:
        scale = columns / longest_s

    lines = []
    for timeline in timelines:
        lines += [timeline.title, f"  {timeline.bubble_text()}"]
        total = max(1, ceil(timeline.end_s * scale - 1e-9))
        rows = [
            (_detailed_row if is_detailed else _compact_row)(timeline, rank, scale, total, style)
            for rank in range(len(timeline.spans))
        ]
        bar = "│" if style.has_unicode else "|"
        for begin in range(0, total, columns):
            end = min(total, begin + columns)
            for rank, row in enumerate(rows):
                label = f"rank {rank}".ljust(label_width)
                lines.append(f"{label}{bar}{_painted(row[begin:end], style)}{bar}")
            last = f"{unit.of(end / scale):.4g} {unit.word}"
            times = f"{unit.of(begin / scale):.4g} ".ljust(end - begin - len(last)) + last
            lines += [" " * (label_width + 1) + times.rstrip(), ""]
    number = "the number is the micro-batch"
    if not is_detailed:
        number = "a column is what the rank does at that time"
    lines.append(_LEGEND.format(idle="·" if style.has_unicode else ".", number=number))
    return "\n".join(lines) + "\n"


def _detailed_scale(timelines: Sequence[Timeline]) -> float:
    """Return the columns of a second, so that the letter and number of most actions fit."""
    scale = 0.0
    for timeline in timelines:
        scales = sorted(
            (
                len(_label(span, timeline)) / (span.end_s - span.start_s)
                for row in timeline.spans
                for span in row
                if span.end_s > span.start_s
            ),
            reverse=True,
        )
        if scales:
            # Some measured actions may be very short; their labels are cut.
            scale = max(scale, scales[len(scales) // 20])
    return scale or 1.0


def _label(span: Span, timeline: Timeline) -> str:
    return "+".join(f"{_letter(action, timeline)}{action.micro_batch}" for action in span.cell)


def _letter(action: Action, timeline: Timeline) -> str:
    """Return the letter of an action: a capital for the first stage of each rank."""
    is_first = any(stages[0] == action.stage for stages in timeline.held)
    return action.kind if is_first else action.kind.lower()


def _idle_row(total: int, style: Style) -> list[tuple[str, int]]:
    return [("·" if style.has_unicode else ".", 0)] * total


def _detailed_row(
    timeline: Timeline, rank: int, scale: float, total: int, style: Style
) -> list[tuple[str, int]]:
    columns = _idle_row(total, style)
    for span in timeline.spans[rank]:
        begin, end = round(span.start_s * scale), round(span.end_s * scale)
        fill = "─" if style.has_unicode else "-"
        words = _label(span, timeline)[: max(0, end - begin)].ljust(end - begin, fill)
        colour = _COLOURS[span.cell[0].kind]
        columns[begin:end] = [(character, colour) for character in words]
    return columns


def _compact_row(
    timeline: Timeline, rank: int, scale: float, total: int, style: Style
) -> list[tuple[str, int]]:
    columns = _idle_row(total, style)
    for span in timeline.spans[rank]:
        begin = ceil(span.start_s * scale - 0.5)
        end = ceil(span.end_s * scale - 0.5)
        action = span.cell[0]
        for column in range(max(0, begin), min(total, end)):
            columns[column] = (_letter(action, timeline), _COLOURS[action.kind])
    return columns


def _painted(columns: Sequence[tuple[str, int]], style: Style) -> str:
    """Join columns; runs of one colour become one piece."""
    pieces: list[str] = []
    run, run_colour = "", 0
    for character, colour in [*columns, ("", -1)]:
        if colour != run_colour and run:
            pieces.append(style.paint(run, run_colour) if run_colour else run)
            run = ""
        run, run_colour = run + character, colour
    return "".join(pieces)
