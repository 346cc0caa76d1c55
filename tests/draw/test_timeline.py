"""Timelines: every cell is drawn once, in its place, legible, in SVG and with characters."""

import re

import pytest

from composer3d.draw.terminal import Style
from composer3d.draw.timeline import UNITS, WIDTH, Timeline, draw
from composer3d.draw.timeline_text import render
from composer3d.facts.schedules import SCHEDULES
from composer3d.planner.schedule import actions
from composer3d.planner.simulate import UNIT_TIMES, closed_form, sends, simulate
from tests.draw.pictures import (
    illegible_texts,
    outside,
    overlapping_rectangles,
    overlapping_texts,
    read,
)

PLAIN = Style(width=100, has_colours=False, has_unicode=False)
BUILT_IN = [name for name in SCHEDULES if name != "csv"]


def timeline(schedule: str, pp: int, micro_batches: int, send_s: float = 0.0) -> Timeline:
    per_rank = SCHEDULES[schedule].stages.default_per_rank
    numbers = (schedule, pp, per_rank, micro_batches)
    n_stages = pp * per_rank
    spans = simulate(actions(*numbers), [UNIT_TIMES] * n_stages, send_s)
    messages = sends(spans, n_stages, send_s)
    form = closed_form(*numbers, UNIT_TIMES)
    return Timeline(title=schedule, spans=spans, messages=messages, n_stages=n_stages, form=form)


def picture_of(*timelines: Timeline) -> str:
    return draw(timelines, heading="a recipe", notes=["a note"], unit=UNITS)


@pytest.mark.parametrize("schedule", BUILT_IN)
def test_every_action_is_drawn_in_its_time(schedule: str) -> None:
    drawn = timeline(schedule, 4, 8, send_s=0.25)
    page = read(picture_of(drawn))
    cells = [rectangle for rectangle in page.rectangles if rectangle.tip]
    sentences = sorted(cell.tip for cell in cells)
    assert len(sentences) == len(set(sentences))
    assert len(cells) == sum(len(span.cell) for row in drawn.spans for span in row)
    assert overlapping_rectangles(cells) == []
    # Lengths are in proportion to time.
    scales = set()
    for cell in cells:
        start_s, end_s = map(float, re.findall(r"[\d.]+", cell.tip)[-2:])
        scales.add(round((cell.right - cell.left) / (end_s - start_s), 0))
    assert len(scales) == 1
    assert page.n_lines >= len(drawn.messages)


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches"),
    [
        *((schedule, 4, 8) for schedule in BUILT_IN),
        ("1F1B", 16, 16),
        ("1F1B", 16, 128),
        ("Interleaved1F1B", 8, 32),
        ("ZBVZeroBubble", 8, 40),
    ],
)
def test_nothing_overlaps_or_leaves_the_page(schedule: str, pp: int, micro_batches: int) -> None:
    page = read(picture_of(timeline(schedule, pp, micro_batches), timeline("GPipe", pp, pp)))
    assert page.width == WIDTH
    assert overlapping_texts(page) == []
    assert illegible_texts(page) == []
    assert outside(page) == []
    # The number of a micro-batch is inside of its cell.
    cells = [rectangle for rectangle in page.rectangles if rectangle.tip]
    numbers = [text for text in page.texts if re.fullmatch(r"\d+", text.words)]
    assert len(numbers) > pp * 4
    for text in numbers:
        if text.bottom - text.top < 9:  # numbers in cells are the smallest
            assert any(
                cell.left <= text.left and text.right <= cell.right and cell.top <= text.top
                for cell in cells
            ), text


def test_a_long_schedule_is_cut_and_says_what_is_left_out() -> None:
    long = timeline("1F1B", 8, 200)
    picture = picture_of(long)
    assert "are left out here" in picture
    assert "whole step" in picture
    tips = re.findall(r"stage (\d+), (\w+), micro-batch (\d+)", picture)
    assert ("0", "forward", "0") in tips
    assert ("0", "backward", "199") in tips
    assert ("0", "forward", "100") not in tips
    assert "left out" not in picture_of(timeline("1F1B", 4, 8))


def test_a_strip_says_that_it_goes_on() -> None:
    (whole, cut) = (picture_of(timeline("1F1B", 2, count)) for count in (2, 60))
    assert "goes on below" not in whole
    strips = cut.count(">rank 0<")
    assert strips > 1
    assert cut.count("goes on below") == strips - 1


def test_a_narrow_window_shows_the_whole_picture() -> None:
    (head, *_) = picture_of(timeline("1F1B", 2, 2)).splitlines()
    assert 'style="max-width:100%;height:auto"' in head


def test_a_cell_that_a_strip_cuts_keeps_its_times() -> None:
    picture = picture_of(timeline("1F1B", 16, 16))
    times = {
        (float(start), float(end))
        for start, end in re.findall(r"backward, micro-batch \d+, ([\d.]+) to ([\d.]+)", picture)
    }
    assert {end - start for start, end in times} == {2.0}


def test_two_schedules_have_one_scale() -> None:
    page = read(picture_of(timeline("GPipe", 4, 8), timeline("1F1B", 2, 8)))
    widths = {
        round(rectangle.right - rectangle.left, 1)
        for rectangle in page.rectangles
        if "forward" in rectangle.tip
    }
    assert len(widths) == 1


def test_activations_in_flight_are_those_of_the_schedule() -> None:
    def in_flight(drawn: Timeline) -> list[float]:
        return [drawn.in_flight(rank) for rank in range(len(drawn.spans))]

    assert in_flight(timeline("1F1B", 4, 8)) == [4, 3, 2, 1]
    assert in_flight(timeline("GPipe", 4, 8)) == [8, 8, 8, 8]
    # (V-1) P + 2 (P-1-r) + 1 forwards of one of V stages.
    assert in_flight(timeline("Interleaved1F1B", 4, 8)) == [5.5, 4.5, 3.5, 2.5]


def test_characters_show_the_order_and_the_length_of_actions() -> None:
    text = render([timeline("1F1B", 2, 2)], PLAIN, UNITS)
    assert text.splitlines()[2:4] == [
        "rank 0  |F0F1....B0--..B1--|",
        "rank 1  |..F0B0--F1B1--....|",
    ]
    assert "bubble: 33.3% of the step = (P-1)/(M + P-1)" in text
    assert text.isascii()
    pretty = render([timeline("1F1B", 2, 2)], PLAIN._replace(has_unicode=True), UNITS)
    assert "│F0F1····B0──··B1──│" in pretty
    coloured = render([timeline("1F1B", 2, 2)], PLAIN._replace(has_colours=True), UNITS)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text


def test_a_long_schedule_is_one_letter_for_each_column() -> None:
    text = render([timeline("Interleaved1F1B", 8, 64)], PLAIN, UNITS)
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == 8
    assert all(len(row) <= PLAIN.width for row in rows)
    assert set("".join(row.partition("|")[2] for row in rows)) == set("FfBb.|")


@pytest.mark.parametrize("width", [60, 100, 200])
def test_characters_stay_within_the_width(width: int) -> None:
    for schedule in BUILT_IN:
        text = render([timeline(schedule, 4, 8)], PLAIN._replace(width=width), UNITS)
        rows = [line for line in text.splitlines() if line.startswith("rank ")]
        assert max(map(len, rows)) <= width
