"""Write the report of one run, or of several, as one HTML page. No torch here.

The page needs nothing but itself: no network, and no script but its own, which only shows values
below the pointer. Its Content-Security-Policy allows exactly that script and that style by their
digests, so that nothing that a run has written can run or load anything.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from composer3d.draw.svg import for_page
from composer3d.facts.errors import UserError
from composer3d.facts.markup import escape
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.facts.text import one_line
from composer3d.planner.intervals import Interval
from composer3d.report.chart import LEFT, RIGHT, WIDTH, Level, Line, Mark, draw, number
from composer3d.report.folder import RunEvent, RunFolder
from composer3d.runtime.files import OWN_MARK

MOST_RUNS = 8  # each has a colour of its own

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f8fa; --card: #ffffff; --ink: #1f2328; --quiet: #59636e; --edge: #d0d7de;
  --c1: #0072b2; --c2: #d55e00; --c3: #00775a; --c4: #a8477f; --c5: #8a6d00; --c6: #5b4fcf;
  --c7: #9a3b26; --c8: #4d5a66; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root {
  --page: #0d1117; --card: #161b22; --ink: #e6edf3; --quiet: #9198a1; --edge: #3d444d;
  --c1: #58b4e9; --c2: #f0883e; --c3: #3fc79a; --c4: #e59fc4; --c5: #e3c94f; --c6: #a79bff;
  --c7: #e8927c; --c8: #aab6c2; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1400px; padding: 20px 16px 48px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 10px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.quiet, .note { color: var(--quiet); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 12px 14px; }
.numbers { display: grid; gap: 10px; margin: 16px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 160px), 1fr)); }
.numbers div b { display: block; font-size: 20px; overflow-wrap: anywhere; }
.numbers div span { color: var(--quiet); font-size: 13px; }
.charts { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; }
.chart { background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 10px 12px; min-width: 0; }
figcaption { font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 14px; margin: 0; padding: 0;
  font-size: 13px; min-height: 20px; }
.legend li { overflow-wrap: anywhere; }
.key { display: inline-block; width: 16px; height: 0; border-top: 3px solid; margin-right: 5px;
  vertical-align: middle; }
.key.dashed, .key.level { border-top-style: dashed; }
.key.level { color: var(--quiet); }
.tip { display: block; min-height: 20px; font-size: 13px; color: var(--quiet);
  font-variant-numeric: tabular-nums; }
.chart svg { display: block; width: 100%; max-width: 640px; height: auto; touch-action: pan-y; }
.chart svg text { font-size: 12px; fill: var(--ink); }
.chart svg text.quiet { fill: var(--quiet); }
.chart .grid { stroke: var(--edge); stroke-width: 0.7; }
.chart .axis { stroke: var(--quiet); }
.chart .level { stroke: var(--quiet); stroke-dasharray: 6 4; }
.chart .mark { stroke-width: 1.5; }
.chart .mark.start { stroke: var(--quiet); stroke-dasharray: 2 3; }
.chart .mark.bad { stroke: var(--bad); }
.chart .cursor { stroke: var(--quiet); visibility: hidden; }
.chart polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.chart polyline.dashed { stroke-dasharray: 6 3; }
COLOURS
.wide { overflow-x: auto; background: #ffffff; border: 1px solid var(--edge);
  border-radius: 8px; }
.wide svg { display: block; min-width: 900px; width: 100%; height: auto; }
@media (max-width: 940px) { .wide::before { content: "Scroll sideways for the whole drawing.";
  display: inline-block; position: sticky; left: 0; padding: 8px 14px 0; font-size: 13px;
  color: #59636e; } }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--edge); }
td { overflow-wrap: anywhere; min-width: 6.5em; }
td:first-child { overflow-wrap: break-word; }
td:last-child:nth-child(n+3) { min-width: 15em; }
td.place { min-width: 0; white-space: nowrap; overflow-wrap: normal;
  font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 600; }
details { margin: 10px 0; }
summary { cursor: pointer; font-weight: 600; overflow-wrap: anywhere; }
pre { overflow-x: auto; font-size: 12.5px; line-height: 1.45; }
@media print { .wide, .chart { break-inside: avoid; } }
""".replace(
    "COLOURS",
    "\n".join(
        f".c{n} {{ color: var(--c{n}); }} polyline.c{n} {{ stroke: var(--c{n}); }} "
        f"circle.c{n} {{ fill: var(--c{n}); }}"
        for n in range(1, MOST_RUNS + 1)
    ),
)

