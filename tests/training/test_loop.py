"""The command as a user runs it: resume, stop, torchrun, and what is said when it cannot go on."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from composer3d.checkpoint.manifest import Manifest
from composer3d.commands import train as job
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import CheckpointTable
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import pool_world
from composer3d.spec.errors import CheckpointError
from composer3d.training import loop, resume
from composer3d.training.build import build
from composer3d.training.run_folder import write_recipe

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


def train(
    folder: Path, *sets: str, launcher: tuple[str, ...] = ("-m",)
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "composer3d", "train", "recipe.toml"]
    for each in sets:
        command += ["--set", each]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


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
    assert (
        "resumed from parts/small/checkpoints/step-00000010: 10 of 20 steps are done"
        in second.stderr
    )
    assert losses(folder, "parts") == losses(folder, "whole")
    assert len(losses(folder, "whole")) == 20
    assert losses(folder, "whole")[20] < losses(folder, "whole")[1] - 0.1  # and it learns
    kept = sorted(path.name for path in (folder / "parts/small/checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000020"]
    assert 'path = "corpus.txt"' in (folder / "parts/small/recipe.toml").read_text()


@pytest.mark.parametrize("mesh", [SINGLE, DATA], ids=["single", "dp"])
def test_signal_ends_the_step_saves_and_resumes(folder: Path, mesh: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = [
        sys.executable,
        "-m",
        "composer3d",
        "train",
        "recipe.toml",
        "--set",
        "run.steps=100000",
    ]
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
        expected = (
            "pp 2 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2 = 8 processes, but the world has 4"
        )
        assert (expected in result.stderr) == (rank == "0")
        assert bool(result.stderr) == (rank == "0")
    assert time.monotonic() - begin < 30


def test_loss_that_is_not_finite_stops_the_run(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    # Each step multiplies the weights by 1 - lr * weight_decay = -99, as long as the rate has not decayed.
    growing = (
        "optim.lr=10",
        "optim.weight_decay=10",
        "optim.clip=0",
        "optim.warmup=0",
        "checkpoint.every=0",
    )
    result = train(folder, *growing)
    assert result.returncode == 1
    assert "are not finite; the newest checkpoint is none; lower optim.lr" in result.stderr
    assert result.stderr.count("not finite") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.n_layers=3"], "was made with model.n_layers = 4, but the recipe says 3"),
        (
            ["model.rope_theta=123.0"],
            "was made with model.rope_theta = 10000.0, but the recipe says 123.0",
        ),
        (
            ["precision.params=float64"],
            "was made with precision.params = float32, but the recipe says float64",
        ),
        (["data.path=other.txt"], "the data has changed since"),
        (["data.global_batch=16"], "data.global_batch = 16, but the checkpoint was made with 8"),
        (["data.seed=9"], "data.seed = 9, but the checkpoint was made with 0"),
        (
            ["run.seed=4"],
            "step-00000005 was made with run.seed = 3, but the recipe says 4: a run keeps its seed; set it back,",
        ),
        (
            ["checkpoint.resume=none"],
            'checkpoint.resume = "none", but runs/small/checkpoints goes on from step-00000005;',
        ),
        (["run.name=other", "checkpoint.resume=."], "is not a checkpoint: it has no manifest.json"),
    ],
    ids=["layers", "theta", "dtype", "data", "batch", "order", "seed", "anew", "folder"],
)
def test_checkpoint_that_does_not_fit_is_refused(
    trained: Path, sets: list[str], message: str
) -> None:
    recipe = (trained / "runs/small/recipe.toml").read_bytes()
    result = train(trained, *sets)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert (trained / "runs/small/recipe.toml").read_bytes() == recipe
    assert list((trained / "runs/small").glob("recipe-*")) == []


def test_run_that_is_done_says_so(trained: Path) -> None:
    result = train(trained, "run.steps=5", "optim.decay=20")
    assert result.returncode == 0
    assert "nothing to do: 5 of 5 steps are done" in result.stderr
    assert "warning" not in result.stderr


def start_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("a rank is started")

    monkeypatch.setattr(job, "train_rank", started)
    monkeypatch.setattr(job.launch, "warm_up", started)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_done_starts_no_rank(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: int,
) -> None:
    start_no_rank(monkeypatch)
    monkeypatch.chdir(trained)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    sets = ["run.steps=5", f"mesh.dp_shard={processes}"]
    assert job.main_train("recipe.toml", sets) == 0
    said = capsys.readouterr().err
    assert said == "nothing to do: 5 of 5 steps are done; raise run.steps to train on\n"
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def lose_a_byte(newest: Path) -> None:
    file = next(newest.glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)


def lose_the_manifest(newest: Path) -> None:
    (newest / "manifest.json").unlink()


@pytest.mark.parametrize(
    "spoil",
    [lose_a_byte, lose_the_manifest, None],
    ids=lambda spoil: getattr(spoil, "__name__", ""),
)
def test_a_checkpoint_that_is_not_whole_is_left_to_training(
    trained: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None] | None
) -> None:
    start_no_rank(monkeypatch)
    monkeypatch.chdir(trained)
    if spoil is not None:
        spoil(trained / "runs/small/checkpoints/step-00000005")
    with pytest.raises(AssertionError, match="a rank is started"):
        job.main_train("recipe.toml", [f"run.steps={5 if spoil else 6}"])


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=4",
        "model.n_layers=3",
        "data.seed=1",
        "data.path=other.txt",
        "checkpoint.resume=none",
    ],
)
def test_a_recipe_that_cannot_resume_is_refused_when_all_is_done(
    trained: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    start_no_rank(monkeypatch)
    monkeypatch.chdir(trained)
    with pytest.raises(AssertionError, match="a rank is started"):  # which refuses it
        job.main_train("recipe.toml", ["run.steps=5", change])


def test_path_seeds_a_new_run_and_no_more(trained: Path) -> None:
    seeded = [
        "run.name=second",
        "checkpoint.resume=runs/small/checkpoints/step-00000005",
        "run.seed=4",
    ]
    first = train(trained, *seeded, "run.steps=8")
    assert (
        '\n  run.name: "small" -> "second"\n  run.seed: 3 -> 4\n  run.steps: 5 -> 8\n'
        in first.stderr
    )
    assert (
        "resumed from runs/small/checkpoints/step-00000005: 5 of 8 steps are done" in first.stderr
    )
    assert "no checkpoint in runs/second" not in first.stderr
    shutil.rmtree(trained / "runs/small/checkpoints/step-00000005")  # as its own run does in time
    again = train(trained, *seeded, "run.steps=10")
    assert (
        "resumed from runs/second/checkpoints/step-00000008: 8 of 10 steps are done" in again.stderr
    )
    back = train(
        trained,
        "run.name=second",
        "run.seed=4",
        "checkpoint.resume=runs/second/checkpoints/step-00000008",
    )
    assert back.returncode == 2
    assert (
        "goes on from step-00000010; give the run another run.name, or remove what is newer"
        in back.stderr
    )


def test_what_a_resume_changes_is_said_and_the_former_recipe_is_kept(trained: Path) -> None:
    folder = trained / "runs/small"
    former = (folder / "recipe.toml").read_bytes()
    result = train(trained, "run.steps=6", "optim.lr=2e-3", "data.packing=documents")
    assert result.returncode == 0
    assert "warning: step 5 was taken with a learning rate of" in result.stderr
    assert (
        "the recipe differs from that of runs/small/checkpoints/step-00000005:\n"
        '  data.packing: "none" -> "documents"\n'
        "  optim.lr: 0.001 -> 0.002\n"
        "  run.steps: 5 -> 6\n"
    ) in result.stderr
    assert (folder / "recipe-00000005.toml").read_bytes() == former
    assert "lr = 0.002" in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize(
    "text", ["[[", "a = " + "[" * 20_000, "#" * 300_000], ids=["not TOML", "deep", "long"]
)
def test_a_recipe_in_a_manifest_that_cannot_be_read_is_one_line(folder: Path, text: str) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    recipe = load(folder / "recipe.toml", [f"data.path={folder}/corpus.txt"]).recipe
    manifest = Manifest(step=5, model={}, recipe=text)
    with pytest.raises(
        CheckpointError, match="the recipe in its manifest cannot be read"
    ) as caught:
        resume._changes_since(folder, manifest, recipe)
    (line,) = caught.value.lines
    assert len(line) < 500
    assert (
        resume._changes_since(folder, Manifest(step=5, model={}), recipe) == []
    )  # of converted weights


def test_a_recipe_with_the_same_values_is_not_kept_twice(tmp_path: Path) -> None:
    first, moved = '[run]\nname = "a" # x.toml:1\n', '[run]\nname = "a" # y.toml:7\n'
    other, third = '[run]\nname = "b"\n', '[run]\nname = "c"\n'
    write_recipe(tmp_path, first, steps_done=0)
    write_recipe(tmp_path, other, steps_done=0)  # no step of the first is left
    write_recipe(tmp_path, first, steps_done=0)
    write_recipe(tmp_path, moved, steps_done=5)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]
    write_recipe(tmp_path, other, steps_done=5)
    write_recipe(tmp_path, third, steps_done=5)  # what `other` did has been lost
    assert (tmp_path / "recipe-00000005.toml").read_text() == moved
    assert (tmp_path / "recipe.toml").read_text() == third
    (tmp_path / "recipe.toml").write_bytes(b"\xff no recipe")
    write_recipe(tmp_path, third, steps_done=6)
    assert (tmp_path / "recipe-00000006.toml").read_bytes() == b"\xff no recipe"


def test_a_recipe_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    for name in ("recipe.toml", "recipe-00000005.toml"):
        (tmp_path / name).symlink_to("theirs")
    write_recipe(tmp_path, "[run]\n", steps_done=5)
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "recipe.toml").is_symlink()


def build_and_train(
    folder: str, sets: list[str], minutes: list[float] | None, largest_file: int | None
) -> None:
    """A task. ``minutes``: of a step, by each rank's clock. ``largest_file``: bytes that the disk can hold."""
    os.chdir(folder)
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=size)
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        run = build(resolved.recipe, device, resolved.to_toml())
        if minutes is not None:
            clock = types.SimpleNamespace(monotonic=lambda: 60 * minutes[rank] * run.step)
            loop.time = clock  # type: ignore[assignment]
        loop.train(run)


