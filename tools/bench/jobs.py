"""One run: start it as a user would, watch it from outside, and read what it measured."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from composer3d.recipe.resolve import load

LIMIT_S = 1800.0

# How often the memory of all processes is read. It takes some milliseconds, and may be rare,
# because peaks only grow.
_MEMORY_EVERY_S = 0.5

# The fields of a shape that the hand-written loop takes.
SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn", "vocab", "rope_theta", "norm_eps")


CPU_RECIPE = Path(__file__).with_name("bench.toml")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class JobError(Exception):
    """A run failed or was refused; the message is the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of one run.

    Attributes:
        tokens_per_s: of the whole job: the tokens of a step divided by ``step_s``.
        step_s: the median over the steps after the warm-up, without checkpoints.
        launch_to_first_step_s: from the start of the command to the end of the first optimizer
            step.
        peak_rss_gib: the largest peak of any one process of the job. Pages that forked processes
            share count in each of them.
        peak_gpu_gib: the peak that torch allocated.
    """

    tokens_per_s: float
    step_s: float
    launch_to_first_step_s: float
    peak_rss_gib: float
    peak_gpu_gib: float | None = None


@dataclass(kw_only=True)
class Job:
    """A command to measure.

    Attributes:
        output: the file that gets its stdout and stderr.
        metrics: the metrics.jsonl that it writes. None: its output has the figures.
        env: variables to add to those of this process.
        gpu: whether it trains on a GPU.
        began_s: ``time.monotonic`` when it was started.
        first_step_s: seconds until its first line of metrics; 0 before.
        peak_kib: the largest peak so far of any one of its processes.
    """

    command: Sequence[str]
    output: Path
    metrics: Path | None = None
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    gpu: bool = False

    began_s: float = 0.0
    first_step_s: float = 0.0
    peak_kib: int = 0

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the command, as a job of its own even if the bench runs under torchrun."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.began_s = time.monotonic()
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        env = inherited | self.env
        with self.output.open("wb") as out:
            return subprocess.Popen(
                self.command, cwd=self.cwd, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def has_done_first_step(self) -> bool:
        """Look for the first line of metrics; True also if this job writes no metrics."""
        if self.metrics is None:
            return True
        if not self.first_step_s and self.metrics.exists() and self.metrics.stat().st_size:
            self.first_step_s = time.monotonic() - self.began_s
        return self.first_step_s > 0

    def result(self) -> Result:
        """Read the figures of a job that has ended."""
        assert self.metrics is not None
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        steps = [line for line in lines if "step_s" in line]
        tokens = steps[-1]["tokens_per_s"] * steps[-1]["step_s"]
        warm_up = min(3, len(steps) // 2)
        step_s = statistics.median(line["step_s"] for line in steps[warm_up:])
        memory = steps[-1]["memory_gib"]
        return Result(
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            launch_to_first_step_s=self.first_step_s,
            peak_rss_gib=max(self.peak_kib / 2**20, 0.0 if self.gpu else memory),
            peak_gpu_gib=memory if self.gpu else None,
        )


class TitanJob(Job):
    """torchtitan through its ``bench.sh``, which prints its figures."""

    def result(self) -> Result:
        """Read the figures from the output."""
        text = self.output.read_text(errors="replace")
        rate = re.search(r"median step ([\d.]+)s +global tokens/s (\d+)", text)
        launch = re.search(r"LAUNCH_TO_STEP1 ([\d.]+)s", text)
        if rate is None or launch is None:
            raise JobError(f"bench.sh printed no figures: {text[-300:]}")
        return Result(
            tokens_per_s=float(rate[2]),
            step_s=float(rate[1]),
            launch_to_first_step_s=float(launch[1]),
            peak_rss_gib=self.peak_kib / 2**20,
        )


def measure(make_jobs: Callable[[Path], Sequence[Job]]) -> Result:
    """Run all jobs that ``make_jobs`` returns for an empty folder, at the same time.

    Returns:
        The sum of their tokens/s, and the largest of each other figure.
    """
    with tempfile.TemporaryDirectory(prefix="composer3d-bench-") as folder:
        jobs = make_jobs(Path(folder))
        run_together(jobs)
        results = [job.result() for job in jobs]
    gpu_peaks = [result.peak_gpu_gib for result in results if result.peak_gpu_gib is not None]
    return Result(
        tokens_per_s=sum(result.tokens_per_s for result in results),
        step_s=max(result.step_s for result in results),
        launch_to_first_step_s=max(result.launch_to_first_step_s for result in results),
        peak_rss_gib=max(result.peak_rss_gib for result in results),
        peak_gpu_gib=max(gpu_peaks) if gpu_peaks else None,
    )


def run_together(jobs: Sequence[Job]) -> None:
    """Run jobs at the same time, and measure each from outside. None outlives this call.

    Raises:
        JobError: one of them failed, or they took longer than ``LIMIT_S``.
    """
    processes: list[tuple[Job, subprocess.Popen[bytes]]] = []
    try:
        for job in jobs:
            processes.append((job, job.start()))
        memory_read_s = 0.0
        while any(process.poll() is None for _, process in processes):
            now_s = time.monotonic()
            if now_s - memory_read_s > _MEMORY_EVERY_S:
                memory_read_s = now_s
                for job, process in processes:
                    job.peak_kib = max(job.peak_kib, *map(peak_kib, process_tree(process.pid)))
                if now_s - jobs[0].began_s > LIMIT_S:
                    raise JobError(f"not done after {LIMIT_S:.0f} s")
            have_done_first_step = [job.has_done_first_step() for job in jobs]
            # After the first steps, look rarely, so as not to disturb the steps that are measured.
            time.sleep(0.25 if all(have_done_first_step) else 0.02)
    finally:
        for _, process in processes:
            end(process)
    for job, process in processes:
        if process.returncode:
            lines = job.output.read_text(errors="replace").strip().splitlines()
            raise JobError("\n".join(lines[-5:]) or f"exit status {process.returncode}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its descendants, unless it has ended already."""
    if process.poll() is not None:
        return
    pids = process_tree(process.pid)
    for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + wait_s
        while pids and time.monotonic() < deadline_s:
            time.sleep(0.05)
            process.poll()
            running = parents_of_processes()
            pids = [pid for pid in pids if pid in running]


