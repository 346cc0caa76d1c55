"""The parts of a GPU hour: they run with tiny sizes, and the page has what they found."""

import json
import subprocess
import sys
from pathlib import Path

from tools.gpu.__main__ import _has_failed
from tools.gpu.page import text_of
from tools.gpu.parts import PARTS
from tools.prove.paths import ROOT


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tools.gpu", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_parts_are_rehearsed_and_the_page_has_their_figures(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "grouped", "attention", "--out", str(tmp_path), "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    grouped = json.loads((tmp_path / "grouped.json").read_text())["figures"]
    assert list(grouped) == ["even", "uneven", "half are empty"]
    rows = json.loads((tmp_path / "attention.json").read_text())["figures"]["rows"]
    assert all(row["error"] < 1e-5 for row in rows.values())
    page = text_of(tmp_path)
    assert "| rows: 16 documents: error |" in page
    assert "## Steps with experts" not in page


def test_a_part_that_fails_leaves_its_error(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "machine", "--out", str(tmp_path))
    if done.returncode:  # there is no GPU here
        assert "torch sees no CUDA GPU here" in (tmp_path / "machine.json").read_text()
        assert "It failed:" in text_of(tmp_path)


def test_a_figure_that_failed_fails_its_part() -> None:
    assert _has_failed({"rows": {"window": {"failed": "no kernel"}}})
    assert not _has_failed({"summary": "9 passed", "failed": [], "error": 0.0})


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "memory", "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"memory: use {', '.join(PARTS)}" in done.stderr
