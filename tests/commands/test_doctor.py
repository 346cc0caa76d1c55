"""``composer3d doctor``: its output, its file, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts.hardware import read_row
from composer3d.runtime import launch
from tools.prove.paths import ROOT

SMALL = (
    '[run]\nname = "a"\ndevice = "cpu"\n[model]\npreset = "debug-tiny"\n[mesh]\ndp_shard = 2\n'
    "[data]\nglobal_batch = 8\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(SMALL)
    return tmp_path


def doctor(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "composer3d", "doctor", "r.toml", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_prints_a_table_and_json_and_writes_a_row_for_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = doctor(folder, "--json", "--write", "row.toml")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert table[1] == "every group has its ranks, and every collective gave the right values"
    answer = json.loads(last)
    assert answer["passed"]
    assert (answer["ranks"], answer["nodes"]) == (2, 1)
    assert set(answer["axes"]) == {"fsdp", "world", "node"}
    advice = {each["name"]: each["is_right"] for each in answer["environment"]["advice"]}
    assert advice["OMP_NUM_THREADS"]
    assert any("open files: " in line for line in table)
    row = read_row(str(folder / "row.toml"))
    assert row.matrix_rates["float32"] == pytest.approx(
        1e12 * answer["hardware"]["matrix_tflops"]["float32"], rel=1e-4
    )
    assert not (folder / "runs").exists()

    assert cli.main(["plan", "r.toml", "--gpu", "row.toml", "--gpus", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == row.name


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("doctor r.toml --write old.toml", "--write old.toml: the file exists; name another one"),
        # A missing folder is told before anything is measured.
        (
            "doctor r.toml --write none/row.toml",
            "--write none/row.toml: there is no folder none; make it first",
        ),
        ("doctor r.toml --set mesh.tp=3", "mesh.tp = 3"),
        (
            "verify r.toml --here",
            "verify --here is one rank of a job: start it as the training, with torchrun",
        ),
        (
            "verify r.toml --here --layouts x",
            "proves the recipe's own layout: leave out --layouts",
        ),
        (
            "verify r.toml --full --layouts x",
            "verify --full is about the recipe's own layout: leave out --layouts",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_ranks_start(
    folder: Path,
    command: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "old.toml").touch()
    monkeypatch.setattr(launch, "warm_up", lambda: pytest.fail("ranks start"))
    assert cli.main([*command.split(), "--json"]) == 2
    out, errors = capsys.readouterr()
    assert message in errors
    answer = json.loads(out)
    assert not answer.get("ok", answer.get("passed"))


def test_one_process_has_no_axis(folder: Path) -> None:
    done = doctor(folder, "--set", "mesh.dp_shard=1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["axes"] == {}
    assert answer["matrix"]["slowest_rank"] == 0


def test_a_folder_of_checkpoints_that_cannot_be_read_is_a_user_error(
    folder: Path,
) -> None:
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/checkpoints").touch()
    done = doctor(folder, "--set", "mesh.dp_shard=1", "--json")
    assert done.returncode == 2
    assert "run.out_dir" in done.stderr
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not answer["passed"]
