"""What experts learn: how evenly their router uses them, and their loss beside a dense model's.

Both comparisons train the quickstart recipes on one process, with the sizes and the batches of the
recipes. ``verify`` proves that their 8 processes compute the same.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.jobs import Job, run_together
from tools.bench.tables import print_head, print_row

ROOT = Path(__file__).parents[2]
DENSE, EXPERTS = ROOT / "recipes" / "quickstart.toml", ROOT / "recipes" / "quickstart-moe.toml"
ONE_PROCESS = (
    'run.device="cpu"',
    "mesh.pp=1",
    "mesh.dp_shard=1",
    "mesh.tp=1",
    "data.micro_batch=32",
    "metrics.tensorboard=false",
    "checkpoint.every=0",
)
# Ways to balance the load of experts, as overrides of quickstart-moe.toml.
BALANCES: dict[str, tuple[str, ...]] = {
    "neither": ("model.balance_loss=0.0",),
    "balance loss 0.005, as in the recipe": (),
    "bias, sigmoid scores": (
        "model.balance_loss=0.0",
        'model.router="sigmoid"',
        "model.router_bias=true",
        "model.bias_rate=0.01",
    ),
}
BALANCE_STEPS = 200
LAST_STEPS = 50  # over which the load is averaged
SEEDS = (0, 1, 2)


def train(python: str, recipe: Path, sets: Sequence[str]) -> list[dict[str, Any]]:
    """Train a recipe on one process; return the lines of its metrics."""
    with tempfile.TemporaryDirectory(prefix="composer3d-bench-") as folder:
        command = [python, "-m", "composer3d", "train", str(recipe)]
        for override in (*ONE_PROCESS, *sets, f"run.out_dir={folder}", 'run.name="run"'):
            command += ["--set", override]
        metrics = Path(folder) / "run" / "metrics.jsonl"
        job = Job(command=command, output=Path(folder) / "output", metrics=metrics)
        job.env["OMP_NUM_THREADS"] = "1"
        run_together([job])
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def report_balance(python: str) -> None:
    """Print the load of the busiest expert, over the mean, for each way to balance."""
    load = "load of the busiest expert / mean, by layer"
    print_head("balance", load, "of all layers", "loss")
    for name, sets in BALANCES.items():
        every = (f"run.steps={BALANCE_STEPS}", "validation.every=0", "metrics.every=1")
        lines = train(python, EXPERTS, ["mesh.ep=1", *every, *sets])
        steps = [line for line in lines if "loss" in line]  # not a save, for example
        last = [line for line in steps if line["step"] > BALANCE_STEPS - LAST_STEPS]
        layers = sorted(key for key in last[0] if key.startswith("expert_load/"))
        loads = [statistics.mean(line[key] for line in last) for key in layers]
        shown = ", ".join(f"{load:.2f}" for load in loads)
        loss = statistics.mean(line["loss"] for line in last)
        print_row(name, shown, f"{statistics.mean(loads):.2f}", f"{loss:.3f}")


def report_losses(python: str) -> None:
    """Print the last validation loss of the quickstart, dense and with experts, for each seed."""
    print_head("seed", "dense", "experts")
    for seed in SEEDS:
        losses = [
            last_loss(train(python, recipe, [*sets, f"run.seed={seed}"]))
            for recipe, sets in ((DENSE, ()), (EXPERTS, ("mesh.ep=1",)))
        ]
        print_row(seed, *(f"{loss:.4f}" for loss in losses))


def last_loss(lines: Sequence[dict[str, Any]]) -> float:
    """Return the last validation loss of a run."""
    return float([line["validation_loss"] for line in lines if "validation_loss" in line][-1])