_SCRIPT = """
"use strict";
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = JSON.parse(svg.dataset.chart);
  const tip = svg.parentElement.querySelector(".tip");
  const cursor = svg.querySelector(".cursor");
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] < steps[high] - wanted ? low : high;
  };
  const words = (value) => value.toLocaleString("en", {maximumSignificantDigits: 5});
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * WIDTH / box.width;
    const share = Math.min(1, Math.max(0, (x - LEFT) / (RIGHT - LEFT)));
    const wanted = chart.low + share * (chart.high - chart.low);
    const longest = chart.lines.reduce((a, b) => a.steps.length < b.steps.length ? b : a);
    const step = longest.steps[nearest(longest.steps, wanted)];
    const parts = ["step " + step.toLocaleString("en")];
    if (chart.tokens) parts.push((step * chart.tokens).toLocaleString("en") + " tokens");
    for (const line of chart.lines) {
      const index = nearest(line.steps, step);
      const place = line.steps[index] === step ? "" : " (step " + line.steps[index] + ")";
      parts.push(line.label + " " + words(line.values[index]) + place);
    }
    tip.textContent = parts.join("  \\u00b7  ");
    const at = LEFT + (step - chart.low) / (chart.high - chart.low) * (RIGHT - LEFT);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => {
    tip.textContent = "";
    cursor.style.visibility = "hidden";
  });
}
"""


class Drawing(NamedTuple):
    """A drawing of the layout or of the pipeline.

    Attributes:
        title: its heading.
        svg: the drawing; empty if there is none.
        note: what it shows, or why there is none.
    """

    title: str
    svg: str
    note: str


class Forecast(NamedTuple):
    """What the planner predicts for a run.

    Attributes:
        tokens_per_s: of all ranks; None if it cannot be predicted.
        memory_gib: the peak of the largest rank; None if it cannot be predicted.
        note: for which device, or why there is none.
        tokens_80, memory_80: the 80% intervals of both.
        caveats: sentences on what the prediction leaves out.
        offer: how to plan with what the run measured; empty: it is not offered.
    """

    tokens_per_s: float | None
    memory_gib: float | None
    note: str
    tokens_80: Interval | None = None
    memory_80: Interval | None = None
    caveats: Sequence[str] = ()
    offer: str = ""


class Subject(NamedTuple):
    """A run of the report, with what needs other parts of the package.

    Attributes:
        label: its name on the page; no two runs have the same.
        run: its folder.
        facts: the recipe's key facts, by name.
        forecast: what the planner predicts.
        pictures: its drawings; none if there are more than two runs.
    """

    label: str
    run: RunFolder
    facts: dict[str, str]
    forecast: Forecast
    pictures: list[Drawing]


class KeyDifference(NamedTuple):
    """A key whose value is not the same in the recipes of all runs: its value in each of them."""

    key: str
    values: tuple[str, ...]


def page_path(out: str) -> Path:
    """Return the path of a report that ``-o`` names.

    Raises:
        UserError: the name does not end in .html.
    """
    if not out.endswith(".html"):
        raise UserError(f"-o {one_line(out)}: the report is an HTML file; use a name in .html")
    return Path(out)


