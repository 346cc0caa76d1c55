"""The command line: ``check``, its exit status, and what it leaves unloaded."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import composer3d
from composer3d import cli
from composer3d.commands import check as check_command
from composer3d.commands import train, verify
from composer3d.data import sources
from composer3d.facts.errors import TrainingError
from composer3d.models.moe.shape import MoeShape
from composer3d.recipe import machine
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import TABLES, Model
from tests.commands.conftest import Ask
from tests.recipe.wrong import token_files
from tools.prove.paths import LAYOUTS, ROOT
from tools.prove.paths import RECIPE as RECIPE_PATH

RECIPE = str(ROOT / "recipes" / "debug-8-dp-tp-pp.toml")


def test_check_prints_the_recipe_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "data.micro_batch=2", "--set", "run.steps=10"]
    assert cli.main(["check", RECIPE, "--gpus", "8", *sets]) == 0
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
    for argv, hints in (
        (["--set=mesh.dp_shard=-1"], 1),
        (["--set=mesh.dp_shard=-1", "--gpus=8"], 0),
        ([], 0),
    ):
        assert cli.main(["check", RECIPE, *argv]) == 0
        assert capsys.readouterr().out.count("--gpus N") == hints


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(TrainingError("loss is nan"), 1, "loss is nan\n"), (KeyboardInterrupt(), 130, "")],
)
def test_a_failed_run_and_an_interrupt_have_their_own_status(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check_command, "load", raising(error))
    assert cli.main(["check", RECIPE]) == status
    assert capsys.readouterr() == ("", said)


def test_a_pipe_that_is_not_the_output_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "load", raising(BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(BrokenPipeError):
        cli.main(["check", RECIPE])


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


def test_check_json_is_one_object(ask: Ask) -> None:
    _, answer = ask("check", RECIPE)
    assert answer["ok"] is True
    assert answer["world_size"] == 8
    mesh = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "ep": 1}
    assert answer["recipe"]["mesh"] == mesh
    assert answer["origins"]["model.dim"] == "preset debug-tiny"


def test_check_changed_leaves_defaults_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["check", RECIPE, "--changed", "--set", "optim.clip=0.5"]) == 0
    text = capsys.readouterr().out
    assert "clip = 0.5" in text
    assert "# default" not in text
    assert "[checkpoint]" not in text  # this recipe leaves all of its keys out
    assert "# world size" in text
    path = tmp_path / "changed.toml"
    path.write_text(text)
    assert load(path).recipe == load(RECIPE, ["optim.clip=0.5"]).recipe
    for option in ("--json", "--schema"):
        assert cli.main(["check", RECIPE, "--changed", option]) == 2
        assert f"composer3d check: --changed has no effect with {option}" in capsys.readouterr().err


def test_check_schema_prints_every_key(capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    """Those of experts follow [model], and no key is there twice."""
    assert cli.main(["check", "--schema"]) == 0
    text = capsys.readouterr().out
    assert ask("check", "--schema") == (0, {"ok": True, "schema": text})
    sections = {title: lines for title, *lines in map(str.splitlines, text.split("\n\n"))}

    def names(title: str) -> list[str]:
        return [line.split()[0] for line in sections[title]]

    own = {entry.name for entry in fields(Model)}
    for table, cls in TABLES.items():
        assert names(f"[{table}]") == [field.name for field in fields(cls)]
    title = '[model] with architecture = "moe": these keys as well'
    titles = list(sections)
    assert titles.index(title) == titles.index("[model]") + 1
    assert names(title) == [entry.name for entry in fields(MoeShape) if entry.name not in own]
    assert sections[title][0] == f"{'experts = 8':<26} {'int':<27} experts of a layer"
    assert 'architecture = "llama": these' not in text
    zero = (
        "zero = 3                   0, 1, 2 or 3                0: replicate parameters; 1: shard"
    )
    assert zero in text


def test_errors_of_verify_are_json_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", RECIPE, "--layouts", "missing.txt", "--json"]) == 2
    out, err = capsys.readouterr()
    assert err == "--layouts missing.txt: cannot be read (No such file or directory)\n"
    assert json.loads(out) == {"passed": False, "refused": True, "error": err.strip()}


def test_a_number_of_thousands_of_digits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", RECIPE, "--gpus", "9" * 5000]) == 2
    err = capsys.readouterr().err
    assert "--gpus: must be a number of at most 18 digits, got 5,000 characters" in err


def test_check_counts_the_parameters_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "quickstart-moe"]) == 0
    summary = {line[2:15].strip(): line[16:] for line in capsys.readouterr().out.splitlines()[-4:]}
    assert summary["world size"] == (
        "8 (pp 2 x dp_shard 2 x tp 2, ep 4 of them, experts sharded over 1)"
    )
    all_parameters, _, active = summary["parameters"].partition(", of which ")
    assert active.endswith(" compute each token")
    # 4 blocks of 8 experts of 3 matrices (192 x 128), of which a token uses 2.
    unused = 4 * 6 * 3 * 192 * 128
    assert int(all_parameters.replace(",", "")) - unused == int(active.split()[0].replace(",", ""))


def test_check_names_no_shards_of_experts_that_are_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["pp=1", "dp_shard=1", "tp=4", "ep=2"]
    sets = [f"--set=mesh.{size}" for size in sizes] + ["--set=parallel.zero=0"]
    assert cli.main(["check", "quickstart-moe", "--gpus=4", *sets]) == 0
    assert "# world size    4 (tp 4, ep 2 of them)\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["check"],
        ["check", ""],
        ["check", RECIPE, "--gpus", "0"],
        ["verify", RECIPE, "--steps", "none"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert "composer3d" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "argv", [["check", "none.toml"], ["check", "--no-such-option"], ["chek"]], ids=" ".join
)
def test_only_rank_0_prints(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(argv) == 2
    assert capsys.readouterr().err


def processes_of(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            found += (
                [int(stat.parent.name)] if state not in "XZ" and int(its_group) == group else []
            )
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("when", ["while the forkserver imports torch", "while workers run"])
def test_an_interrupted_verify_ends_quietly_with_all_its_processes(when: str) -> None:
    layouts = ["--layouts", str(LAYOUTS)]
    command = [
        sys.executable,
        "-m",
        "composer3d",
        "verify",
        str(RECIPE_PATH),
        *layouts,
    ]
    pipe = subprocess.PIPE
    # Ctrl-C goes to every process of the terminal's group.
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        if when == "while workers run":
            assert program.stdout.readline().startswith("exact")
        else:
            until = time.monotonic() + 60
            # The command, the forkserver and a resource tracker.
            while len(processes_of(program.pid)) < 3 and time.monotonic() < until:
                time.sleep(0.02)
        os.killpg(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=120)
        # On a slow machine there may be lines of progress.
        others = [line for line in err.splitlines() if not line.startswith("verify: ")]
        assert (program.returncode, others) == (130, [])
        until = time.monotonic() + 30
        while processes_of(program.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert processes_of(program.pid) == []


def test_the_version_names_that_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    words = f"composer3d {composer3d.__version__} (torch {metadata.version('torch')}, Python "
    assert capsys.readouterr().out.startswith(words)
    assert composer3d.__version__ == metadata.version("composer3d")


def test_a_bug_report_has_more_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in (["--version", "--verbose"], ["--verbose", "--version"]):
        assert cli.main(options) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"torch {torch.__version__}" in lines
        assert f"safetensors {metadata.version('safetensors')}" in lines
        assert lines[-1] == "no GPU that torch can use"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA H100 {index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    assert cli.main(["--version", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "NCCL 2.29.7" in lines
    assert lines[-3:] == ["driver unknown", "GPU 0: NVIDIA H100 0", "GPU 1: NVIDIA H100 1"]
    assert cli.main(["--verbose"]) == 2
    assert "unknown option --verbose" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sets", "way_out"),
    [
        (["--set", "mesh.tp", "5"], "write --set mesh.tp=5"),
        (["--set", "mesh.tp", "=", "5"], "write --set mesh.tp=5"),
        (["--set", "mesh.tp", "=5"], "write --set mesh.tp=5"),
        (["--set", "mesh.tp"], "write --set mesh.tp=VALUE"),
        (["--set", "mesh.tp", "--json"], "write --set mesh.tp=VALUE"),
        (["--set", "tp", "5"], "write --set TABLE.KEY=VALUE"),
        (["--set=.."], "write it as table.key=value"),
        (["--set=mesh.tp"], "write it as table.key=value"),
    ],
    ids=" ".join,
)
def test_a_wrong_set_says_how_to_write_it(
    sets: list[str], way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", RECIPE, *sets]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--set {sets[0][6:] or sets[1]}: ")
    assert line.endswith(way_out)


def test_a_set_without_a_value_does_not_use_the_recipe_as_its_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "--set", "mesh.tp", RECIPE]) == 2
    assert capsys.readouterr().err.endswith("write --set mesh.tp=VALUE\n")


@pytest.mark.parametrize("name", ["a\0b.toml", "a\udcffb.toml"], ids=ascii)
@pytest.mark.parametrize(
    "argv",
    [
        ["check", "{}"],
        ["check", RECIPE, "--set", "run.out_dir={}"],
        ["train", "{}"],
        ["verify", "{}"],
        ["verify", RECIPE, "--layouts", "{}"],
        ["prepare", "{}", "-o", "out", "--tokenizer", "bytes"],
        ["prepare", RECIPE, "-o", "{}", "--tokenizer", "bytes"],
        ["prepare", RECIPE, "-o", "out", "--tokenizer", "{}"],
        ["convert", "{}", "out", "--to", "hf"],
        ["convert", RECIPE, "{}", "--to", "hf"],
        ["inspect", "{}"],
    ],
    ids=lambda argv: " ".join(argv).replace(RECIPE, "RECIPE"),
)
def test_a_name_that_is_not_text_is_refused_by_every_command(
    argv: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([part.format(name) for part in argv]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith(
        ("composer3d: the argument ", "--set run.out_dir=a\\udcffb.toml: the text must be UTF-8")
    )
    assert line.isprintable()


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    code = (
        "import sys; from composer3d import cli; cli.main(['--version']);"
        "print('tensor \\ud800 \\xe9')"
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == r"tensor \ud800 \xe9"


TINY = '[run]\nname = "a"\ndevice = "cpu"\n[model]\npreset = "debug-tiny"\n'


def check(
    capsys: pytest.CaptureFixture[str], *sets: str, text: str = TINY, options: Sequence[str] = ()
) -> list[str]:
    """Return the errors of ``check`` for a recipe in the working directory; none if it passes."""
    Path("x.toml").write_text(text)
    overrides = [f"--set={override}" for override in sets]
    status = cli.main(["check", "x.toml", *overrides, *options])
    lines = capsys.readouterr().err.splitlines()
    assert status == (2 if lines else 0)
    return lines


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "tokens"),
    [("text", 21), ("jsonl", 9), ("tokens", 100), ("python", None)],
)
def test_check_finds_a_sequence_that_is_longer_than_the_data(
    here: Path, capsys: pytest.CaptureFixture[str], source: str, tokens: int | None
) -> None:
    sets = [f"data.source={source}", "data.packing=none"]
    folder = here / "data"
    folder.mkdir()
    (folder / ".hidden").write_bytes(b"x" * 1000)
    if source == "text":
        (folder / "a").write_bytes(b"x" * 9)
        (folder / "b").write_bytes(b"x" * 10)
        (folder / "empty").touch()
    elif source == "jsonl":
        (folder / "a.jsonl").write_text(
            '{"text": "ab\\u00e9"}\n\n{"text": ""}\n{"text": "cde", "more": 1}\n'
        )
        (folder / "other.txt").write_bytes(b"x" * 1000)
    elif source == "tokens":
        for name, content in token_files("data").items():
            (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if tokens is not None:
        sets.append("data.path=data")
        assert check(capsys, *sets, f"data.seq_len={tokens - 1}") == []
    else:
        tokens = 10**8
    (line,) = check(capsys, *sets, f"data.seq_len={tokens}")
    assert line.startswith(
        f"--set data.seq_len={tokens}: data.seq_len = {tokens} needs {tokens + 1} tokens, but "
    )
    assert line.endswith("; use a smaller data.seq_len or more text")
    if source != "python":
        assert f'data.path = "data" has {tokens};' in line


def test_check_finds_that_the_held_out_text_is_too_short(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "long").write_bytes(b"x" * 300)
    (here / "short").write_bytes(b"x" * 100)
    sets = ["data.source=text", "data.path=long", "validation.path=short", "validation.every=5"]
    (line,) = check(capsys, *sets)
    assert 'data.seq_len = 256 needs 257 tokens, but validation.path = "short" has 101;' in line
    assert check(capsys, *sets, "data.seq_len=64") == []
    # A sample of whole documents is filled up.
    assert check(capsys, *sets, "data.packing=whole_documents") == []


def test_check_finds_that_a_folder_has_no_text_of_the_source(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "data").mkdir()
    (here / "data/a.txt").write_text("a text")
    (line,) = check(capsys, "data.source=jsonl", "data.path=data")
    assert line.endswith(
        'data.path = "data" has no text that data.source = "jsonl" reads; give another path'
    )


def test_check_skips_the_same_folders_as_training() -> None:
    assert machine.NOT_LIBRARY == sources._NOT_LIBRARY


def test_check_finds_a_folder_that_cannot_be_made(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").touch()
    (line,) = check(capsys, "run.out_dir=file")
    assert line == (
        "--set run.out_dir=file: run.out_dir: file is not a folder, so that file/a cannot be made"
    )
    (here / "runs").mkdir()
    (here / "runs/a").touch()
    (line,) = check(capsys)
    assert line == "x.toml:1: run.out_dir: runs/a is not a folder, so that runs/a cannot be made"
    assert check(capsys, "run.out_dir=new/deep/er") == []
    assert not (here / "new").exists()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "runs" and access(path, mode))
    (line,) = check(capsys, "run.name=b")
    assert line == "x.toml:1: run.out_dir: runs cannot be written by this user"


@pytest.mark.parametrize("locked", ["lock", "."])  # the file, or the folder itself
def test_check_finds_a_folder_in_use(
    here: Path, capsys: pytest.CaptureFixture[str], locked: str
) -> None:
    folder = here / "runs/a"
    folder.mkdir(parents=True)
    (folder / "lock").write_text("process 7 on there")
    assert check(capsys) == []
    descriptor = os.open(folder / locked, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (line,) = check(capsys)
        assert line.endswith(
            "runs/a is in use by process 7 on there; wait for its end, or give this run another "
            "run.name"
        )
    finally:
        os.close(descriptor)
    assert check(capsys) == []


@pytest.mark.parametrize("closed", ["runs/a", "runs/a/checkpoints"])
def test_check_finds_a_folder_that_cannot_be_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    (here / "runs/a/checkpoints").mkdir(parents=True)
    # Not chmod: root may write everywhere.
    monkeypatch.setattr(machine.os, "access", lambda path, mode: str(path) != closed)
    (line,) = check(capsys)
    assert line.endswith(f"{closed} cannot be written by this user")


def test_check_finds_a_device_that_is_not_there(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = ["null", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(machine.os, "listdir", lambda path: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (line,) = check(capsys, "run.device=cuda")
    assert line.startswith(
        '--set run.device=cuda: run.device = "cuda", but this machine shows no GPU; use --gpus N'
    )
    assert check(capsys, "run.device=cuda", options=["--gpus", "1"]) == []
    assert check(capsys, "run.device=auto") == []
    for name in ("nvidia0", "kfd", "dxg"):
        listed[0] = name
        assert check(capsys, "run.device=cuda") == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(check(capsys, "run.device=cuda")) == 1


def test_check_and_train_find_a_service_whose_package_is_missing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"mlflow"}
    find_spec = machine.importlib.util.find_spec

    def find(name: str) -> object:
        # A folder of runs with the name of the package is no package.
        if name in ("wandb", "prometheus_client"):
            return SimpleNamespace(origin=None)
        if name in ("mlflow", "sqlalchemy", "alembic"):
            return SimpleNamespace(origin="x.py") if name in installed else None
        return find_spec(name)

    monkeypatch.setattr(machine.importlib.util, "find_spec", find)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    expected = (
        "--set metrics.wandb=true: metrics.wandb = true needs wandb: pip install "
        "composer3d[wandb], or set metrics.wandb = false"
    )
    assert check(capsys, "metrics.wandb=true") == [expected]
    assert check(capsys, "metrics.wandb=true", options=["--gpus", "1"]) == []
    assert cli.main(["train", "x.toml", "--set", "metrics.wandb=true"]) == 2
    assert capsys.readouterr().err.splitlines() == [expected]
    assert not (here / "runs").exists()

    (line,) = check(capsys, "metrics.mlflow=true")
    assert "needs sqlalchemy and alembic: pip install composer3d[mlflow]" in line
    # A server keeps the runs, so that no database is needed here.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert check(capsys, "metrics.mlflow=true") == []

    (line,) = check(capsys, "metrics.prometheus=9400")
    way_out = "pip install composer3d[prometheus], or leave it out"
    assert line.endswith(f"metrics.prometheus = 9400 needs prometheus_client: {way_out}")


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "recipes/quickstart.toml"])
def test_recipes_of_our_own_are_found_by_name(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert cli.main(["check", name]) == 0
    assert "# parameters    853,120" in capsys.readouterr().out
    assert cli.main(["check", "recipes/debug-2-dp"]) == 0  # with its base
    (here / "quickstart.toml").write_text(TINY)  # a file of the user's comes first
    assert cli.main(["check", "quickstart.toml"]) == 0
    assert 'name = "a"' in capsys.readouterr().out
    assert cli.main(["check", "quickstart"]) == 0
    assert 'name = "quickstart"' in capsys.readouterr().out


def test_an_unknown_recipe_lists_those_of_composer3d(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "mine"]) == 2
    assert capsys.readouterr().err.startswith(
        "mine: there is no such file, and no such recipe in composer3d; its recipes are "
        "debug-1-single, "
    )
    assert cli.main(["check", "../quickstart"]) == 2


def test_commands_are_dispatched_with_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def replace_run(command: Any, status: int) -> None:
        def run(options: object) -> int:
            seen.append(options)
            return status

        monkeypatch.setattr(command, "run", run)

    replace_run(train, status=0)
    replace_run(verify, status=1)
    assert cli.main(["train", "x.toml", "--set", "a.b=1", "--set", "c.d=2"]) == 0
    assert cli.main(["verify", "x.toml", "--dtype", "float32", "--layouts", "f.txt", "--json"]) == 1
    proof = verify.Options(
        recipe="x.toml",
        sets=[],
        dtype="float32",
        steps=3,
        layouts="f.txt",
        full=False,
        here=False,
        as_json=True,
    )
    assert seen == [train.Options(recipe="x.toml", sets=["a.b=1", "c.d=2"]), proof]


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "composer3d", "check", "nowhere/x.toml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "nowhere/x.toml: No such file or directory\n",
    )


# Buffered, the command finds the broken pipe when it ends; unbuffered, when it prints.
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_a_command_quietly(unbuffered: str) -> None:
    command = [sys.executable, "-m", "composer3d", "check", RECIPE]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        # Close the reader before the command writes anything; `| head` closes it later.
        program.stdout.close()
        assert program.stderr is not None
        assert (program.stderr.read(), program.wait(60)) == (b"", 141)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["check", RECIPE], ["check", "no-such-recipe", "--json"]])
def test_an_output_on_a_full_disk_is_an_error_of_one_line(
    unbuffered: str, arguments: list[str]
) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "composer3d", *arguments],
            env=env,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr.splitlines()[-1] == (
        "standard output cannot be written (No space left on device); free space where it goes, "
        "or send it elsewhere"
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_the_folder_of_a_run_as_model_hf_is_told_what_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a/checkpoints").mkdir(parents=True)
    Path("r.toml").write_text('[model]\nhf = "runs/a"\n')
    assert cli.main(["check", "r.toml"]) == 2
    missing, advice = capsys.readouterr().err.splitlines()
    assert missing.startswith("r.toml:2: model.hf: runs/a/config.json cannot be read")
    assert advice == (
        "r.toml:2: model.hf: the folder has checkpoints of composer3d; start from them with "
        'checkpoint.resume = "runs/a" and the model that made them'
    )
