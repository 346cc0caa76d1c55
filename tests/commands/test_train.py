"""What the command ``train`` does before and after its ranks run."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composer3d.checkpoint import manifest as manifests
from composer3d.commands import train
from composer3d.facts import events as run_events
from composer3d.facts.errors import MeshError, RecipeError
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.report.folder import read as read_run
from composer3d.runtime import devices, launch, process_group


def small_recipe(folder: Path, *sets: str) -> Recipe:
    """Write ``r.toml``, and load it with these overrides. The run's folder is ``folder / "a"``."""
    (folder / "r.toml").write_text('[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n')
    return load(folder / "r.toml", [f"run.out_dir={folder}", *sets]).recipe


@pytest.mark.parametrize("died", [{3: 9}, {1: 9, 3: 9}, {1: 11}, {0: -4}])
def test_a_dead_rank_is_named_with_the_newest_checkpoint(
    tmp_path: Path, died: dict[int, int]
) -> None:
    recipe = small_recipe(tmp_path, "mesh.dp_shard=2", "mesh.tp=2")
    kept = tmp_path / "a" / "checkpoints"
    (line,) = train.describe_failures(launch.JobResult(1, died), recipe)
    assert line.endswith(f"; there is no checkpoint in {kept}: the same command starts anew")
    for name in ("step-00000004", "step-00000012", "step-00000020.tmp", "step-9999-mine"):
        (kept / name).mkdir(parents=True)
        (kept / name / "manifest.json").write_text("{}")
    (kept / "step-00000016").mkdir()  # without a manifest it is not whole
    (line,) = train.describe_failures(launch.JobResult(1, died), recipe)
    deaths, _, advice = line.partition("; the newest")
    assert advice == f" checkpoint is {kept}/step-00000012: the same command goes on from it"
    kill = "signal 9 (SIGKILL; the kernel often sends it when memory runs out: see dmesg)"
    rank_1, rank_3 = "rank 1 (pp0 dp0 cp0 tp1)", "rank 3 (pp0 dp1 cp0 tp1)"
    expected = {
        (3,): f"{rank_3} was ended by {kill}",
        (1, 3): f"{rank_1}, {rank_3} were ended by {kill}",
        (1,): f"{rank_1} was ended by signal 11 (SIGSEGV)",
        (0,): "rank 0 (pp0 dp0 cp0 tp0) ended with status 4",
    }
    assert deaths == expected[tuple(died)]