def render(subjects: Sequence[Subject], differences: Sequence[KeyDifference] | None) -> str:
    """Return the page.

    Args:
        subjects: one run, or those that are compared, at most ``MOST_RUNS``.
        differences: of the recipes of several runs; None for one run, or if they cannot be
            compared.
    """
    title = " and ".join(subject.label for subject in subjects)
    if len(subjects) > 2:
        title = f"{len(subjects)} runs"
    parts = [f"<h1>{escape(title)}</h1>"]
    if len(subjects) == 1:
        parts += _head(subjects[0])
    else:
        parts += _comparison(subjects, differences)
    parts += [*_charts(subjects), *_plan(subjects)]
    for subject in subjects:
        prefix = f"{escape(subject.label)}: " if len(subjects) > 1 else ""
        for picture in subject.pictures:
            parts.append(f"<h2>{prefix}{escape(picture.title)}</h2>")
            if picture.svg:
                parts.append(f'<div class="wide">{for_page(picture.svg)}</div>')
            if picture.note:
                parts.append(f'<p class="quiet">{escape(picture.note)}</p>')
        further = [f"<h2>{prefix}Events</h2>", *_events(subject.run)]
        further += [f"<h2>{prefix}Recipe</h2>", *_recipe(subject.run)]
        if len(subjects) > 2:
            summary = f"<summary>{prefix}events and recipe</summary>"
            further = ["<details>", summary, *further, "</details>"]
        parts += further
    return _document(title, "\n".join(parts))


def _document(title: str, body: str) -> str:
    script = _SCRIPT.replace("WIDTH", str(WIDTH)).replace("LEFT", str(LEFT))
    script = script.replace("RIGHT", str(RIGHT))
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(_STYLE)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        f'<!doctype html>\n{OWN_MARK}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    """Return the digest of a script or style, in the form of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _head(subject: Subject) -> list[str]:
    """Return the facts and the final numbers of one run."""
    facts = " · ".join(f"{name} {value}" for name, value in subject.facts.items())
    parts = [f'<p class="quiet">{escape(facts)}</p>'] if facts else []
    cards = [
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in final_numbers(subject.run).items()
    ]
    counted = f'<p class="quiet">tokens/s and tokens seen: {escape(COUNTED_TOKENS)}</p>'
    return [*parts, f'<div class="numbers">{"".join(cards)}</div>', counted, *_problems(subject)]


def _problems(subject: Subject) -> list[str]:
    lines = subject.run.problems
    return [f'<p class="note">{escape(subject.label)}: {escape(line)}.</p>' for line in lines]


def final_numbers(run: RunFolder) -> dict[str, str]:
    """Return where a run stands, by name: its step, losses, speed and memory."""
    curves = run.curves
    total = f" of {run.recipe.run.steps:,}" if run.recipe is not None else ""
    numbers = {"steps done": f"{run.steps_done:,}{total}"}
    if run.tokens_per_step is not None:
        numbers["tokens seen"] = f"{run.steps_done * run.tokens_per_step:,}"
    for name, words in (("loss", "training loss"), ("validation_loss", "validation loss")):
        series = curves.of(name)
        point = series.last
        if point is None:
            if series.not_finite:
                numbers[words] = "never finite"
        elif series.ends_finite:
            numbers[words] = f"{point.value:.4f}"
        else:
            numbers[words] = f"{point.value:.4f} (step {point.step:,}; not finite at the end)"
    best = curves.of("validation_loss").least
    if best is not None:
        numbers["best validation loss"] = f"{best.value:.4f} (step {best.step:,})"
    since = f" (since step {run.since:,})" if run.since else ""
    if run.tokens_per_s is not None:
        numbers["tokens/s, median"] = number(run.tokens_per_s) + since
    if run.mfu is not None:
        numbers["MFU, median"] = f"{run.mfu:.1%}{since}"
    if run.memory_gib is not None:
        numbers["peak memory, GiB"] = f"{run.memory_gib:.2f}{since}"
    if run.saves:
        numbers["checkpoints saved"] = f"{len(run.saves):,}"
    if run.n_starts:
        numbers["starts of the job"] = f"{run.n_starts:,}"
    left_out = curves.of("left_out_steps").last
    if left_out is not None:
        numbers["steps left out"] = f"{left_out.value:,.0f}"
    return numbers