def parents_of_processes() -> dict[int, int]:
    """The parent of each running process of this machine; empty on a system without /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            # The fields after the name, which is in parentheses and may contain anything.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "XZ":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants."""
    parents = parents_of_processes()
    pids = [root]
    for pid in pids:  # it grows while the loop runs, until no process has children left
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids


def peak_kib(pid: int) -> int:
    """The peak of the resident set of a process; 0 if it has ended."""
    try:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def composer3d_job(python: str, recipe: Path, sets: Sequence[str], folder: Path) -> Job:
    """Make a job of ``composer3d train``, with its files in ``folder``.

    It validates nothing, and saves only after the last step.
    """
    run = load(recipe, sets, check_files=False).recipe.run  # the command checks them
    own_sets = [
        f"run.out_dir={folder}",
        "metrics.every=1",
        "metrics.tensorboard=false",
        "checkpoint.resume=none",
        "checkpoint.every=0",
        "checkpoint.every_minutes=0",
        "validation.every=0",
    ]
    command = [python, "-m", "composer3d", "train", str(recipe)]
    for override in (*sets, *own_sets):
        command += ["--set", override]
    return Job(
        command=command,
        output=folder / "output",
        metrics=folder / run.name / "metrics.jsonl",
        gpu=run.device == "cuda",
    )


def plain_job(python: str, recipe: Path, sets: Sequence[str], folder: Path) -> Job:
    """Make a job of the hand-written loop, ``plain.py``, with the sizes of a recipe."""
    resolved = load(recipe, sets).recipe
    setup = {
        "shape": {key: value for key, value in asdict(resolved.model).items() if key in SHAPE},
        "seq_len": resolved.data.seq_len,
        "global_batch": resolved.data.global_batch,
        "micro_batch": resolved.data.micro_batch,
        "steps": resolved.run.steps,
        "device": resolved.run.device,
        "compute": resolved.precision.computes_in,
        "out": str(folder / "metrics.jsonl"),
    }
    return Job(
        command=[python, str(Path(__file__).with_name("plain.py")), json.dumps(setup)],
        output=folder / "output",
        metrics=folder / "metrics.jsonl",
        gpu=resolved.run.device == "cuda",
    )
