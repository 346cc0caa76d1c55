"""``report.chart``: every point is inside of its picture, whatever the values are."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from composer3d.report.chart import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Level, Line, Mark, draw
from composer3d.report.series import Point

VALUES = {
    "usual": [5.0, 3.0, 2.5, 2.4],
    "constant": [3.0, 3.0, 3.0],
    "zero": [0.0, 0.0],
    "one": [7.0],
    "negative": [-3.0, -2.0],
    "both signs": [-1e30, 1e30],
    "tiny": [1e-12, 2e-12],
    "least": [1e-30, 2e-30],
    "wide": [1e-8, 1.0, 1e6],
    "near": [1.0, 1.0 + 1e-12],
    "large": [1e30, 9e29],
}


def svg_of(figure: str) -> ElementTree.Element:
    found = re.search("<svg.*</svg>", figure, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found.group())


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("from_zero", [False, True])
def test_points_are_inside(name: str, from_zero: bool) -> None:
    points = [Point(step, value) for step, value in enumerate(VALUES[name], 1)]
    svg = svg_of(draw("Loss", [Line("a", "c1", points)], from_zero=from_zero))
    (curve,) = svg.iter("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in curve.attrib["points"].split()]
    assert len(places) == len(points)
    assert all(LEFT <= x <= RIGHT and TOP - 0.1 <= y <= BOTTOM + 0.1 for x, y in places)


@pytest.mark.parametrize("last", [1, 2, 7, 250, 99_999, 10**9])
@pytest.mark.parametrize("tokens", [1, 4_096, 16_777_216])
def test_labels_of_steps_do_not_overlap(last: int, tokens: int) -> None:
    points = [Point(1, 1.0), Point(last, 2.0)]
    svg = svg_of(draw("Loss", [Line("a", "c1", points)], tokens_per_step=tokens))
    rows: dict[str, list[tuple[float, float]]] = {}
    for text in svg.iter("text"):
        width = 0.6 * 12 * len(text.text or "")
        x = float(text.attrib["x"])
        shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib.get("text-anchor", "start")]
        left = x - shift * width
        assert left >= 0
        assert left + width <= WIDTH
        if float(text.attrib["y"]) > BOTTOM + 10:
            rows.setdefault(text.attrib["y"], []).append((left, left + width))
    assert len(rows) == 2
    for row in rows.values():
        for before, after in itertools.pairwise(sorted(row)):
            assert before[1] <= after[0]


def test_no_points_draw_nothing() -> None:
    assert draw("Loss", [Line("a", "c1", [])]) == ""


def test_marks_and_levels_are_drawn() -> None:
    points = [Point(1, 1.0), Point(100, 2.0)]
    figure = draw(
        "Speed",
        [Line("a", "c1", points, not_finite=3)],
        from_zero=True,
        marks=[Mark(50, "bad", "<b>"), Mark(500, "bad", "outside")],
        levels=[Level("predicted", 8.0)],
    )
    assert "3 values were not finite" in figure
    assert "predicted <b>8</b>" in figure
    svg = svg_of(figure)
    assert [mark[0].text for mark in svg.iter("line") if "bad" in mark.attrib["class"]] == ["<b>"]


def test_names_are_escaped() -> None:
    figure = draw('<i>"', [Line("<script>", "c1", [Point(1, 1.0)])])
    assert "<script>" not in figure
    assert "<i>" not in figure
    assert "&lt;script&gt;" in figure
