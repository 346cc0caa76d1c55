"""Jobs of a small training, which the proofs kill and disturb."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from tools.prove.proof import corpus_of, logged_losses, overrides

# A small model and few micro-batches: all steps of a job take no longer than its start.
RECIPE = """\
[run]
name = "run"
steps = 40
device = "cpu"
[model]
preset = "debug-tiny"
dim = 32
n_layers = 1
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
micro_batch = 2
[checkpoint]
every = 5
keep = 2
[metrics]
every = 1
tensorboard = false
"""
STEPS = 40
LIMIT_S = 200.0  # of a job
GONE_S = 10.0  # from a kill until all processes must be gone
# In the environment of every process of a job, to find them.
MARK = "COMPOSER3D_KILL_JOBS"
Launcher = Literal["train", "torchrun"]
Victim = Literal["rank", "launcher", "all"]


def command_of(launcher: Launcher, recipe: Path, world: int, restarts: int = 3) -> list[str]:
    """The command that starts a job, without overrides. torchrun restarts it ``restarts`` times."""
    train = ["-m", "composer3d", "train", str(recipe)]
    if launcher == "train":
        return [sys.executable, *train]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--max-restarts", str(restarts), "--nproc-per-node", str(world)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *train,
    ]


class Job:
    """A started job and its processes. ``folder`` holds its run, temporary files and output.

    Args:
        folder: of the job. The recipes are beside it.
        world: the number of ranks.
        launcher: what starts them.
        sets: overrides of the recipe.
        command: another command than that of ``command_of``.
        around: a command that runs the one that follows it.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        launcher: Launcher,
        *sets: str,
        command: Sequence[str] = (),
        around: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
        }
        self.output_path = folder / f"output-{self._mark}"
        command = command or command_of(launcher, folder.parent / f"recipe-{world}.toml", world)
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*around, *command, *overrides(f"run.out_dir={folder}", *sets)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """The job's running processes: the launcher and all that it started, without zombies."""
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={self._mark}".encode() in environment and state != "Z":
                pids.append(int(entry.name))
        return pids

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, which ``what`` names.

        Raises:
            RuntimeError: the job ends before, or takes longer than ``LIMIT_S``.
        """
        until = time.monotonic() + LIMIT_S
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended before {what}: {self.output()}")
            if time.monotonic() > until:
                raise RuntimeError(f"no {what} within {LIMIT_S:.0f} s: {self.output()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged. Raises as ``wait_until``."""
        # The lines may be dropped between two looks, when the job starts again.
        self.wait_until(lambda: max(self.losses(), default=0) >= step, f"step {step}")

    def losses(self) -> dict[int, float]:
        """The losses that the run has logged so far, by step."""
        return logged_losses(self.folder / "run")

    def pid_of(self, rank: int) -> int:
        """The process of a rank, found by the name that it gives itself."""
        for pid in self.processes():
            if pid != self.process.pid and rank_of(pid) == rank:
                return pid
        raise RuntimeError(f"no process of rank {rank}")

    def kill(self, victim: Victim, rank: int) -> None:
        """Kill a rank, the launcher or all processes."""
        if victim == "rank":
            pids = [self.pid_of(rank)]
        elif victim == "launcher":
            pids = [self.process.pid]
        else:
            pids = self.processes()
        for pid in pids:
            # A process may end with the one before.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the launcher, and return its exit status.

        Raises:
            RuntimeError: it does not end in time; all its processes are killed then.
        """
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise RuntimeError(f"it has not ended after {limit_s:.0f} s: {self.output()}") from None

    def wait_while_it_trains(self) -> int:
        """Wait for the end of the launcher, however long, and return its exit status.

        Raises:
            RuntimeError: no further step is logged for ``LIMIT_S``; all its processes are killed
                then.
        """
        newest, until = -1, 0.0
        while (status := self.process.poll()) is None:
            logged = max(self.losses(), default=0)
            if logged != newest:
                newest, until = logged, time.monotonic() + LIMIT_S
            if time.monotonic() > until:
                self.end()
                raise RuntimeError(
                    f"no step after {newest} within {LIMIT_S:.0f} s: {self.output()}"
                )
            time.sleep(0.2)
        return status

    def end(self) -> None:
        """Kill all processes."""
        for pid in [self.process.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        """What the job has printed so far."""
        return self.output_path.read_text(errors="replace")

    def left_over(self) -> list[str]:
        """The processes that still run after ``GONE_S``, and our temporary folders."""
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
    """The rank of a process, or None if it is the launcher or a helper."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
    match = re.fullmatch(r"c3d rank (\d+)", name)
    return int(match[1]) if match else None


def write_inputs(folder: Path) -> None:
    """Write the corpus and the recipes of the jobs whose folders are made in ``folder``."""
    corpus = folder / "corpus.txt"
    corpus.write_bytes(corpus_of(40_000))
    for world in (2, 3):
        (folder / f"recipe-{world}.toml").write_text(RECIPE.format(corpus=corpus, world=world))


def differences(found: dict[int, float], expected: dict[int, float]) -> list[str]:
    """The problem that losses are not bitwise those of an undisturbed job, or none."""
    if not expected:
        return ["the undisturbed job has logged no loss, so nothing was compared"]
    wrong = [step for step in sorted(found | expected) if found.get(step) != expected.get(step)]
    if not wrong:
        return []
    return [f"{len(wrong)} of {len(expected)} losses differ, from step {wrong[0]} on"]


class Killer:
    """A folder for jobs, and the losses of those that are not disturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_inputs(folder)
        self._uninterrupted: dict[int, dict[int, float]] = {}

    def uninterrupted_losses(self, world: int) -> dict[int, float]:
        """The losses of a job of ``world`` ranks that is not killed, by step."""
        if world not in self._uninterrupted:
            job = Job(self.folder / f"uninterrupted-{world}", world, "train")
            status = job.wait()
            if status != 0:
                raise RuntimeError(f"the uninterrupted job ended with {status}: {job.output()}")
            self._uninterrupted[world] = job.losses()
        return self._uninterrupted[world]
