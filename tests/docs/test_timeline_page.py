"""``docs/timeline.md``: its pictures are what its commands draw, and its formulas are ours."""

import re
import shlex
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.planner.simulate import UNIT_TIMES, closed_form
from tools.prove.paths import ROOT

PAGE = (ROOT / "docs" / "timeline.md").read_text()
COMMANDS = re.findall(r"^composer3d (.* -o docs/.*\.svg)$", PAGE, re.MULTILINE)


def test_every_picture_of_the_page_has_a_command() -> None:
    drawn = {shlex.split(command)[-1] for command in COMMANDS}
    shown = {f"docs/{name}" for name in re.findall(r"\]\(([\w-]+\.svg)\)", PAGE)}
    assert drawn == shown


@pytest.mark.parametrize("command", COMMANDS)
def test_a_picture_is_up_to_date(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *arguments, name = shlex.split(command)
    out = tmp_path / "own.svg"
    monkeypatch.chdir(ROOT)
    assert cli.main([*arguments, str(out)]) == 0
    assert out.read_text() == (ROOT / name).read_text(), f"run `composer3d {command}`"


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("LoopedBFS", 2),
        ("Interleaved1F1B", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_the_formulas_are_those_of_the_simulation(schedule: str, stages: int) -> None:
    form = closed_form(schedule, 4, stages, 16, UNIT_TIMES)
    assert form is not None
    formulas, _, _ = PAGE.partition("### Simulated and measured bubbles")
    (row,) = re.findall(
        rf"^\| (?:[\w, ]+, )?{schedule}(?:, [\w, ]+)? \| .* \|$", formulas, re.MULTILINE
    )
    assert f"| {form.formula} |" in PAGE
    assert schedule in row
