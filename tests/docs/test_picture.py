"""The picture of a run in the README: it is what ``tools/draw_run.py`` draws from the recipe."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from composer3d.recipe.resolve import load
from composer3d.recipe.stages import stage_ranges
from tools.draw_run import PICTURE, RECIPE, draw, main
from tools.prove.paths import ROOT

RUN = load(RECIPE).recipe


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == draw(RUN), "run `python -m tools.draw_run`"
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_the_command_writes_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.svg"
    assert main(["-o", str(out)]) == 0
    assert out.read_text() == PICTURE.read_text()
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_the_picture_is_xml_that_shows_every_rank_inside_of_the_page() -> None:
    root = ElementTree.fromstring(PICTURE.read_text())
    svg = "{http://www.w3.org/2000/svg}"
    texts = [element.text or "" for element in root.iter(f"{svg}text")]
    ranks = [text for text in texts if re.fullmatch(r"rank \d+", text)]
    assert sorted(ranks) == [f"rank {rank}" for rank in range(RUN.world_size)]
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for element in root.iter(f"{svg}rect"):
        right = float(element.get("x", 0)) + float(element.get("width", 0))
        bottom = float(element.get("y", 0)) + float(element.get("height", 0))
        assert right <= width
        assert bottom <= height


def test_stages_are_cut_as_compose_cuts_them() -> None:
    assert stage_ranges(RUN) == (range(2), range(2, 4))


def test_other_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="pp, dp_shard and tp, one stage a rank"):
        draw(replace(RUN, mesh=replace(RUN.mesh, cp=2)))
