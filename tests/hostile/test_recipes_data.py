"""Every case is refused in one line, at once, and in little memory; nothing is left where it ran."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.data import prepare as prepare  # imported before the time of a case is taken
from composer3d.verify import main_verify as main_verify
from hostile.recipes_data import CASES, Case


def test_names_of_cases_are_unique_and_there_are_many() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 400


@pytest.mark.timeout(60)  # one that waits for ever
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("ascii", "replace").decode()[:80])
def test_refused_in_one_line(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = case.make(tmp_path)
    before = sorted(os.listdir(tmp_path))
    begin = time.process_time()
    status = cli.main(arguments)
    seconds = time.process_time() - begin
    out, err = capfd.readouterr()
    assert status == 2, err
    lines = err.splitlines()
    assert len(lines) == 1 or "mend them first" in lines[-1], err[:2000]
    assert re.search(case.says, lines[-1]), err[:2000]
    assert "Traceback" not in out + err
    assert seconds < 2, f"{seconds:.1f} s"
    assert sorted(os.listdir(tmp_path)) == before
    # Some hold folders a thousand deep, at which pytest's own removal gives up.
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)
