"""The command as a user runs it: resume, stop, torchrun, and what is said when it cannot go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
micro_batch = 1

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


def train(folder: Path, *sets: str, launcher: tuple[str, ...] = ("-m",)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "composer3d", "train", "recipe.toml"]
    for each in sets:
        command += ["--set", each]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def losses(folder: Path, out_dir: str) -> dict[int, float]:
    lines = (folder / out_dir / "small" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_bytes(bytes((i * i + i // 7) % 251 + 1 for i in range(20_000)))
    return tmp_path


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five steps of a run on one process."""
    base = tmp_path_factory.mktemp("trained")
    (base / "corpus.txt").write_bytes(bytes((i * i + i // 7) % 251 + 1 for i in range(20_000)))
    (base / "other.txt").write_bytes(b"another text " * 100)
    (base / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    assert train(base, "run.steps=5").returncode == 0
    return base


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test to spoil."""
    return shutil.copytree(trained_once, tmp_path / "copy")


@pytest.mark.parametrize("mesh", [SINGLE, CUBE], ids=["single", "pp-dp-tp"])
def test_resumed_run_repeats_the_losses_bit_for_bit(folder: Path, mesh: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    whole = train(folder, "run.out_dir=whole")
    assert whole.returncode == 0, whole.stderr
    assert train(folder, "run.out_dir=parts", "run.steps=10").returncode == 0
    second = train(folder, "run.out_dir=parts")
    assert second.returncode == 0, second.stderr
    assert "resumed from parts/small/checkpoints/step-00000010: 10 of 20 steps are done" in second.stderr
    assert losses(folder, "parts") == losses(folder, "whole")
    assert len(losses(folder, "whole")) == 20
    assert losses(folder, "whole")[20] < losses(folder, "whole")[1] - 0.1  # and it learns
    kept = sorted(path.name for path in (folder / "parts/small/checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000020"]
    assert 'path = "corpus.txt"' in (folder / "parts/small/recipe.toml").read_text()


@pytest.mark.parametrize("mesh", [SINGLE, DATA], ids=["single", "dp"])
def test_signal_ends_the_step_saves_and_resumes(folder: Path, mesh: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = [sys.executable, "-m", "composer3d", "train", "recipe.toml", "--set", "run.steps=100000"]
    with subprocess.Popen(arguments, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step     12/"):
                break
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        status = process.wait(timeout=60)
    assert status == 128 + signal.SIGTERM, rest
    assert "stopped by signal 15 after step" in rest
    stopped = int(rest.partition("after step ")[2].partition(";")[0])
    again = train(folder, f"run.steps={stopped + 1}")
    assert f"{stopped} of {stopped + 1} steps are done" in again.stderr
    assert again.returncode == 0


def test_torchrun_gives_the_same_losses(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    result = train(folder, "run.steps=4", "run.out_dir=torchrun", launcher=torchrun)
    assert result.returncode == 0, result.stderr
    assert train(folder, "run.steps=4", "run.out_dir=own").returncode == 0
    assert losses(folder, "torchrun") == losses(folder, "own")


def test_layouts_start_from_the_same_weights_and_data(folder: Path) -> None:
    first = []
    for out_dir, mesh in (("a", SINGLE), ("b", CUBE)):
        (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
        assert train(folder, f"run.out_dir={out_dir}", "run.steps=4").returncode == 0
        first.append(losses(folder, out_dir))
    assert first[0] == pytest.approx(first[1], rel=1e-5)


def test_world_that_does_not_fit_is_refused_before_a_group_forms(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=CUBE))
    # No MASTER_ADDR: a rank that tried to form a group would fail in another way.
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "composer3d", "train", "recipe.toml"]
    begin = time.monotonic()
    for rank in ("0", "1"):
        result = subprocess.run(
            command,
            cwd=folder,
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        expected = "pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 8 processes, but the world has 4"
        assert (expected in result.stderr) == (rank == "0")
        assert bool(result.stderr) == (rank == "0")
    assert time.monotonic() - begin < 30


def test_loss_that_is_not_finite_stops_the_run(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    result = train(folder, "optim.lr=1e30", "optim.clip=0", "optim.warmup=0")
    assert result.returncode == 1
    assert "are not finite; the newest checkpoint is none; lower optim.lr" in result.stderr
    assert result.stderr.count("not finite") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.n_layers=3"], "was made with model.n_layers = 4, but the recipe says 3"),
        (["model.rope_theta=123.0"], "was made with model.rope_theta = 10000.0, but the recipe says 123.0"),
        (["precision.params=float64"], "was made with precision.params = float32, but the recipe says float64"),
        (["data.path=other.txt"], "the data has changed since"),
        (["data.global_batch=16"], "data.global_batch = 16, but the checkpoint was made with 8"),
        (
            ["checkpoint.resume=none"],
            'checkpoint.resume = "none", but runs/small/checkpoints goes on from step-00000005;',
        ),
        (["run.name=other", "checkpoint.resume=."], "is not a checkpoint: it has no manifest.json"),
    ],
    ids=["layers", "theta", "dtype", "data", "batch", "anew", "folder"],
)
def test_checkpoint_that_does_not_fit_is_refused(trained: Path, sets: list[str], message: str) -> None:
    result = train(trained, *sets)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_run_that_is_done_says_so(trained: Path) -> None:
    result = train(trained, "run.steps=5", "optim.decay=20")
    assert result.returncode == 0
    assert "nothing to do: 5 of 5 steps are done" in result.stderr
    assert "warning" not in result.stderr


def test_path_seeds_a_new_run_and_no_more(trained: Path) -> None:
    seeded = ["run.name=second", "checkpoint.resume=runs/small/checkpoints/step-00000005"]
    first = train(trained, *seeded, "run.steps=8")
    assert "resumed from runs/small/checkpoints/step-00000005: 5 of 8 steps are done" in first.stderr
    assert "no checkpoint in runs/second" not in first.stderr
    shutil.rmtree(trained / "runs/small/checkpoints/step-00000005")  # as its own run does in time
    again = train(trained, *seeded, "run.steps=10")
    assert "resumed from runs/second/checkpoints/step-00000008: 8 of 10 steps are done" in again.stderr
    back = train(trained, "run.name=second", "checkpoint.resume=runs/second/checkpoints/step-00000008")
    assert back.returncode == 2
    assert "goes on from step-00000010; give the run another run.name, or remove what is newer" in back.stderr


def test_schedule_that_changes_the_past_is_said(trained: Path) -> None:
    result = train(trained, "run.steps=6", "optim.lr=2e-3")
    assert result.returncode == 0
    assert "warning: step 5 was taken with a learning rate of" in result.stderr


def test_damaged_checkpoint_is_named(trained: Path) -> None:
    saved = trained / "runs/small/checkpoints/step-00000005"
    next(saved.glob("*.distcp")).write_bytes(b"torn")
    result = train(trained)
    assert result.returncode == 2
    assert "runs/small/checkpoints/step-00000005/__0_0.distcp has 4 bytes, the manifest says" in result.stderr
    assert "Traceback" not in result.stderr


def test_folder_that_cannot_be_made_is_refused(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    (folder / "file").write_text("")
    result = train(folder, "run.out_dir=file")
    assert result.returncode == 2
    assert "run.out_dir: " in result.stderr
    assert "Not a directory" in result.stderr
    assert "Traceback" not in result.stderr
