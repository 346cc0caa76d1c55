"""Kills jobs with SIGKILL at random steps: one rank, the launcher, or every process; and starts them again.

Both launchers are tried: ``composer3d train``, and torchrun with ``--max-restarts 3``. After each kill no process of
the job may be left 10 s later, and none of our temporary folders. A rank's death must be told in one line that names
the rank, and torchrun must need one restart and no more. The job that goes on must have bitwise the losses of a job
that nobody killed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RECIPE = """\
[run]
name = "run"
steps = 40
device = "cpu"
[model]
preset = "debug-tiny"
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 2
ffn = 64
[mesh]
dp_shard = {world}
[data]
source = "text"
path = "{corpus}"
seq_len = 64
global_batch = 12
[checkpoint]
every = 5
keep = 2
[metrics]
every = 1
tensorboard = false
"""
STEPS, LIMIT_S, GONE_S = 40, 200.0, 10.0
MARK = "COMPOSER3D_KILL_JOBS"  # in the environment of every process of a job, by which it is found
Launcher = Literal["train", "torchrun"]
Victim = Literal["rank", "launcher", "all"]


@dataclass(frozen=True)
class Case:
    """One kill: of whom, in a job of how many ranks, when the step is logged, under which launcher."""

    launcher: Launcher
    victim: Victim
    world: int
    rank: int  # the rank that is killed, where it is one
    step: int

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.victim == "rank" else self.victim
        return f"{self.launcher}, {self.world} ranks: {who} at step {self.step}"


def cases(count: int, seed: int = 13) -> list[Case]:
    """As many cases as asked for, always the same: launchers and victims in turn, the rest at random."""
    generator = random.Random(seed)
    out = []
    for number in range(count):
        launcher: Launcher = ("train", "torchrun")[number % 2]  # type: ignore[assignment]
        victim: Victim = ("rank", "launcher", "all")[number // 2 % 3]  # type: ignore[assignment]
        world = generator.choice((2, 2, 3))
        out.append(
            Case(
                launcher,
                victim,
                world,
                generator.randrange(world),
                generator.randrange(1, STEPS - 10),
            )
        )
    return out


class Job:
    """A started job and its processes. ``folder`` holds its run, its temporary files and what it says."""

    def __init__(self, folder: Path, world: int, launcher: Launcher, *sets: str) -> None:
        self.folder, self.world, self.launcher = folder, world, launcher
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        self.output = folder / f"output-{self._mark}"
        changes = [part for each in (f"run.out_dir={folder}", *sets) for part in ("--set", each)]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [*self.command(), *changes],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """What is started, without overrides."""
        command = [
            "-m",
            "composer3d",
            "train",
            str(self.folder.parent / f"recipe-{self.world}.toml"),
        ]
        if self.launcher == "torchrun":
            torchrun = [
                "-m",
                "torch.distributed.run",
                "--max-restarts",
                "3",
                "--nproc-per-node",
                str(self.world),
            ]
            command = [
                *torchrun,
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
                *command,
            ]
        return [sys.executable, *command]

    def processes(self) -> list[int]:
        """All that run, the launcher and what it started; one that has ended and is not yet reaped does not count."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    continue
                if f"{MARK}={self._mark}".encode() in environment and not zombie:
                    found.append(int(entry.name))
        return found

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + LIMIT_S
        while not losses(self.folder) or max(losses(self.folder)) < step:
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended before step {step}: {self.said()}")
            if time.monotonic() > until:
                raise RuntimeError(f"no step {step} within {LIMIT_S:.0f} s: {self.said()}")
            time.sleep(0.02)

    def pid_of(self, rank: int) -> int:
        """The process of a rank, by the name that it gives itself."""
        for pid in self.processes():
            if pid != self.process.pid and rank_of(pid) == rank:
                return pid
        raise RuntimeError(f"no process of rank {rank}")

    def kill(self, victim: Victim, rank: int) -> None:
        if victim == "rank":
            pids = [self.pid_of(rank)]
        else:
            pids = [self.process.pid] if victim == "launcher" else self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):  # it ended with the one before
                os.kill(pid, signal.SIGKILL)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise RuntimeError(f"it has not ended after {limit_s:.0f} s: {self.said()}") from None

    def end(self) -> None:
        for pid in [self.process.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def left_over(self) -> list[str]:
        """Processes that still run after ``GONE_S``, and temporary folders of ours."""
        until = time.monotonic() + GONE_S
        while (pids := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        ours = [
            path.name
            for path in self.temporary.iterdir()
            if re.match("composer3d-|pymp-", path.name)
        ]
        return [f"process {pid}" for pid in pids] + [f"folder {name}" for name in ours]


def rank_of(pid: int) -> int | None:
    """The rank of a process, or None where it is the launcher or another helper."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    found = re.fullmatch(r"c3d rank (\d+)", name)
    return int(found[1]) if found else None


def losses(folder: Path) -> dict[int, float]:
    path = folder / "run" / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # half of a line that is being written
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


class Killer:
    """Runs cases in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        corpus = folder / "corpus.txt"
        corpus.write_bytes(bytes((i * i + i // 7) % 251 + 1 for i in range(40_000)))
        for world in (2, 3, 4):
            (folder / f"recipe-{world}.toml").write_text(RECIPE.format(corpus=corpus, world=world))
        self._alone: dict[int, dict[int, float]] = {}

    def alone(self, world: int) -> dict[int, float]:
        """The losses of a job that nobody kills."""
        if world not in self._alone:
            job = Job(self.folder / f"alone-{world}", world, "train")
            if status := job.wait():
                raise RuntimeError(f"the job that nobody kills ended with {status}: {job.said()}")
            self._alone[world] = losses(job.folder)
        return self._alone[world]

    def run(self, case: Case) -> list[str]:
        """Everything that is wrong; nothing where the case is as it should be."""
        wanted = self.alone(case.world)
        job = Job(self.folder / uuid.uuid4().hex, case.world, case.launcher)
        problems: list[str] = []
        try:
            job.wait_for_step(case.step)
            job.kill(case.victim, case.rank)
            status = job.wait()
            problems += [f"left after the kill: {each}" for each in job.left_over()]
            if case.victim == "rank":
                problems += told(case, job, status)
            if status != 0:
                job = Job(job.folder, case.world, case.launcher)
                if status := job.wait():
                    problems.append(f"started again, it ended with {status}: {job.said()}")
                problems += [f"left at the end: {each}" for each in job.left_over()]
            if losses(job.folder) != wanted:
                problems.append(f"its losses are {losses(job.folder)}, not {wanted}")
        except RuntimeError as error:
            problems.append(str(error))
        finally:
            job.end()
        shutil.rmtree(job.folder)
        return problems


def told(case: Case, job: Job, status: int) -> list[str]:
    """What is wrong with what a job says of its rank that was killed."""
    lines = [
        line
        for line in job.said().splitlines()
        if re.search(rf"rank {case.rank} \(.*(ended by|answer)", line)
    ]
    problems = []
    if len(lines) != 1 or ("the same command goes on from it" not in lines[0] and case.step > 6):
        problems.append(f"it names the rank in {len(lines)} lines: {lines or job.said()}")
    if case.launcher == "train":
        if status != 1:
            problems.append(f"it ended with {status}: {job.said()}")
        if "Traceback" in job.said():
            problems.append(f"it shows a traceback: {job.said()}")
    else:
        restarts = job.said().count("restarted by torchrun")
        if status != 0 or restarts != 1:
            problems.append(f"it ended with {status} after {restarts} restarts: {job.said()}")
    return problems


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("tools/kill_jobs", description=__doc__)
    parser.add_argument("--cases", type=int, default=40, help="kills (40)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    options = parser.parse_args(arguments)
    failed, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-jobs-") as folder:
        killer = Killer(Path(folder))
        for number, case in enumerate(cases(options.cases)):
            if number < options.first:
                continue
            since, problems = time.monotonic(), killer.run(case)
            failed += bool(problems)
            verdict = "bitwise" if not problems else "WRONG"
            print(
                f"{number:>3}  {case!s:<48} {verdict}  {time.monotonic() - since:.0f} s",
                *problems,
                sep="\n    ",
            )
            sys.stdout.flush()
    print(
        f"{options.cases - options.first} kills, {failed} wrong, in {time.monotonic() - begin:.0f} s"
    )
    return 1 if failed else 0