@pytest.mark.parametrize(
    ("every", "every_minutes", "saved"),
    [(0, 15, [3, 6, 8]), (4, 15, [3, 4, 7, 8]), (4, 0, [4, 8]), (0, 0, [8])],
)
def test_a_checkpoint_is_due_by_steps_or_minutes_of_rank_0(
    pool: Pool, folder: Path, every: int, every_minutes: int, saved: list[int]
) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    sets = [f"checkpoint.every={every}", f"checkpoint.every_minutes={every_minutes}"]
    sets += ["checkpoint.keep=20", "run.steps=8", "metrics.every=100"]
    clocks = [6.0, 1000.0]  # by rank 1's clock a checkpoint is due after each step
    arguments = {"folder": str(folder), "sets": sets, "minutes": clocks, "largest_file": None}
    pool.run(build_and_train, arguments, world_size=2)
    names = sorted(path.name for path in (folder / "runs/small/checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in saved]


def test_a_run_saves_by_default() -> None:
    assert CheckpointTable().every == 500
    assert CheckpointTable().every_minutes == 15.0


def make_full(run: Path) -> None:
    line = '{"step": 1, "loss": 1.0}\n'
    (run / "metrics.jsonl").write_text(line * 100_000)


def make_pipe(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")


def make_foreign_link(run: Path) -> None:
    (run.parent / "theirs").mkdir()
    shutil.move(run / "checkpoints", run.parent / "theirs/checkpoints")
    (run / "checkpoints").symlink_to(run.parent / "theirs/checkpoints")
    os.chown(run / "checkpoints", 12345, 12345, follow_symlinks=False)


@pytest.mark.parametrize(
    ("spoil", "largest_file", "message"),
    [
        (make_full, 1 << 20, "rank 0: metrics: [Errno 27] File too large"),
        (
            make_pipe,
            None,
            "rank 0: runs/small/metrics.jsonl is a named pipe, not a plain file; the run writes",
        ),
        pytest.param(
            make_foreign_link,
            None,
            "run.out_dir: runs/small/checkpoints is a symbolic link of another user (uid 12345)",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link away"),
        ),
    ],
)
def test_a_folder_that_is_wrong_ends_every_rank_with_one_line(
    pool: Pool, trained: Path, spoil: Callable[[Path], None], largest_file: int | None, message: str
) -> None:
    (trained / "runs/small/metrics.jsonl").unlink()
    spoil(trained / "runs/small")
    arguments = {
        "folder": str(trained),
        "sets": ["mesh.dp_shard=2", "run.steps=6"],
        "minutes": None,
        "largest_file": largest_file,
    }
    with pytest.raises(WorkerError) as caught:
        pool.run(build_and_train, arguments, world_size=2)
    assert set(caught.value.failures) == {0, 1}
    assert caught.value.user_error is not None
    (line,) = caught.value.user_error.lines
    assert message in line


def test_damaged_checkpoint_is_named(trained: Path) -> None:
    saved = trained / "runs/small/checkpoints/step-00000005"
    next(saved.glob("*.distcp")).write_bytes(b"torn")
    result = train(trained)
    assert result.returncode == 2
    assert (
        "runs/small/checkpoints/step-00000005/__0_0.distcp has 4 bytes, the manifest says"
        in result.stderr
    )
    assert "Traceback" not in result.stderr


def test_folder_that_cannot_be_made_is_refused(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    (folder / "file").write_text("")
    result = train(folder, "run.out_dir=file")
    assert result.returncode == 2
    assert "run.out_dir: " in result.stderr
    assert "Not a directory" in result.stderr
    assert "Traceback" not in result.stderr
