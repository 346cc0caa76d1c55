"""Measure what an axis costs inside a host and across a slow link, beside what plan predicts.

python tools/mapping.py                       a link of 200 Mbit/s
python tools/mapping.py --mbit 100 --json

Two processes train on one host, and then one on each of two hosts (``two_hosts``; root is needed).
For each of the two placements, ``composer3d doctor --write`` measures a row of hardware, with which
the planner prices the same recipe.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from composer3d.facts.hardware import read_row
from composer3d.planner.search import Device, price
from composer3d.recipe.resolve import load
from tools.two_hosts import NoHostsError, run_job, two_hosts

RECIPE = """\
[run]
name = "mapping"
device = "cpu"
[model]
preset = "debug-tiny"
dim = 512
n_layers = 4
n_heads = 8
n_kv_heads = 8
ffn = 1536
[parallel]
zero = 1
[data]
seq_len = 256
global_batch = 16
micro_batch = 4
[checkpoint]
every = 0
[metrics]
every = 1
tensorboard = false
"""
AXES = ("tp", "dp_shard")
WARM_UP = 2  # steps that are not counted
LIMIT_S = 400.0


class Placement(NamedTuple):
    """One axis on one placement of its two ranks.

    Attributes:
        measured_s: the median time of a step.
        predicted_s: the planner's.
    """

    measured_s: float
    predicted_s: float


class Row(NamedTuple):
    """An axis on both placements."""

    axis: str
    inside: Placement
    across: Placement

    @property
    def measured_ratio(self) -> float:
        return self.across.measured_s / self.inside.measured_s

    @property
    def predicted_ratio(self) -> float:
        return self.across.predicted_s / self.inside.predicted_s

    @property
    def error(self) -> float:
        """How far the predicted ratio is from the measured one, as a fraction of it."""
        return self.predicted_ratio / self.measured_ratio - 1


def measure(folder: Path, axis: str, mbit_s: float | None, steps: int) -> Placement:
    """Measure a row of hardware and train; ``mbit_s`` None places both ranks on one host."""
    name = f"{axis}-{'inside' if mbit_s is None else 'across'}"
    sets = [f"run.out_dir={folder / name}", f"run.steps={steps + WARM_UP}"]
    sets += [f"mesh.{other}={2 if other == axis else 1}" for other in AXES]
    overrides = [word for override in sets for word in ("--set", override)]
    row = folder / f"{name}.toml"
    recipe = str(folder / "recipe.toml")
    _run(["doctor", recipe, *overrides, "--write", str(row)], mbit_s)
    _run(["train", recipe, *overrides], mbit_s)

    lines = (folder / name / "mapping" / "metrics.jsonl").read_text().splitlines()
    times = [entry["step_s"] for entry in map(json.loads, lines) if "step_s" in entry]
    device = Device(hardware=read_row(str(row)), per_node=2 if mbit_s is None else 1)
    planned = price(load(recipe, sets).recipe, device)
    return Placement(median(times[WARM_UP:]), planned.prediction.time.step_s)


def _run(arguments: Sequence[str], mbit_s: float | None) -> None:
    """Run a command of composer3d on both ranks.

    Raises:
        RuntimeError: the command failed.
    """
    command = ["-m", "composer3d", *arguments]
    if mbit_s is None:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        statuses, errors = [done.returncode], done.stderr
    else:
        with two_hosts(mbit_s) as hosts:
            ended = run_job(hosts, 1, command, limit_s=LIMIT_S)
        statuses = [host.status for host in ended]
        errors = "".join(host.errors for host in ended)
    if any(statuses):
        raise RuntimeError(f"{' '.join(arguments)} ended with {statuses}: {errors}")


def table(rows: Sequence[Row], mbit_s: float) -> list[str]:
    """Return the rows as a table in Markdown."""
    lines = [
        f"| two ranks of | a step inside a host | across {mbit_s:g} Mbit/s | ratio | predicted | "
        "error of the ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        inside, across = row.inside, row.across
        lines.append(
            f"| {row.axis} | {inside.measured_s:.2f} s ({inside.predicted_s:.2f}) "
            f"| {across.measured_s:.2f} s ({across.predicted_s:.2f}) "
            f"| {row.measured_ratio:.2f} | {row.predicted_ratio:.2f} | {row.error:+.0%} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, in Mbit/s")
    parser.add_argument("--steps", type=int, default=6, help="steps that are timed")
    parser.add_argument("--json", action="store_true", help="print JSON as the last line")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mapping-") as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE)
        try:
            for axis in AXES:
                inside = measure(folder, axis, None, options.steps)
                rows.append(Row(axis, inside, measure(folder, axis, options.mbit, options.steps)))
        except NoHostsError as error:
            print(error, file=sys.stderr)
            return 2
    print(*table(rows, options.mbit), sep="\n")
    if options.json:
        answer = [
            {
                "axis": row.axis,
                "inside": row.inside._asdict(),
                "across": row.across._asdict(),
                "measured_ratio": row.measured_ratio,
                "predicted_ratio": row.predicted_ratio,
            }
            for row in rows
        ]
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
