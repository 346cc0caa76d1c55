"""Small trainings: a recipe for several meshes, and the commands that run it."""

import json
import os
import resource
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer3d import cli
from composer3d.checkpoint import folders
from composer3d.commands.train import train_rank
from composer3d.facts.errors import UserError
from composer3d.recipe.resolve import load
from composer3d.reliability import signals
from composer3d.reliability.report import Report
from composer3d.runtime.environment import START_VARIABLE, STORE_VARIABLE
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training import loop, saving
from composer3d.training.build import Run, build
from composer3d.training.observers.observer import Observer
from composer3d.training.step_values import StepSums

RECIPE = """\
[run]
name = "small"
steps = 20
seed = 3
device = "cpu"

[model]
preset = "debug-tiny"

[mesh]
{mesh}

[data]
source = "text"
path = "corpus.txt"
seq_len = 32
global_batch = 8
micro_batch = 2

[optim]
lr = 1e-3
warmup = 4
decay = 20

[checkpoint]
every = 5
keep = 2

[metrics]
every = 1
tensorboard = false
"""
SINGLE = "dp_shard = 1"
DATA = "dp_shard = 2"
CUBE = "pp = 2\ndp_shard = 2\ntp = 2"


class TrainEnd(NamedTuple):
    """How a training has ended.

    Attributes:
        returncode: the exit status, the same on all ranks.
        stderr: what the ranks wrote to standard error, one after the other.
    """

    returncode: int
    stderr: str


def train(pool: Pool, folder: Path, *sets: str, **variables: str) -> TrainEnd:
    """Train the recipe in ``folder`` as ``composer3d train`` does, in workers that have torch.

    Args:
        sets: overrides, each ``table.key=value``.
        variables: of the environment.
    """
    recipe = load(folder / "recipe.toml", sets, check_files=False).recipe
    arguments = {"folder": str(folder), "sets": sets, "variables": variables}
    ranks = pool.run(train_as_rank, arguments, world_size=recipe.world_size)
    (status,) = {rank.returncode for rank in ranks}
    return TrainEnd(status, "".join(rank.stderr for rank in ranks))


def train_as_rank(folder: str, sets: Sequence[str], variables: Mapping[str, str]) -> TrainEnd:
    """A task: run the command if this process is alone, or else train as one of its ranks."""
    os.chdir(folder)
    os.environ |= variables
    folders.job_note.cache_clear()  # this process may have been a rank of another job
    with tempfile.TemporaryFile("w+") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
        if os.environ["WORLD_SIZE"] == "1":
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
                os.environ.pop(name, None)
            for name in (STORE_VARIABLE, START_VARIABLE):
                os.environ.pop(name, None)
            status = cli.main(["train", "recipe.toml", *(f"--set={text}" for text in sets)])
        else:
            try:
                status = train_rank("recipe.toml", sets)
            except UserError as error:
                status = error.status  # as for the launcher: rank 0 has printed it
        sys.stderr.flush()
        errors.seek(0)
        return TrainEnd(status, errors.read())


def is_imported(name: str) -> bool:
    """A task: return whether a module has been imported."""
    return name in sys.modules


def losses(folder: Path, out_dir: str) -> dict[int, float]:
    """The loss of each logged step."""
    lines = (folder / out_dir / "small" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def write_corpus(folder: Path) -> None:
    text = bytes((i * i + i // 7) % 251 + 1 for i in range(20_000))
    (folder / "corpus.txt").write_bytes(text)


class Listener(Observer):
    """Keeps the reports of a run: the steps done, the lines and the values of each."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, Sequence[str], Mapping[str, float]]] = []

    def report(self, step: int, report: Report) -> None:
        self.reports.append((step, report.lines, dict(report.values)))


@contextmanager
def built_run(folder: str, sets: Sequence[str]) -> Iterator[Run]:
    """In a task: build the run of the recipe in ``folder``, which becomes the working directory."""
    os.chdir(folder)
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=int(os.environ["WORLD_SIZE"]))
        yield build(resolved.recipe, device, resolved.to_toml())


def build_and_train(
    folder: str,
    sets: Sequence[str],
    minutes: list[float] | None = None,
    largest_file: int | None = None,
) -> None:
    """A task: train the recipe in ``folder``.

    Args:
        minutes: how long a step takes on the clock of each rank; None for real clocks.
        largest_file: the most bytes that a file can have, as on a full disk; None for no limit.
    """
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if minutes is not None:
        begun = []
        compute_gradients = loop.compute_gradients
        step_s = 60 * minutes[int(os.environ["RANK"])]

        def begin_step(*arguments: Any, **keywords: Any) -> StepSums:
            begun.append(None)
            return compute_gradients(*arguments, **keywords)

        loop.compute_gradients = begin_step
        saving.time = types.SimpleNamespace(  # type: ignore[assignment]
            monotonic=lambda: step_s * len(begun)
        )
    with built_run(folder, sets) as run:
        loop.train(run)


Moment = Literal["step 1", "step 3", "save", "validation"]


class Stopped(NamedTuple):
    """How a rank ended.

    Attributes:
        number: what ``loop.train`` returned.
        step: the steps done.
        evaluated: the micro-batches that were evaluated.
    """

    number: int
    step: int
    evaluated: int


def train_until_a_signal(folder: str, sets: list[str], moment: Moment) -> Stopped:
    """A task: train; the last rank gets SIGTERM twice in a moment, as if 5 s lay between.

    Args:
        moment: in which step, or in the first save, or in the second batch of the first validation.
    """
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    signals.INSIST_S = -1.0
    evaluated = saves = 0

    def send(now: bool) -> None:
        if now and rank == size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with built_run(folder, sets) as run:
        forward_backward, evaluate = run.stages.forward_backward, run.stages.evaluate
        write = run.saver.store._write

        def step_with_signal(*arguments: Any) -> Any:
            send(moment == f"step {run.step + 1}")
            return forward_backward(*arguments)

        def evaluate_with_signal(*arguments: Any) -> Any:
            nonlocal evaluated
            evaluated += 1
            send(moment == "validation" and evaluated == 2)
            return evaluate(*arguments)

        def write_with_signal(*arguments: Any) -> None:
            nonlocal saves
            saves += 1
            send(moment == "save" and saves == 1)
            write(*arguments)

        run.stages.forward_backward = step_with_signal  # type: ignore[method-assign]
        run.stages.evaluate = evaluate_with_signal  # type: ignore[method-assign]
        run.saver.store._write = write_with_signal  # type: ignore[method-assign]
        return Stopped(loop.train(run), run.step, evaluated)
