"""Draw the curves of runs as SVG that a page styles, with axes in steps and in tokens. No torch.

A chart works without a script: it has its axes, and a legend with the last values. The script of
the page reads ``data-chart`` and shows the values below the pointer.
"""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from composer3d.facts.markup import escape, quoted
from composer3d.report.series import Point

# Pixels. A page shows a chart 330 to 640 pixels wide, so that its text stays legible.
WIDTH, HEIGHT = 440, 228
LEFT, RIGHT, TOP, BOTTOM = 58, 432, 10, 186

# A curve with fewer points shows each of them.
_MOST_DOTS = 40
_MOST_MARKS = 60

# Values above zero are drawn on a logarithmic axis if the largest is this many times the least.
_LOGARITHMIC = 50.0


class Line(NamedTuple):
    """A curve.

    Attributes:
        label: its name in the legend.
        style: its classes in the page's style sheet.
        points: by step.
        not_finite: how many values could not be drawn.
    """

    label: str
    style: str
    points: Sequence[Point]
    not_finite: int = 0


class Mark(NamedTuple):
    """A vertical line.

    Attributes:
        step: its place.
        style: "start" or "bad".
        text: what happened.
    """

    step: int
    style: str
    text: str


class Level(NamedTuple):
    """A horizontal line, such as a prediction."""

    label: str
    value: float


class _Axis(NamedTuple):
    """Maps values to pixels."""

    low: float
    high: float
    begin: float  # pixels of ``low``
    end: float  # pixels of ``high``
    is_log: bool = False

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def draw(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    from_zero: bool = False,
    tokens_per_step: int | None = None,
    marks: Sequence[Mark] = (),
    levels: Sequence[Level] = (),
) -> str:
    """Return a figure, or an empty text if no line has a point.

    Args:
        title: its heading.
        lines: the curves; those without points are left out.
        unit: of the values.
        from_zero: whether the axis begins at zero.
        tokens_per_step: for the second axis; None leaves it out.
        marks: vertical lines, of which at most 60 are drawn.
        levels: horizontal lines.
    """
    shown = [line for line in lines if line.points]
    if not shown:
        return ""
    steps = [point.step for line in shown for point in line.points]
    values = [point.value for line in shown for point in line.points]
    values += [level.value for level in levels]
    first, last = min(steps), max(steps)
    # Nearly all runs begin at step 1; their axis begins at 0.
    first = 0 if first <= 0.1 * last else first
    x_axis = _Axis(first, max(last, first + 1), LEFT, RIGHT)
    y_axis, y_ticks = _value_axis(values, from_zero=from_zero)

    shapes = [*_grid(y_axis, y_ticks), *_step_axis(x_axis, tokens_per_step)]
    shapes += _marks(marks, x_axis)
    for level in levels:
        y = _number(y_axis.at(level.value))
        shapes.append(
            f'<line class="level" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}">'
            f"<title>{escape(level.label)}: {number(level.value)}</title></line>"
        )
    for line in shown:
        shapes += _curve(line, x_axis, y_axis)
    shapes.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}"/>')

    heading = f"{title}, {unit}" if unit else title
    ends = "; ".join(f"{line.label} {number(line.points[-1].value)}" for line in shown)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f"aria-label={quoted(f'{heading}. Last values: {ends}')} "
        f"data-chart={quoted(_data(shown, x_axis, tokens_per_step))}>{''.join(shapes)}</svg>"
    )
    keys = [
        f'<li><span class="key {line.style}"></span>{escape(line.label)} '
        f"<b>{number(line.points[-1].value)}</b></li>"
        for line in shown
    ]
    keys += [
        f'<li><span class="key level"></span>{escape(level.label)} '
        f"<b>{number(level.value)}</b></li>"
        for level in levels
    ]
    not_finite = sum(line.not_finite for line in shown)
    note = ""
    if not_finite:
        word = "value was" if not_finite == 1 else "values were"
        note = f'<p class="note">{not_finite:,} {word} not finite.</p>'
    return (
        f'<figure class="chart"><figcaption>{escape(heading)}</figcaption>'
        f'<ul class="legend">{"".join(keys)}</ul>{svg}<output class="tip"></output>{note}</figure>'
    )


