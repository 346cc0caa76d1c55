"""The command line: ``check``, its exit status, and what it leaves unloaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.errors import TrainingError
from composer3d.recipe import load as load_module
from composer3d.recipe.schema import TABLES

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "debug-8-dp-tp-pp.toml")


def test_check_prints_the_recipe_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", RECIPE, "--gpus", "8", "--set", "data.micro_batch=2", "--set", "run.steps=10"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{'micro_batch = 2':<30} # --set data.micro_batch=2" in out
    assert f"{'tp = 2':<30} # {RECIPE}:" in out
    summary = {line[2:15].strip(): line[16:] for line in out.splitlines()[-4:]}
    assert summary == {
        "world size": "8 (pp 2 x dp_shard 2 x tp 2)",
        "global batch": "8 = micro_batch 2 x 2 micro-batches x 2 data-parallel ranks",
        "tokens": "512 a step, 5,120 in 10 steps",
        "parameters": "205,376",
    }


def test_check_without_a_world_says_what_it_leaves_open(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, hints in ((["--set=mesh.dp_shard=-1"], 1), (["--set=mesh.dp_shard=-1", "--gpus=8"], 0), ([], 0)):
        assert cli.main(["check", RECIPE, *argv]) == 0
        assert capsys.readouterr().out.count("--gpus N") == hints


def test_a_failed_run_has_its_own_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def diverged(*args: object, **kwargs: object) -> None:
        raise TrainingError("loss is nan")

    monkeypatch.setattr(load_module, "load", diverged)
    assert cli.main(["check", RECIPE]) == 1
    assert capsys.readouterr() == ("", "loss is nan\n")


def test_check_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", RECIPE, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["ok"] is True
    assert answer["world_size"] == 8
    assert answer["recipe"]["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert answer["origins"]["model.dim"] == "preset debug-tiny"


def test_check_schema_prints_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--schema"]) == 0
    out = capsys.readouterr().out
    for table, cls in TABLES.items():
        section = out.split(f"[{table}]\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in section] == list(cls.__dataclass_fields__)
    assert "zero = 3                   0, 1, 2 or 3                0: replicas; 1: shards, gathered" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["chek", RECIPE],
        ["check"],
        ["check", ""],
        ["check", RECIPE, "--gpus", "0"],
        ["check", RECIPE, "--gpu", "8"],
        ["verify", RECIPE, "--dtype", "float16"],
        ["verify", RECIPE, "--steps", "none"],
        ["train"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert "composer3d" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("argv", [["check", "none.toml"], ["check", "--no-such-option"]])
def test_only_rank_0_prints(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(argv) == 2
    assert capsys.readouterr().err


def test_an_interrupt_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load_module, "load", interrupted)
    assert cli.main(["check", RECIPE]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--help"]) == 0
    assert "RECIPE" in capsys.readouterr().out


def test_commands_are_dispatched_with_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    fake = type(sys)("composer3d.fake")
    fake.main_train = lambda path, sets: seen.append((path, sets)) or 0  # type: ignore[attr-defined]
    fake.main_verify = lambda **given: seen.append(given) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "composer3d.job", fake)
    monkeypatch.setitem(sys.modules, "composer3d.verify", fake)
    assert cli.main(["train", "x.toml", "--set", "a.b=1", "--set", "c.d=2"]) == 0
    assert cli.main(["verify", "x.toml", "--dtype", "float32", "--layouts", "f.txt", "--json"]) == 1
    verify = {"recipe": "x.toml", "sets": [], "dtype": "float32", "steps": 2, "layouts": "f.txt", "as_json": True}
    assert seen == [("x.toml", ["a.b=1", "c.d=2"]), verify]


def test_check_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from composer3d import cli; status = cli.main(['check', sys.argv[1]]);"
        "print(status, sorted({'torch', 'numpy', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, RECIPE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "composer3d", "check", "nowhere/x.toml"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "nowhere/x.toml: No such file or directory\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])  # it meets the broken pipe when it ends, or when it prints
def test_a_reader_that_goes_away_ends_a_command_quietly(unbuffered: str) -> None:
    command = [sys.executable, "-m", "composer3d", "check", RECIPE]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.close()  # before it has anything to write, as `| head` does later
        assert program.stderr is not None
        assert (program.stderr.read(), program.wait(60)) == (b"", 141)


def test_a_pipe_that_is_not_the_output_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(load_module, "load", broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["check", RECIPE])
