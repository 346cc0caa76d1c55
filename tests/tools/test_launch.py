"""The scripts of ``tools/launch``; ``tests/prove/test_jobs.py`` runs ``node`` on two nodes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.jobs import DATA, RECIPE, losses, write_corpus
from tools.prove.paths import ROOT

LAUNCH = ROOT / "tools" / "launch"
SLURM = Path(__file__).with_name("slurm")  # stand-ins for srun and scontrol


def start(folder: Path, nodes: int, tasks_per_node: int, *sets: str) -> subprocess.Popen[str]:
    """Run the batch script as Slurm would on its first node."""
    environment = {
        **os.environ,
        "PATH": f"{SLURM}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REQUEUED": str(folder / "requeued"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SRUN_OPTIONS": "--container-image=image.sqsh --container-workdir=/work",
    }
    overrides = [word for override in sets for word in ("--set", override)]
    return subprocess.Popen(
        ["bash", str(LAUNCH / "train.sbatch"), "recipe.toml", *overrides],
        cwd=folder,
        env=environment,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_to_step_3(job: subprocess.Popen[str]) -> str:
    """Return what the job prints until its third step is done."""
    assert job.stdout is not None
    output = ""
    for line in job.stdout:
        output += line
        if line.startswith("step      3/"):
            break
    return output


@pytest.mark.long
def test_a_slurm_job_saves_goes_back_into_the_queue_and_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(mesh=DATA))

    # torchrun on two nodes, each with one rank.
    with start(tmp_path, 2, 1, "run.steps=100000", "checkpoint.every=0") as job:
        output = read_to_step_3(job)
        warned_s = time.monotonic()
        # At the limit of the job, SIGTERM follows.
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        job.send_signal(signal.SIGTERM)
        output += job.communicate(timeout=60)[0]
        assert job.returncode == 1, output
    assert time.monotonic() - warned_s < 30
    stopped = re.search(r"stopped by signal 10 after step (\d+);", output)
    assert stopped is not None, output
    assert output.count("stopped by signal") == 1
    assert (tmp_path / "requeued").read_text() == f"{os.getpid()}\n"

    # Then the same job with a task for each rank, to its end.
    steps = int(stopped[1]) + 2
    with start(tmp_path, 1, 2, f"run.steps={steps}") as job:
        output, _ = job.communicate(timeout=100)
        assert job.returncode == 0, output
    assert f"{stopped[1]} of {steps} steps are done" in output
    assert len(losses(tmp_path, "runs")) == steps
    assert (tmp_path / "requeued").read_text().count("\n") == 1


@pytest.mark.parametrize(("tasks", "status"), [(1, 1), (2, 128 + signal.SIGUSR1)])
def test_a_slurm_job_that_is_asked_to_end_saves_and_does_not_come_back(
    tmp_path: Path, tasks: int, status: int
) -> None:
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(mesh=DATA))
    sets = ("run.steps=100000", "checkpoint.every=0")
    with start(tmp_path, 2 // tasks, tasks, *sets) as job:
        output = read_to_step_3(job)
        for _ in range(4):
            job.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        output += job.communicate(timeout=60)[0]
        assert job.returncode == status, output
    stopped = re.search(r"stopped by signal 10 after step (\d+);", output)
    assert stopped is not None, output
    saved = tmp_path / f"runs/small/checkpoints/step-{int(stopped[1]):08d}/manifest.json"
    assert saved.is_file()
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "node", "a:29400"),
        ("bash", "train.sbatch"),
        (sys.executable, "rendezvous.py", "a"),
    ],
)
def test_missing_arguments_are_named(command: tuple[str, ...]) -> None:
    program, script, *arguments = command
    result = subprocess.run(
        [program, str(LAUNCH / script), *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ")
    assert result.stderr.count("\n") == 1
