"""``composer3d sweep``: its runs, their names, and what it does when one of them fails."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.commands import sweep
from composer3d.commands.sweep import make_trials, split_values
from tests.commands.conftest import Ask
from tests.training.jobs import RECIPE, write_corpus


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    (tmp_path / "small.toml").write_text(RECIPE.format(mesh="dp_shard = 1"))
    return "small.toml"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1e-3", ["1e-3"]),
        ("1e-3,2e-3", ["1e-3", "2e-3"]),
        ("[0.9,0.95],[0.9,0.99]", ["[0.9,0.95]", "[0.9,0.99]"]),
        ('["a,b"],"c,]",d', ['["a,b"]', '"c,]"', "d"]),
        ("[{train=['x'],lr=1}],2", ["[{train=['x'],lr=1}]", "2"]),
        ("a,", ["a", ""]),
    ],
)
def test_values_are_split_at_outer_commas(text: str, pieces: list[str]) -> None:
    assert split_values(text) == pieces


def test_every_combination_has_a_name_of_its_own(recipe: str) -> None:
    sets = ["optim.lr=1e-3,2e-3", "run.seed=5", "optim.betas=[0.9,0.95],[0.8,0.95]"]
    trials = make_trials(recipe, sets, most=None)
    assert [(trial.recipe.optim.lr, trial.recipe.optim.betas[0]) for trial in trials] == [
        (1e-3, 0.9),
        (1e-3, 0.8),
        (2e-3, 0.9),
        (2e-3, 0.8),
    ]
    assert {trial.recipe.run.seed for trial in trials} == {5}
    assert trials[0].recipe.run.name == "small-lr-1e-3-betas-0.9-0.95"
    # Two keys that end in the same word are told apart.
    seeds = make_trials(recipe, ["run.seed=1,2", "data.seed=3,4"], most=None)
    assert seeds[0].recipe.run.name == "small-run.seed-1-data.seed-3"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["optim.lr=1e-3"], "no key has several values"),
        (["run.name=a,b"], "run.name is made of the values"),
        (["optim.lr=1e-3,1e-3"], "two runs would be called small-lr-1e-3"),
        (["optim.lr=1,2,3", "run.seed=1,2,3"], "9 runs are more than the 8"),
        (["optim.lr=1e-3,x"], "--set optim.lr=x: 'optim.lr' must be float, got \"x\""),
        (["optim.lr=1e-3,"], "--set optim.lr=: 'optim.lr' must be float"),
        (["optim.lr=1,2", "-o", "x.pdf"], "-o x.pdf: the report is an HTML file"),
        (["optim.lr=1,2", "-o", "no/x.html"], "written there (No such file or directory); name"),
        (["optim.lr=1,2", "-o", f"{'n' * 300}/x.html"], "written there (File name too long)"),
        (["optim.lr=1,2", "-o", f"{'n' * 230}.html"], "written there (File name too long)"),
        (["optim.lr=1,2", "-o", "mine.html"], "mine.html: the report cannot be written there (an"),
        (["optim.lr=1,2", "-o", "folder.html"], "folder.html: the report cannot be written there"),
        (["optim.lr=1,2", "run.out_dir=out"], "out/small-sweep.html: the report cannot be writte"),
    ],
)
def test_nothing_starts_if_a_run_could_not(
    recipe: str, sets: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("mine.html", "out/small-sweep.html"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text("<!doctype html>\n")
    Path("folder.html").mkdir()
    keys = [text for text in sets if "=" in text]
    others = sets[len(keys) :]
    arguments = [word for override in keys for word in ("--set", override)]
    assert cli.main(["sweep", recipe, *arguments, *others]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_printed_commands_train_the_runs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "optim.betas=[0.9, 0.95],[0.8, 0.9]"]
    assert cli.main(["sweep", recipe, *sets, "--print"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "composer3d train small.toml --set 'optim.betas=[0.9, 0.95]' "
        "--set run.name=small-betas-0.9-0.95"
    )
    assert second.endswith("--set run.name=small-betas-0.8-0.9")


def test_a_failing_run_does_not_stop_the_others(recipe: str, ask: Ask) -> None:
    """The folder of the second run is a file. The report has the numbers of the others."""
    Path("runs").mkdir()
    Path("runs/small-lr-2e-3").touch()
    sets = ["--set", "optim.lr=1e-3,2e-3,3e-3", "--set", "run.steps=4"]
    status, answer = ask("sweep", recipe, *sets)
    assert status == 1
    assert answer["report"] == "runs/small-sweep.html"
    assert (answer["ok"], answer["failed"]) == (False, ["small-lr-2e-3"])
    steps = {found["name"]: found["step"] for found in answer["runs"]}
    assert steps == {"small-lr-1e-3": 4, "small-lr-3e-3": 4}
    text = Path("runs/small-sweep.html").read_text()
    assert "<tr><td>optim.lr</td><td>0.001</td><td>0.003</td></tr>" in text


def test_a_run_of_other_settings_is_not_taken_for_one_of_these(recipe: str, ask: Ask) -> None:
    """Their runs have the same names, and would be finished already."""
    sets = ["--set", "optim.lr=1e-3,2e-3", "--set", "run.steps=4"]
    assert ask("sweep", recipe, *sets)[0] == 0
    others = ["--set", "optim.weight_decay=0.5", "--set", "run.seed=1"]
    status, answer = ask("sweep", recipe, *sets, *others)
    assert status == 2
    assert answer["errors"][0].startswith(
        "runs/small-lr-1e-3 has checkpoints of a run with optim.weight_decay = 0.1, and this sweep "
        "has 0.5 (1 more differ): give the sweep another run.name"
    )
    # Without checkpoints, a run begins anew; with more steps, or another layout, it goes on.
    more = [*sets[:2], "--set", "run.steps=5", "--set", "memory.activation_checkpoint=full"]
    status, answer = ask("sweep", recipe, *more)
    assert status == 0
    assert [run["step"] for run in answer["runs"]] == [5, 5]
    for folder in Path("runs").glob("small-lr-*"):
        shutil.rmtree(folder / "checkpoints")
    assert ask("sweep", recipe, *more, *others)[0] == 0


def test_a_signal_stops_the_sweep_after_a_save(recipe: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "composer3d", "sweep", recipe]
    command += ["--set", "run.seed=1,2", "--set", "run.steps=100000", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        output = ""
        for line in process.stderr:
            output += line
            if re.match(r"step +2/", line):
                break
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output += process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGTERM, output
    assert time.monotonic() - began_s < 30
    assert "stopped by signal 15 after step" in output
    assert "the sweep was stopped: the same command goes on" in output
    assert "run 2 of 2" not in output
    assert list(tmp_path.glob("runs/small-seed-1/checkpoints/step-*/manifest.json"))


def test_a_signal_counts_also_if_the_run_has_then_done_all_its_steps() -> None:
    script = "trap 'exit 0' TERM; sleep 0.5; kill -TERM $PPID; while :; do sleep 0.1; done"
    assert sweep._run(["bash", "-c", script]) == (0, signal.SIGTERM)


def test_a_sweep_under_nohup_does_not_end_with_its_terminal() -> None:
    script = "sleep 0.5; kill -HUP $PPID; sleep 0.5"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sweep._run(["bash", "-c", script]) == (0, 0)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert sweep._run(["bash", "-c", f"trap : HUP; {script}"]) == (0, signal.SIGHUP)


def test_no_other_run_starts_after_a_signal(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run has done all its steps when the signal comes: its own status is 0."""
    commands = []

    def run(command: Sequence[str]) -> tuple[int, int]:
        commands.append(command)
        return 0, signal.SIGTERM

    monkeypatch.setattr(sweep, "_run", run)
    assert cli.main(["sweep", recipe, "--set", "optim.lr=1e-3,2e-3"]) == 128 + signal.SIGTERM
    assert len(commands) == 1


def test_a_rank_of_torchrun_starts_no_sweep(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep.environment, "is_rank", lambda: True)
    assert cli.main(["sweep", recipe, "--set", "run.seed=1,2"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
