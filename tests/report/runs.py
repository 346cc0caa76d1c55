"""Folders of runs that never ran, for tests of the report."""

import json
import math
from pathlib import Path
from typing import Any

from composer3d.facts import events
from composer3d.facts.events import Event
from composer3d.recipe.resolve import load
from tools.prove.paths import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.toml"


def metrics_of(step: int) -> dict[str, Any]:
    """Return a line as a training on a CPU writes it."""
    return {
        "step": step,
        "loss": 2 + 3 * math.exp(-step / 20),
        "grad_norm": 1 + 1 / step,
        "lr": 1e-3,
        "tokens_per_s": 1000.0 + step % 7,
        "step_s": 0.5,
        "data_s": 0.01,
        "mfu": None,
        "memory_gib": 0.5,
    }


def make_run(
    folder: Path, *, steps: int = 40, sets: tuple[str, ...] = (), device: str = "cpu"
) -> Path:
    """Make the folder of a run with metrics, events and a recipe."""
    folder.mkdir(parents=True)
    recipe = load(QUICKSTART, [f"run.name={folder.name}", *sets]).to_toml()
    (folder / "recipe.toml").write_text(recipe)
    rows = [metrics_of(step) for step in range(1, steps + 1)]
    rows += [{"step": step, "validation_loss": 3.5} for step in range(10, steps + 1, 10)]
    write_rows(folder, rows)
    found = [
        Event(0, 1.7e9, "start", f"8 ranks on {device}, from the beginning", device),
        Event(10, 1.7e9 + 10, "save", "checkpoint of step 10", None, 0.5),
        Event(12, 1.7e9 + 12, "bad steps", "the loss 9 is above 3; its batch is left out"),
        Event(
            10, 1.7e9 + 50, "start", f"8 ranks on {device}, from a checkpoint of step 10", device
        ),
    ]
    (folder / events.FILE).write_bytes(b"".join(map(events.line, found)))
    return folder


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
