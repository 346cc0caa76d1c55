"""Starting a run as a user would, watching it from outside, and what it measured."""

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
_TREE_EVERY_S = 0.5  # looking for processes costs some milliseconds; their peaks only grow, so that it may be rare
SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn", "vocab", "rope_theta", "norm_eps")


class JobError(Exception):
    """A run that failed or was refused; the message is what it said last."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run measured."""

    tokens_per_s: float  # of the whole job: tokens of a step / step_s
    step_s: float  # median over the steps after the warm-up, without checkpoints
    launch_to_first_step_s: (
        float  # from the start of the command to the end of the first optimizer step
    )
    peak_rss_gib: (
        float  # largest peak of any one process of the job; pages that forks share count in each
    )
    peak_gpu_gib: float | None = None  # that torch allocated


@dataclass(kw_only=True)
class Job:
    """A command that writes ``metrics``, a metrics.jsonl, or says what it measured in ``output``."""

    command: Sequence[str]
    output: Path
    metrics: Path | None = None
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    gpu: bool = False

    begin: float = 0.0
    first_step_s: float = 0.0
    peak_kib: int = 0

    def start(self) -> "subprocess.Popen[bytes]":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.begin = time.monotonic()
        env = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
        } | self.env
        with self.output.open("wb") as out:
            return subprocess.Popen(
                self.command, cwd=self.cwd, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def saw_first_step(self) -> bool:
        file = self.metrics
        if not self.first_step_s and file is not None and file.exists() and file.stat().st_size:
            self.first_step_s = time.monotonic() - self.begin
        return self.metrics is None or self.first_step_s > 0

    def result(self) -> Result:
        assert self.metrics is not None
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        steps = [line for line in lines if "step_s" in line]
        tokens = steps[-1]["tokens_per_s"] * steps[-1]["step_s"]
        step_s = statistics.median(line["step_s"] for line in steps[min(3, len(steps) // 2) :])
        memory = steps[-1]["memory_gib"]
        return Result(
            tokens_per_s=tokens / step_s,
            step_s=step_s,
            launch_to_first_step_s=self.first_step_s,
            peak_rss_gib=max(self.peak_kib / 2**20, 0.0 if self.gpu else memory),
            peak_gpu_gib=memory if self.gpu else None,
        )


class TitanJob(Job):
    """torchtitan through its ``bench.sh``, which says itself what it measured."""

    def result(self) -> Result:
        said = self.output.read_text(errors="replace")
        rate = re.search(r"median step ([\d.]+)s +global tokens/s (\d+)", said)
        launch = re.search(r"LAUNCH_TO_STEP1 ([\d.]+)s", said)
        if rate is None or launch is None:
            raise JobError(f"bench.sh printed no figures: {said[-300:]}")
        return Result(
            tokens_per_s=float(rate[2]),
            step_s=float(rate[1]),
            launch_to_first_step_s=float(launch[1]),
            peak_rss_gib=self.peak_kib / 2**20,
        )


def measure(make: Callable[[Path], Sequence[Job]]) -> Result:
    """Run the jobs that ``make`` makes for an empty folder, at the same time; their tokens/s are summed."""
    with tempfile.TemporaryDirectory(prefix="composer3d-bench-") as folder:
        jobs = make(Path(folder))
        run_together(jobs)
        results = [job.result() for job in jobs]
    gpu = [result.peak_gpu_gib for result in results if result.peak_gpu_gib is not None]
    return Result(
        tokens_per_s=sum(result.tokens_per_s for result in results),
        step_s=max(result.step_s for result in results),
        launch_to_first_step_s=max(result.launch_to_first_step_s for result in results),
        peak_rss_gib=max(result.peak_rss_gib for result in results),
        peak_gpu_gib=max(gpu) if gpu else None,
    )


def run_together(jobs: Sequence[Job]) -> None:
    """Run jobs at the same time, each measured from outside; none outlives this call.

    Raises:
        JobError: one of them failed, or all took longer than ``LIMIT_S``.
    """
    running = []
    try:
        for job in jobs:
            running.append((job, job.start()))
        looked = 0.0
        while any(process.poll() is None for _, process in running):
            now = time.monotonic()
            if now - looked > _TREE_EVERY_S:
                looked = now
                for job, process in running:
                    job.peak_kib = max(job.peak_kib, *map(peak_kib, tree(process.pid)))
                if now - jobs[0].begin > LIMIT_S:
                    raise JobError(f"not done after {LIMIT_S:.0f} s")
            seen = [job.saw_first_step() for job in jobs]
            time.sleep(
                0.25 if all(seen) else 0.02
            )  # after the first step out of the way of what is measured
    finally:
        for _, process in running:
            end(process)
    for job, process in running:
        if process.returncode:
            lines = job.output.read_text(errors="replace").strip().splitlines()
            raise JobError("\n".join(lines[-5:]) or f"exit status {process.returncode}")


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs and all that it has started."""
    if process.poll() is not None:
        return
    pids = tree(process.pid)
    for number, wait_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + wait_s
        while pids and time.monotonic() < until:
            time.sleep(0.05)
            process.poll()
            running = processes()
            pids = [pid for pid in pids if pid in running]


def processes() -> dict[int, int]:
    """The parent of each process of this machine that has not ended; empty on a system without /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            state, parent = (
                stat.read_text().rpartition(")")[2].split()[:2]
            )  # after the name, which may hold anything
            if state not in "XZ":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def tree(root: int) -> list[int]:
    """``root`` and its descendants."""
    parents = processes()
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def peak_kib(pid: int) -> int:
    """The largest resident set that a process has had."""
    try:
        match = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


def composer3d_job(python: str, recipe: Path, sets: Sequence[str], folder: Path) -> Job:
    """``composer3d train`` as a user starts it, writing into ``folder``; nothing but the last step saves."""
    resolved = load(recipe, sets).recipe.run
    forced = [
        f"run.out_dir={folder}",
        "metrics.every=1",
        "metrics.tensorboard=false",
        "checkpoint.resume=none",
    ]
    forced += ["checkpoint.every=0", "checkpoint.every_minutes=0", "validation.every=0"]
    flags = [part for each in [*sets, *forced] for part in ("--set", each)]
    return Job(
        command=[python, "-m", "composer3d", "train", str(recipe), *flags],
        output=folder / "output",
        metrics=folder / resolved.name / "metrics.jsonl",
        gpu=resolved.device == "cuda",
    )


def plain_job(python: str, recipe: Path, sets: Sequence[str], folder: Path) -> Job:
    """The hand-written loop, ``plain.py``, on the model and the batches of a recipe."""
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