def test_the_report_of_the_other_ranks_is_named_once(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    report = tmp_path / "a/lost-ranks-20260101T000000Z.txt"
    resume = f"there is no checkpoint in {tmp_path}/a/checkpoints: the same command starts anew"
    advice = f"what each rank did is in {report}; {resume}"
    name = "rank 0 (pp0 dp0 cp0 tp0)"
    for result, expected in (
        (launch.JobResult(1, {0: -4}), [f"{name} ended with status 4; {advice}"]),
        (launch.JobResult(1, raised=True), [advice]),
        (launch.JobResult(1, {0: -4}, raised=True), [f"{name} ended with status 4; {advice}"]),
        (
            launch.JobResult(1, lost_peers=True, left={0: 0}),
            [f"{name} ended before the others; {advice}"],
        ),
        (
            launch.JobResult(2, left={0: -2}),
            [f"{name} ended with status 2 before the others; {advice}"],
        ),
        (
            launch.JobResult(143, left={0: 15}, stopped_by=15),
            [f"{name} was ended by signal 15 (SIGTERM) before the others; {advice}"],
        ),
        (
            launch.JobResult(1, stuck=[0], gave_reason=True, reason=("rank 1: a disk is full",)),
            [f"{name} was killed: 120 s after the error of another rank, still running"],
        ),
        (
            launch.JobResult(1, stuck=[0], stopped_by=15, was_cut_off=True),
            [
                f"{name} was killed: 130 minutes after the signal, the steps were not saved; "
                f"{resume}"
            ],
        ),
        (
            launch.JobResult(130, stuck=[0], stopped_by=15, was_insisted=True),
            [f"{name} was killed: Ctrl-C came again; {resume}"],
        ),
        (
            launch.JobResult(143, stuck=[0], stopped_by=15, patience_s=10.0),
            [f"{name} was killed: still running 10 s after another rank had ended; {resume}"],
        ),
        (
            launch.JobResult(143, stuck=[0], stopped_by=15),
            [f"{name} was killed: still running 130 minutes after the signal; {resume}"],
        ),
        # A rank has named it already, or the error is the user's.
        (launch.JobResult(1, lost_peers=True), []),
        (launch.JobResult(2), []),
    ):
        assert train.describe_failures(result, recipe, report) == expected


def test_no_report_of_lost_ranks_is_overwritten(tmp_path: Path) -> None:
    """A small model can fail twice in a second."""
    recipe = small_recipe(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").touch()
    texts = [f"report {number}\n" for number in range(4)]
    paths = [Path(str(train._write_report(recipe, text))) for text in texts]
    assert [path.read_text() for path in paths] == texts
    assert train._lost_reports(recipe) == set(paths)
    shown = read_run(str(tmp_path / "a")).lost_ranks
    assert [lost.text for lost in shown] == texts
    # The clocks of machines differ, so the run's events have the order too.
    found = [event for event in run_events.read(tmp_path / "a") if event is not None]
    assert [(event.kind, event.text) for event in found] == [
        ("lost ranks", path.name) for path in paths
    ]


def test_ranks_are_lost_at_a_step_of_the_last_start(tmp_path: Path) -> None:
    """The events keep what a run has done beyond the checkpoint that it goes on from."""
    recipe = small_recipe(tmp_path)
    (tmp_path / "a").mkdir()
    steps = [("start", 0), ("save", 100), ("bad steps", 180), ("start", 100), ("ranks", 120)]
    found = [run_events.Event(step, 1e9, kind, "") for kind, step in steps]  # type: ignore[arg-type]
    (tmp_path / "a" / run_events.FILE).write_bytes(b"".join(map(run_events.line, found)))
    (tmp_path / "a/metrics.jsonl").touch()
    assert train._write_report(recipe, "report\n") is not None
    *_, lost = run_events.read(tmp_path / "a")
    assert lost is not None
    assert (lost.kind, lost.step) == ("lost ranks", 120)
    assert read_run(str(tmp_path / "a")).steps_done == 120


def test_the_advice_obeys_the_choice_of_a_checkpoint(tmp_path: Path) -> None:
    """A run does not discard its newer checkpoints, so the same command would be refused."""
    own, other = tmp_path / "a/checkpoints", tmp_path / "b/checkpoints"
    for folder in (own, other):
        (folder / "step-00000004").mkdir(parents=True)
        (folder / "step-00000004/manifest.json").write_text("{}")
    the_same = "the same command goes on from it"
    other_choice = 'the same command with checkpoint.resume = "auto" goes on from it'
    for choice, way in {
        "auto": the_same,
        str(other / "step-00000004"): the_same,
        "none": other_choice,
        str(own / "step-00000004"): other_choice,
    }.items():
        recipe = small_recipe(tmp_path, f"checkpoint.resume={choice}")
        newest = f"the newest checkpoint is {own}/step-00000004"
        assert train.resume_advice(recipe) == f"{newest}: {way}"


def test_too_many_processes_for_the_cores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "warm_up", lambda: None)
    monkeypatch.setattr(
        launch, "run_ranks", lambda *_, processes, **__: launch.JobResult(processes)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    small_recipe(tmp_path)

    def run(processes: int, *sets: str) -> int:
        mesh = [f"mesh.dp_shard={processes}", f"data.global_batch={processes}"]
        sets = ("run.device=cpu", f"run.out_dir={tmp_path}", *mesh, *sets)
        return train.run(train.Options(str(tmp_path / "r.toml"), sets))

    with pytest.raises(RecipeError) as caught:
        run(33)
    (line,) = caught.value.lines
    assert "needs 33 processes, but this machine has 2 cores: at most 32 processes" in line
    assert "run.oversubscribe = true" in line
    assert run(32) == 32
    assert run(33, "run.oversubscribe=true") == 33


def test_a_rank_on_a_gpu_makes_and_says_its_settings_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def prepare(recipe: Recipe, *, cores: int) -> str:
        calls.append((recipe.run.name, cores))
        return "GPU: its settings"

    def open_store(**_: float) -> None:
        calls.append("store")
        raise MeshError("no rank answers")

    monkeypatch.setattr(process_group, "pick_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(process_group, "open_store", open_store)
    monkeypatch.setattr(devices, "prepare_gpu", prepare)
    assert train.train_rank("recipes/debug-1-single.toml", []) == 2
    assert calls == [("debug-1-single", launch.usable_cores()), "store"]
    assert capsys.readouterr().err == "GPU: its settings\nno rank answers\n"


def test_a_process_that_had_groups_does_not_end_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\ndevice = "cpu"\nsteps = 1\n[model]\npreset = "debug-tiny"\n'
    )
    # The interpreter calls __del__ of what it finds in the main module when it ends.
    code = """
import sys
from composer3d.cli import enter

class Last:
    def __del__(self):
        print("the interpreter ends", flush=True)

last = Last()
sys.argv = ["composer3d", *sys.argv[1:]]
sys.exit(enter())
"""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    failed = call("train", "r.toml", "--set", "checkpoint.resume=.")
    assert (failed.returncode, failed.stdout) == (2, ""), failed.stderr
    assert ". is not a checkpoint" in failed.stderr
    # Here the groups were destroyed, but threads of gloo still run.
    trained = call("train", "r.toml")
    assert (trained.returncode, trained.stdout) == (0, ""), trained.stderr
    assert "step 1/1" in trained.stderr
    checked = call("check", "r.toml")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.endswith("the interpreter ends\n")


@pytest.mark.parametrize("steps", [4, 5])
def test_a_finished_run_is_told_without_torch_or_ranks(tmp_path: Path, steps: int) -> None:
    (tmp_path / "r.toml").write_text(
        f'[run]\nname = "a"\nsteps = {steps}\n[model]\npreset = "debug-tiny"\n'
        "[mesh]\ndp_shard = 2\n"
    )
    sets = [f"run.out_dir={tmp_path}"]
    resolved = load(tmp_path / "r.toml", sets)
    checkpoint = tmp_path / "a/checkpoints/step-00000004"
    checkpoint.mkdir(parents=True)
    model = manifests.model_of(resolved.recipe.model, resolved.recipe.precision.params)
    manifests.write(
        checkpoint, manifests.Manifest(step=4, model=model, recipe=resolved.to_toml(), data={})
    )
    code = (
        "import sys\n"
        "from composer3d import cli\n"
        "from composer3d.runtime import launch\n"
        "def warm_up(): sys.exit('ranks would be started')\n"
        "launch.warm_up = warm_up\n"
        f"status = cli.main(['train', 'r.toml', '--set', {sets[0]!r}])\n"
        "print(status, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if steps == 4:
        assert (done.stdout, done.stderr) == (
            "0 False\n",
            "nothing to do: 4 of 4 steps are done; raise run.steps and set "
            "optim.decay to train on\n",
        )
    else:
        # What begins is said first.
        said = "training a: 5 steps\nranks would be started\n"
        assert (done.stdout, done.stderr) == ("", said)


def test_the_launcher_adds_to_the_log_how_ranks_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(tmp_path)
    result = launch.JobResult(1, {0: 9}, raised=True, traceback="Traceback:\nValueError: boom")
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: result)
    # A rank that ended before it had a folder leaves none behind.
    assert train.run_with_restarts(recipe, "r.toml", [], 2) == 1
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/log.txt").write_text("2026-01-01T00:00:00Z step 1\n")
    assert train.run_with_restarts(recipe, "r.toml", [], 2) == 1
    first, *lines = (tmp_path / "a/log.txt").read_text().splitlines()
    assert first == "2026-01-01T00:00:00Z step 1"
    texts = [line.partition(" ")[2] for line in lines]
    assert texts[:2] == ["Traceback:", "ValueError: boom"]
    assert texts[2].startswith("rank 0 (pp0 dp0 cp0 tp0) was ended by signal 9 (SIGKILL;")
    assert len(texts) == 3
    assert capsys.readouterr().err.count("starting 2 ranks\n") == 2


def test_the_last_collectives_of_a_rank_are_kept_in_the_runs_folder(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    # The folder is not there: the report must come all the same.
    assert train._write_trace(recipe, 3, b"trace", "20260101T000000Z") is None
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "nccl-trace-20260101T000000Z-rank-3"
    assert train._write_trace(recipe, 3, b"trace", "20260101T000000Z") == str(path)
    assert path.read_bytes() == b"trace"


@pytest.mark.parametrize(
    ("result", "starts"),
    [
        (launch.JobResult(1, {0: 9}), 3),
        # A collective failed although all ranks are there: one slept, or the network was gone.
        (launch.JobResult(1, lost_peers=True), 3),
        (launch.JobResult(1), 1),
        # It would lack memory again, because no start has saved anything.
        (launch.JobResult(1, lacked_memory=[1]), 1),
        (launch.JobResult(2, lost_peers=True), 1),
        # A save failed, and rank 0 was killed while it closed what it has.
        (launch.JobResult(1, stuck=[0], gave_reason=True), 1),
        (launch.JobResult(1, stuck=[0]), 3),
        # A signal asked the job to stop, and then a rank died in its save.
        (launch.JobResult(1, {0: 9}, stopped_by=15), 1),
        (launch.JobResult(143, stopped_by=15), 1),
    ],
)
def test_only_what_was_lost_and_not_stopped_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: launch.JobResult, starts: int
) -> None:
    recipe = small_recipe(tmp_path, "reliability.restarts=2")
    results: list[launch.JobResult] = []
    monkeypatch.setattr(launch, "run_ranks", lambda *_, **__: results.append(result) or result)
    # Nobody reads its lines.
    monkeypatch.setattr(sys, "stderr", Unwritable())
    assert train.run_with_restarts(recipe, "r.toml", [], 2) == result.status
    assert len(results) == starts


def test_a_start_that_lacks_memory_is_repeated_only_if_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipe(tmp_path, "reliability.restarts=9")
    kills = iter(range(100))
    starts: list[int] = []

    def run_ranks(*_: object, processes: int, **__: object) -> launch.JobResult:
        starts.append(processes)
        if len(starts) < 3:
            kept = tmp_path / f"a/checkpoints/step-0000000{len(starts)}"
            kept.mkdir(parents=True)
            (kept / "manifest.json").touch()
        # The kernel has killed rank 1, because memory ran out.
        return launch.JobResult(1, {1: 9})

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    monkeypatch.setattr(train.shortage, "kernel_kills", lambda: next(kills))
    assert train.run_with_restarts(recipe, "r.toml", [], 2) == 1
    assert len(starts) == 3
    said = capsys.readouterr().err
    assert said.count("rank 1 (") == 3
    assert said.count("the ranks are not started again: memory ran out") == 1


class Unwritable(io.StringIO):
    """A stream whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")
