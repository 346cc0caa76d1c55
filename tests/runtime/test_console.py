"""What cannot be printed ends no process, and no file takes the number of a closed stream."""

import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.runtime import console

CHILD = """
import os, sys
from composer3d.runtime import console
console.open_closed_descriptors()
console.steady_errors()
console.steady_output()
print("a result", flush=True)
print("a line", file=sys.stderr)
console.say(["another"])
with open(sys.argv[1], "w") as file:
    error = console.output_error()
    file.write(f"{file.fileno()} {error and error.errno}")
"""


@pytest.mark.parametrize(
    ("redirection", "delay_s", "error"),
    [
        ("<&- >&- 2>&-", 0, "None"),
        (">/dev/full 2>/dev/full", 0, "28"),
        # The process that would read has ended before the first line is printed.
        ("> >(:) 2> >(:)", 0.5, "32"),
        (">/dev/null 2>/dev/null", 0, "None"),
    ],
)
def test_a_process_ends_well_whatever_its_output_is(
    tmp_path: Path, redirection: str, delay_s: float, error: str
) -> None:
    command = f'(sleep {delay_s}; exec "$0" -c "$1" "$2") {redirection}'
    arguments = [sys.executable, CHILD, str(tmp_path / "told")]
    done = subprocess.run(
        ["bash", "-c", command, *arguments],
        check=False,
        timeout=60,
        cwd=Path(console.__file__).parents[2],
    )
    assert done.returncode == 0
    number, found = (tmp_path / "told").read_text().split()
    assert int(number) > 2
    assert found == error