def _comparison(
    subjects: Sequence[Subject], differences: Sequence[KeyDifference] | None
) -> list[str]:
    """Return the final numbers of runs side by side, and how their recipes differ."""
    columns = [{**final_numbers(subject.run)} for subject in subjects]
    names = dict.fromkeys(name for column in columns for name in column)
    # Facts that are equal say nothing about a difference.
    rows = [(name, *(column.get(name, "–") for column in columns)) for name in names]
    heads = ("", *(subject.label for subject in subjects))
    parts = [_table(heads, rows)]
    for subject in subjects:
        parts += _problems(subject)
    parts.append("<h2>Differences of the recipes</h2>")
    if differences is None:
        parts.append('<p class="note">The recipes cannot be compared: see above.</p>')
    elif not differences:
        parts.append("<p>The recipes have the same values.</p>")
    else:
        heads = ("key", *(subject.label for subject in subjects))
        parts.append(_table(heads, [(entry.key, *entry.values) for entry in differences]))
    return parts


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], places: int = 0) -> str:
    """Return a table; its first ``places`` columns are not wrapped."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = []
    for row in rows:
        cells = [
            f'<td class="place">{escape(text)}</td>'
            if index < places
            else f"<td>{escape(text)}</td>"
            for index, text in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="table card"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


class _Curve(NamedTuple):
    """A metric of a chart: its key, and its name in the legend."""

    metric: str
    label: str


class _Chart(NamedTuple):
    """A chart of the page: its title, metrics and unit."""

    title: str
    curves: tuple[_Curve, ...]
    unit: str = ""
    from_zero: bool = False


_CHARTS = (
    _Chart("Loss", (_Curve("loss", "train"), _Curve("validation_loss", "validation")), "nats"),
    _Chart("Speed", (_Curve("tokens_per_s", "tokens/s"),), "tokens/s of all ranks", True),
    _Chart("Gradient norm", (_Curve("grad_norm", "norm before clipping"),)),
    _Chart("Learning rate", (_Curve("lr", "learning rate"),), "", True),
    _Chart(
        "Memory",
        (_Curve("memory_gib", "peak"), _Curve("memory_reserved_gib", "peak reserved")),
        "GiB",
        True,
    ),
    _Chart(
        "Time of a step",
        (_Curve("step_s", "step"), _Curve("data_s", "waiting for data")),
        "seconds",
        True,
    ),
    _Chart("Load of experts", (_Curve("expert_load", "busiest expert over mean"),)),
)


def _charts(subjects: Sequence[Subject]) -> list[str]:
    """Return the charts that have a curve, and a line about those that have none."""
    figures, without = [], []
    token_counts = {subject.run.tokens_per_step for subject in subjects}
    tokens = token_counts.pop() if len(token_counts) == 1 else None
    for chart in _CHARTS:
        lines = []
        for place, subject in enumerate(subjects):
            for index, (metric, label) in enumerate(chart.curves):
                series = subject.run.curves.of(metric)
                # A run has its colour; with one run, each curve has its own.
                is_alone = len(subjects) == 1
                style = f"c{index + 1}" if is_alone else f"c{place + 1}{' dashed' * index}"
                shown = label if is_alone else f"{subject.label} {label}"
                lines.append(Line(shown, style, series.points, series.not_finite))
        figure = draw(
            chart.title,
            lines,
            unit=chart.unit,
            from_zero=chart.from_zero,
            tokens_per_step=tokens,
            marks=_marks(subjects),
            levels=_levels(chart, subjects),
        )
        if figure:
            figures.append(figure)
        elif chart.title != "Load of experts":
            without.append(chart.title.lower())
    parts = ["<h2>Curves</h2>"]
    if figures:
        parts.append(f'<div class="charts">{"".join(figures)}</div>')
        words = "Long runs are thinned; the largest and least values stay."
        if len(subjects) == 1:
            words = f"Dotted lines: the job was started again. Red lines: bad steps. {words}"
        parts.append(f'<p class="note">{words}</p>')
    if without:
        parts.append(f'<p class="note">No line of the metrics has: {", ".join(without)}.</p>')
    if len(subjects) > 1 and tokens is None:
        parts.append(
            '<p class="note">The runs have other numbers of tokens in a step, or one is not '
            "known: compare their curves by step.</p>"
        )
    return parts


def _marks(subjects: Sequence[Subject]) -> list[Mark]:
    """Return the resumes and bad steps of a single run; those of several would be a thicket."""
    if len(subjects) > 1:
        return []
    run = subjects[0].run
    starts = [
        Mark(event.step, "start", f"{event.when} {event.text}")
        for event in run.starts
        if event.step
    ]
    bad = [
        Mark(event.step, "bad", f"step {event.step}: {event.text}")
        for event in run.bad_steps
        if event.step is not None
    ]
    return starts + bad


def _levels(chart: _Chart, subjects: Sequence[Subject]) -> list[Level]:
    """Return the predictions of the planner for a chart of speed or memory."""
    predicted = {}
    for subject in subjects:
        forecast = subject.forecast
        of_charts = {"Speed": forecast.tokens_per_s, "Memory": forecast.memory_gib}
        predicted[subject.label] = of_charts.get(chart.title)
    if len(set(predicted.values())) == 1:
        # The same line again for each run would hide that they agree.
        predicted = {"": next(iter(predicted.values()))}
    return [
        Level(f"{label} predicted".strip(), value)
        for label, value in predicted.items()
        if value is not None
    ]


def _plan(subjects: Sequence[Subject]) -> list[str]:
    """Return what was measured beside what the planner predicts."""
    rows, notes = [], []
    for subject in subjects:
        run, forecast = subject.run, subject.forecast
        name = f"{subject.label}: " if len(subjects) > 1 else ""
        for words in (forecast.note, *forecast.caveats, forecast.offer):
            if words:
                notes.append(f'<p class="note">{escape(name + words)}</p>')
        measured = {
            "tokens/s of all ranks": (
                run.tokens_per_s,
                forecast.tokens_per_s,
                forecast.tokens_80,
            ),
            "peak memory of a rank, GiB": (
                run.memory_gib,
                forecast.memory_gib,
                forecast.memory_80,
            ),
        }
        for words, (found, predicted, interval) in measured.items():
            if found is not None and predicted and interval:
                share = f"{found / predicted:.0%}"
                between = " to ".join(map(number, interval))
                rows.append((name + words, number(found), number(predicted), between, share))
    heads = ("", "measured", "predicted", "80% interval", "measured / predicted")
    table = [_table(heads, rows)] if rows else []
    return ["<h2>Against the plan</h2>", *table, *notes]


def _events(run: RunFolder) -> list[str]:
    parts = []
    rows = [(_step(event), event.when, event.kind, event.text) for event in run.events]
    if rows:
        parts.append(_table(("step", "time (UTC)", "event", ""), rows, places=3))
    else:
        parts.append("<p>No events: no start, no bad step and no slow rank is recorded.</p>")
    if run.hidden_events:
        parts.append(f'<p class="note">{run.hidden_events:,} older events are left out.</p>')
    if run.saves:
        seconds = [save.seconds for save in run.saves if save.seconds is not None]
        words = f"{len(run.saves):,} checkpoints, the last after step {run.saves[-1].step:,}"
        if seconds:
            words += (
                f"; a save stopped the training for {sum(seconds) / len(seconds):.2f} s, "
                f"at most {max(seconds):.2f} s"
            )
        parts.append(f"<p>{escape(words)}.</p>")
    if run.hidden_lost_ranks:
        n_all = run.hidden_lost_ranks + len(run.lost_ranks)
        words = f"{n_all:,} reports of lost ranks; the newest {len(run.lost_ranks)} follow"
        parts.append(f'<p class="note">{words}, the others are in the folder.</p>')
    for lost in run.lost_ranks:
        parts.append(
            f"<details><summary>{escape(lost.name)}</summary><pre>{escape(lost.text)}</pre>"
            "</details>"
        )
    return parts


def _step(event: RunEvent) -> str:
    return "" if event.step is None else f"{event.step:,}"


def _recipe(run: RunFolder) -> list[str]:
    if not run.recipe_toml:
        return [f'<p class="note">{escape(run.recipe_problem)}.</p>']
    return [
        "<details><summary>recipe.toml, every value with its origin</summary>"
        f"<pre>{escape(run.recipe_toml)}</pre></details>"
    ]
