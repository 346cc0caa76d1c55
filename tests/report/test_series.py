"""``report.series``: long runs are thinned and keep each spike, and hostile lines do no harm."""

import json
from pathlib import Path

import pytest

from composer3d.report import series
from composer3d.report.series import FILE, Point, Series
from composer3d.training.observers import metrics


def test_the_file_is_that_of_the_training() -> None:
    assert series.FILE == metrics.FILE


def test_a_short_run_keeps_every_point() -> None:
    found = Series()
    expected = [Point(step, step * 0.5) for step in range(1, 200)]
    for point in expected:
        found.add(*point)
    assert found.points == expected


def test_a_long_run_keeps_its_extremes_and_ends() -> None:
    found, recent = Series(), Series(since=199_000)
    steps = 200_000
    for step in range(1, steps + 1):
        value = {77_777: 1e6, 123_456: -5.0}.get(step, 2 + step / steps)
        found.add(step, value)
        recent.add(step, value)
    points = found.points
    assert len(points) <= 4 * 240
    assert found.most == 1e6
    assert recent.most == 3.0
    assert found.least == Point(123_456, -5.0)
    assert {Point(77_777, 1e6), found.least} <= set(points)
    assert (points[0].step, points[-1].step) == (1, steps)
    assert found.median == pytest.approx(2.5, abs=0.01)
    assert recent.median == 2 + (199_001 + steps) / 2 / steps
    # The spike is one point: its neighbours are not pulled up.
    assert sum(point.value > 4 for point in points) == 1


def test_the_median_of_an_even_number_is_between_the_middle_two() -> None:
    found = Series()
    for step, value in enumerate([200.0, 100.0], 1):
        found.add(step, value)
    assert found.median == 150.0


def test_steps_may_come_in_any_order() -> None:
    found = Series()
    for step in [10**9, *range(1000, 0, -1)]:
        found.add(step, float(step))
    assert found.points == sorted(found.points)
    assert found.last == Point(10**9, 1e9)
    assert found.points[0] == Point(1, 1.0)


def test_values_that_are_not_finite_are_counted() -> None:
    found = Series()
    for value in (None, float("nan"), float("inf"), 1e300, 10**400, "3", [1], {}, True, 2):
        found.add(1, value)
    assert found.not_finite == 5
    assert found.points == [Point(1, 2.0)]


def test_denormal_values_are_zero() -> None:
    found = Series()
    found.add(1, 5e-324)
    assert found.points == [Point(1, 0.0)]


def test_hostile_lines_are_left_out(tmp_path: Path) -> None:
    lines = [
        b"not json",
        b"[1]",
        b'{"loss": 1}',
        b'{"step": true, "loss": 1}',
        b'{"step": -3, "loss": 1}',
        b'{"step": 10000000000, "loss": 1}',
        b'{"step": 1, "loss": NaN}',
        b"\xff" * 100,
        b"[" * 50_000,
    ]
    good = b'{"step": 4, "loss": 2.5}'
    (tmp_path / FILE).write_bytes(b"\n".join([*lines, b"", good]) + b'\n{"step": 5, "lo')
    found = series.read(tmp_path)
    assert found.of("loss").points == [Point(4, 2.5)]
    assert found.wrong_lines == len(lines) + 1


def test_too_many_metrics_are_left_out(tmp_path: Path) -> None:
    row = {"step": 1, **{f"m{number}": 1.0 for number in range(900)}, "x" * 500: 1.0}
    second = {"step": 2, **{f"n{number}": 1.0 for number in range(900)}}
    (tmp_path / FILE).write_text(json.dumps(row) + "\n" + json.dumps(second) + "\n")
    assert len(series.read(tmp_path).series) == series.MOST_METRICS


def test_a_missing_metric_has_no_points() -> None:
    empty = series.Curves().of("loss")
    assert (empty.points, empty.last, empty.least) == ([], None, None)
    assert (empty.median, empty.most) == (None, None)
