"""``composer3d doctor``: its output, its file, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.facts.hardware import read_row
from tools.prove.paths import ROOT

SMALL = (
    '[run]\nname = "a"\ndevice = "cpu"\n[model]\npreset = "debug-tiny"\n[mesh]\ndp_shard = 2\n'
    "[data]\nglobal_batch = 8\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "r.toml").write_text(SMALL)
    return tmp_path


def composer3d(folder: Path, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "composer3d", command, "r.toml", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_prints_a_table_and_json_and_writes_a_row_for_plan(folder: Path) -> None:
    done = composer3d(folder, "doctor", "--json", "--write", "row.toml")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert table[1] == "every group has its ranks, and every collective gave the right values"
    answer = json.loads(last)
    assert answer["passed"]
    assert (answer["ranks"], answer["nodes"]) == (2, 1)
    assert set(answer["axes"]) == {"fsdp", "world", "node"}
    row = read_row(str(folder / "row.toml"))
    assert row.matrix_rates["float32"] == pytest.approx(
        1e12 * answer["hardware"]["matrix_tflops"]["float32"], rel=1e-4
    )
    assert not (folder / "runs").exists()

    planned = composer3d(folder, "plan", "--gpu", "row.toml", "--gpus", "2", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["gpu"] == row.name

    again = composer3d(folder, "doctor", "--write", "row.toml")
    assert again.returncode == 2
    assert again.stderr == "--write row.toml: the file exists; name another one\n"
    # A missing folder is told before anything is measured.
    nowhere = composer3d(folder, "doctor", "--write", "none/row.toml")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert nowhere.stderr == "--write none/row.toml: there is no folder none; make it first\n"


def test_a_wrong_recipe_is_refused(folder: Path) -> None:
    done = composer3d(folder, "doctor", "--set", "mesh.tp=3", "--json")
    assert done.returncode == 2
    assert "mesh.tp = 3" in done.stderr
    assert not json.loads(done.stdout)["ok"]


def test_one_process_has_no_axis(folder: Path) -> None:
    done = composer3d(folder, "doctor", "--set", "mesh.dp_shard=1", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["axes"] == {}
    assert answer["matrix"]["slowest_rank"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--here",),
            "verify --here is one rank of a job: start it as the training, with torchrun",
        ),
        (("--here", "--layouts", "x"), "proves the recipe's own layout: leave out --layouts"),
    ],
)
def test_a_proof_here_needs_a_job(folder: Path, options: tuple[str, ...], message: str) -> None:
    done = composer3d(folder, "verify", *options)
    assert done.returncode == 2
    assert message in done.stderr
