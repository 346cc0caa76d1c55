"""The command ``train`` as a user runs it: signals, torchrun, layouts, and when it saves."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.commands.train import step_of_finished_run, train_rank
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import CheckpointTable
from composer3d.runtime import process_group
from composer3d.runtime.launch import Pool, WorkerError
from tests.training.jobs import (
    CUBE,
    DATA,
    RECIPE,
    SINGLE,
    Moment,
    Stopped,
    build_and_train,
    losses,
    train,
    train_until_a_signal,
)


def command(*sets: str) -> list[str]:
    """The command of a user, with these overrides."""
    options = [word for override in sets for word in ("--set", override)]
    return ["-m", "composer3d", "train", "recipe.toml", *options]


@pytest.mark.parametrize(("mesh", "number"), [(SINGLE, signal.SIGTERM), (DATA, signal.SIGHUP)])
def test_signal_ends_the_step_saves_and_resumes(
    pool: Pool, folder: Path, mesh: str, number: signal.Signals
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = [sys.executable, *command("run.steps=100000")]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step     12/"):
                break
        process.send_signal(number)
        last_lines = process.stderr.read()
        status = process.wait(timeout=60)
    assert status == 128 + number, last_lines
    assert f"stopped by signal {number} after step" in last_lines
    stopped = int(last_lines.partition("after step ")[2].partition(";")[0])
    again = train(pool, folder, f"run.steps={stopped + 1}")
    assert f"{stopped} of {stopped + 1} steps are done" in again.stderr
    assert again.returncode == 0


def test_a_run_whose_last_save_fails_is_not_said_to_have_stopped(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    sets = ("run.steps=100000", "checkpoint.every=0", "checkpoint.async_save=true")
    arguments = [sys.executable, *command(*sets)]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step     12/"):
                break
        # The save would make a folder of this name.
        (folder / "runs/small/checkpoints").touch()
        process.send_signal(signal.SIGTERM)
        last_lines = process.stderr.read()
        status = process.wait(timeout=60)
    assert status == 1, last_lines
    assert "could not be saved" in last_lines
    assert "stopped by signal" not in last_lines


def test_torchrun_gives_the_same_losses(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = [*torchrun, *command("run.steps=4", "run.out_dir=torchrun")]
    result = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert result.returncode == 0, result.stderr
    assert train(pool, folder, "run.steps=4", "run.out_dir=own").returncode == 0
    assert losses(folder, "torchrun") == losses(folder, "own")


def test_deterministic_runs_have_the_same_bits_on_a_cpu_as_all_others(
    pool: Pool, folder: Path
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    # The second command resumes. The first one has made the batch of step 6 ahead.
    for steps in (5, 7):
        sets = ("run.out_dir=deterministic", "run.deterministic=true", f"run.steps={steps}")
        result = train(pool, folder, *sets)
        assert result.returncode == 0, result.stderr
        assert "GPU:" not in result.stderr
    assert train(pool, folder, "run.out_dir=whole", "run.steps=7").returncode == 0
    assert losses(folder, "deterministic") == losses(folder, "whole")


def test_world_that_does_not_fit_is_refused_before_a_group_forms(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=CUBE))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(process_group, "open_store", lambda **_: pytest.fail("a group forms"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    sizes = "pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 8 processes, but the world has 4"
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train_rank("recipe.toml", []) == 2
        errors = capsys.readouterr().err
        assert (sizes in errors) == bool(errors) == (rank == "0")


def test_loss_that_is_not_finite_stops_the_run(pool: Pool, folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    # Each step multiplies the weights by 1 - lr * weight_decay = -99, before the rate decays.
    growing = (
        "optim.lr=10",
        "optim.weight_decay=10",
        "optim.clip=0",
        "optim.warmup=0",
        "checkpoint.every=0",
    )
    result = train(pool, folder, *growing)
    assert result.returncode == 1
    assert "are not finite; the newest checkpoint is none; lower optim.lr" in result.stderr
    assert result.stderr.count("not finite") == 1


@pytest.mark.parametrize(
    ("every", "every_minutes", "saved"),
    [(4, 15, [3, 4, 7, 8]), (0, 0, [8])],
)
def test_a_checkpoint_is_due_by_steps_or_minutes_of_rank_0(
    pool: Pool, folder: Path, every: int, every_minutes: int, saved: list[int]
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    sets = [f"checkpoint.every={every}", f"checkpoint.every_minutes={every_minutes}"]
    sets += ["checkpoint.keep=20", "run.steps=8", "metrics.every=100"]
    clocks = [6.0, 1000.0]  # by rank 1's clock a checkpoint is due after each step
    arguments = {"folder": str(folder), "sets": sets, "minutes": clocks}
    pool.run(build_and_train, arguments, world_size=2)
    names = sorted(path.name for path in (folder / "runs/small/checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in saved]


@pytest.mark.parametrize(
    ("moment", "sets", "stopped"),
    [
        ("step 3", [], Stopped(signal.SIGTERM, 3, 0)),
        # No step and no second save come after a save that took long.
        ("save", ["checkpoint.every=3"], Stopped(signal.SIGTERM, 3, 0)),
        ("validation", ["validation.every=2"], Stopped(signal.SIGTERM, 2, 2)),
    ],
)
def test_a_signal_of_one_rank_ends_all_as_soon_as_the_state_is_saved(
    pool: Pool, folder: Path, moment: Moment, sets: list[str], stopped: Stopped
) -> None:
    assert end_by_a_signal(pool, folder, moment, sets) == [stopped] * 2
    names = [path.name for path in (folder / "runs/small/checkpoints").iterdir()]
    assert names == [f"step-{stopped.step:08d}"]


@pytest.mark.parametrize("moment", ["save", "validation"])
def test_a_last_validation_that_was_cut_off_is_done_by_the_next_start(
    pool: Pool, folder: Path, moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    sets = ["checkpoint.every=8", "validation.every=8", "validation.path=corpus.txt"]
    evaluated = 2 if moment == "validation" else 0
    stopped = end_by_a_signal(pool, folder, moment, sets)
    assert stopped == [Stopped(signal.SIGTERM, 8, evaluated)] * 2
    metrics = folder / "runs/small/metrics.jsonl"
    recipe = load("recipe.toml", ["run.steps=8", "data.micro_batch=4", *sets], world_size=2).recipe
    assert "validation_loss" not in metrics.read_text()
    assert step_of_finished_run(recipe) is None

    (done, _) = end_by_a_signal(pool, folder, "step 3", sets)
    assert (done.number, done.step) == (0, 8)
    assert done.evaluated > 2
    rows = [json.loads(text) for text in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "validation_loss" in row] == [8]
    assert step_of_finished_run(recipe) == 8
    # It is done once.
    assert end_by_a_signal(pool, folder, "step 3", sets) == [Stopped(0, 8, 0)] * 2


def test_a_signal_during_a_save_in_the_background_ends_after_the_save(
    pool: Pool, folder: Path
) -> None:
    sets = ["checkpoint.every=3", "checkpoint.async_save=true", "checkpoint.keep=9"]
    stopped, same = end_by_a_signal(pool, folder, "save", sets)
    assert stopped == same
    assert stopped.number == signal.SIGTERM
    assert stopped.step in (3, 4, 5)
    names = sorted(path.name for path in (folder / "runs/small/checkpoints").iterdir())
    assert names == sorted({"step-00000003", f"step-{stopped.step:08d}"})


def test_a_signal_before_the_first_step_is_done_ends_at_once(pool: Pool, folder: Path) -> None:
    # The compiler may need minutes for the first step, and there is nothing to save.
    with pytest.raises(WorkerError, match="rank 1: the process died"):
        end_by_a_signal(pool, folder, "step 1", [])
    assert not list((folder / "runs/small/checkpoints").glob("*"))


def end_by_a_signal(pool: Pool, folder: Path, moment: Moment, sets: list[str]) -> list[Stopped]:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    sets = ["run.steps=8", "metrics.every=100", "checkpoint.every=0", *sets]
    sets += ["data.micro_batch=4", "validation.path=corpus.txt"]
    arguments = {"folder": str(folder), "sets": sets, "moment": moment}
    return pool.run(train_until_a_signal, arguments, world_size=2)


def test_a_run_saves_by_default() -> None:
    assert CheckpointTable().every == 500
    assert CheckpointTable().every_minutes == 15.0