def number(value: float) -> str:
    """Return a number for people, with about four digits: ``12,340``, ``0.0312``, ``4e-05``."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e9 or size < 1e-4:
        return f"{value:.4g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _value_axis(values: Sequence[float], *, from_zero: bool) -> tuple[_Axis, list[float]]:
    """Return the vertical axis of some values, and its ticks."""
    low, high = min(values), max(values)
    if low > 0 and high / low > _LOGARITHMIC and not from_zero:
        ticks = _log_ticks(low, high)
        return _Axis(low, high, BOTTOM, TOP, is_log=True), ticks
    if from_zero and low >= 0:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 2 or 1.0
        low, high = low - room, high + room
        low = max(0.0, low) if from_zero else low
    step = _tick_step(low, high)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return _Axis(ticks[0], ticks[-1], BOTTOM, TOP), ticks


def _tick_step(low: float, high: float) -> float:
    """Return the round distance of about five ticks in a range."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= raw * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten in a range, at most six of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**power for power in range(first, last + 1, stride)] or [low]


def _grid(axis: _Axis, ticks: Sequence[float]) -> list[str]:
    shapes = []
    for tick in ticks:
        y = axis.at(tick)
        shapes.append(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{_number(y)}" y2="{_number(y)}"/>'
            f'<text x="{LEFT - 6}" y="{_number(y + 4)}" text-anchor="end">{_short(tick)}</text>'
        )
    return shapes


def _step_axis(axis: _Axis, tokens_per_step: int | None) -> list[str]:
    """Draw the steps below the plot, and the tokens below them."""
    row, token_row = BOTTOM + 18, BOTTOM + 35
    shapes = [
        f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>',
        f'<text class="quiet" x="2" y="{row}">step</text>',
    ]
    if tokens_per_step is not None:
        shapes.append(f'<text class="quiet" x="2" y="{token_row}">tokens</text>')
    distance = max(1, round(_tick_step(axis.low, axis.high)))
    for tick in range(-int(-axis.low // distance) * distance, int(axis.high) + 1, distance):
        x = axis.at(tick)
        # Labels at the ends stay inside of the picture.
        anchor = "start" if x < LEFT + 24 else "end" if x > RIGHT - 24 else "middle"
        place = f'x="{_number(x)}" text-anchor="{anchor}"'
        shapes.append(f'<text {place} y="{row}">{_short(tick)}</text>')
        if tokens_per_step is not None:
            words = _short(tick * tokens_per_step)
            shapes.append(f'<text class="quiet" {place} y="{token_row}">{words}</text>')
    return shapes


def _marks(marks: Sequence[Mark], axis: _Axis) -> list[str]:
    inside = [mark for mark in marks if axis.low <= mark.step <= axis.high]
    return [
        f'<line class="mark {mark.style}" x1="{_number(axis.at(mark.step))}" '
        f'x2="{_number(axis.at(mark.step))}" y1="{TOP}" y2="{BOTTOM}">'
        f"<title>{escape(mark.text)}</title></line>"
        for mark in inside[:_MOST_MARKS]
    ]


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    places = [
        (_number(x_axis.at(point.step)), _number(y_axis.at(point.value))) for point in line.points
    ]
    path = " ".join(f"{x},{y}" for x, y in places)
    shapes = [f'<polyline class="{line.style}" points="{path}"/>']
    if len(places) <= _MOST_DOTS:
        shapes += [f'<circle class="{line.style}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places]
    return shapes


def _data(lines: Sequence[Line], x_axis: _Axis, tokens_per_step: int | None) -> str:
    """Return what the script of the page needs, as JSON."""
    return json.dumps(
        {
            "low": x_axis.low,
            "high": x_axis.high,
            "tokens": tokens_per_step,
            "lines": [
                {
                    "label": line.label,
                    "steps": [point.step for point in line.points],
                    "values": [float(f"{point.value:.5g}") for point in line.points],
                }
                for line in lines
            ],
        },
        separators=(",", ":"),
    )


def _short(value: float) -> str:
    """Return a number for an axis: at most seven characters."""
    size = abs(value)
    for limit, letter in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit and letter:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
        if size >= limit:
            return f"{value:.0e}"
    if 0 < size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    return f"{round(value, 10):.4g}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
