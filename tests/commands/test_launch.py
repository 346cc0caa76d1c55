"""``composer3d launch``: its list, its copies, and the job of the Kubernetes file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer3d import cli
from composer3d.commands.launch import SCRIPTS
from tests.runtime.test_environment import free_port
from tests.training.jobs import RECIPE, losses, write_corpus
from tools.prove.paths import ROOT

LAUNCH = ROOT / "tools" / "launch"


def test_each_script_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert {script.file for script in SCRIPTS.values()} == {
        path.name for path in LAUNCH.iterdir() if path.is_file()
    }
    assert cli.main(["launch", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*SCRIPTS]
    assert cli.main(["launch", "ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["scripts"]
    assert [(row["name"], row["file"]) for row in rows] == [
        (name, script.file) for name, script in SCRIPTS.items()
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_show_and_cp_give_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = SCRIPTS[name].file
    for word in (name, file):
        assert cli.main(["launch", "show", word]) == 0
        assert capsys.readouterr().out == (LAUNCH / file).read_text()
    assert cli.main(["launch", "cp", name]) == 0
    assert capsys.readouterr().out.startswith(f"made {file}\nuse it: ")
    assert Path(file).read_bytes() == (LAUNCH / file).read_bytes()
    assert cli.main(["launch", "cp", name]) == 2
    assert capsys.readouterr().err == (
        f"{file} exists, and is not overwritten; give another DEST, or remove it\n"
    )
    (tmp_path / "sub").mkdir()
    assert cli.main(["launch", "cp", name, "sub"]) == 0
    assert os.listdir("sub") == [file]


def test_an_unknown_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "show", "slurn"]) == 2
    assert capsys.readouterr().err == "slurn: composer3d has no such script; did you mean slurm?\n"
    assert cli.main(["launch", "cp", "../pyproject.toml"]) == 2
    assert "; its scripts are slurm, node, rendezvous, k8s, docker\n" in capsys.readouterr().err


@pytest.mark.long
def test_the_container_of_the_kubernetes_job_trains(tmp_path: Path) -> None:
    """Its command runs here with the settings of one node, and the rest agrees with them."""
    job_set: dict[str, Any] = yaml.safe_load((LAUNCH / "k8s.yaml").read_text())
    name = job_set["metadata"]["name"]
    ((job,), spec) = (job_set["spec"]["replicatedJobs"], job_set["spec"])
    assert spec["failurePolicy"]["maxRestarts"] > 0
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert pods["parallelism"] == pods["completions"] == int(env["NODES"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": int(env["PROCESSES"])}
    # A pod's address in a JobSet: its name, then the name of the set, which is its subdomain.
    assert re.fullmatch(rf"{name}-{job['name']}-0-0\.{name}:\d+", env["FIRST"])
    grace_s = pods["template"]["spec"]["terminationGracePeriodSeconds"]
    assert f"--shutdown-timeout {grace_s - 20} " in (LAUNCH / "node").read_text()

    write_corpus(tmp_path)
    recipe = RECIPE.format(mesh="").replace("steps = 20", "steps = 4")
    (tmp_path / "recipe.toml").write_text(recipe)
    env |= {"FIRST": f"localhost:{free_port()}", "NODES": "1", "PROCESSES": "2"}
    env |= {"RECIPE": "recipe.toml", "RESTARTS": "0", "LOGS": "logs"}

    def start(path: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*container["command"], *container["args"]],
            cwd=tmp_path,
            env={**os.environ, **env, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    without_package = start("/usr/bin:/bin")
    assert without_package.returncode != 0, without_package.stderr
    done = start(f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path, "runs")) == 4
    printed = {path.parent.name: path.read_text() for path in tmp_path.glob("logs/**/stderr.log")}
    assert set(printed) == {"0", "1"}
    assert "step 4/4" in printed["0"]
    assert "step 4/4" not in printed["1"]
    assert "2 ranks" in (tmp_path / "runs" / "small" / "events.jsonl").read_text()
