"""Kill jobs with SIGKILL at random steps, throw other troubles at them, and start them again.

A kill hits one rank, the launcher, or every process, under ``composer3d train`` and under torchrun
with ``--max-restarts 3``. No process of the job and none of our temporary folders may be left 10 s
later. The job must report the death of a rank in one line that names it, and the report of what
each rank did. torchrun must restart once and no more. The job that resumes must have bitwise the
losses of an uninterrupted job.

The other troubles are full disks, no memory, hangs, signals, odd environments and so on. The job
must end with the status that is documented, or go on; name the rank in time, if it is one; show no
traceback; and leave nothing. The job that is started again must also have bitwise these losses.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.prove.kills import jobs
from tools.prove.kills.jobs import Job, Killer, Launcher, Victim
from tools.prove.proof import add_number, make_parser

# How long a collective may wait in these jobs, and how much longer naming a rank may take.
TIMEOUT_MINUTES = 0.15
NAMED_S = 60 * TIMEOUT_MINUTES + 40.0


class SkippedError(Exception):
    """This machine cannot make the trouble."""


@dataclass(frozen=True)
class Trouble:
    """One trouble.

    Attributes:
        kind: a key of ``KILLS`` or ``KINDS``.
        world: the number of ranks.
        rank: the one that is hit, if it is one.
        step: the trouble comes when this step is logged, if the kind has no time of its own.
        choice: from 0 to 1, chooses among the forms of a kind.
        launcher: of the job.
    """

    kind: str
    world: int
    rank: int
    step: int
    choice: float = 0.0
    launcher: Launcher = "train"

    def __str__(self) -> str:
        place = f"{self.world} ranks: rank {self.rank}, step {self.step}"
        return f"{self.launcher}, {self.kind}, {place}"


class _Attempt:
    """A trouble that is being thrown, with what was found wrong so far."""

    def __init__(self, killer: Killer, trouble: Trouble) -> None:
        self.killer, self.trouble = killer, trouble
        self.folder = killer.folder / uuid.uuid4().hex
        self.run = self.folder / "run"
        self.run.mkdir(parents=True)
        self.problems: list[str] = []
        self.job: Job | None = None

    def start(self, *sets: str, around: tuple[str, ...] = ()) -> Job:
        trouble = self.trouble
        self.job = Job(self.folder, trouble.world, trouble.launcher, *sets, around=around)
        return self.job

    def expect(self, status: int | tuple[int, ...], *words: str, limit_s: float = 200.0) -> None:
        """Wait for the end of the job, and check its status, its output and what it has left."""
        assert self.job is not None
        found = self.job.wait(limit_s)
        output = self.job.output()
        if found not in (status if isinstance(status, tuple) else (status,)):
            self.problems.append(f"it ended with {found}, not {status}: {output}")
        self.problems += [f"it does not say {w!r}: {output}" for w in words if w not in output]
        if "Traceback" in output or "Logging error" in output:
            self.problems.append(f"it shows a traceback: {output}")
        self.problems += [f"left: {item}" for item in self.job.left_over()]

    def finish(self, *sets: str) -> None:
        """Start the job again, and compare its losses with those of an undisturbed one."""
        self.start(*sets)
        self.expect(0)
        self.compare(self.job.losses())

    def compare(self, found: dict[int, float]) -> None:
        expected = self.killer.uninterrupted_losses(self.trouble.world)
        self.problems += jobs.differences(found, expected)

    @property
    def named(self) -> str:
        return f"rank {self.trouble.rank} ("


def throw(killer: Killer, trouble: Trouble) -> list[str]:
    """Throw a trouble, and return all problems. Raises SkippedError."""
    attempt = _Attempt(killer, trouble)
    try:
        (KILLS | KINDS)[trouble.kind](attempt)
    except RuntimeError as error:
        attempt.problems.append(str(error))
    finally:
        if attempt.job is not None:
            attempt.job.end()
        shutil.rmtree(attempt.folder, ignore_errors=True)
    return attempt.problems


def _kill(attempt: _Attempt, victim: Victim) -> None:
    trouble = attempt.trouble
    job = attempt.start()
    job.wait_for_step(trouble.step)
    job.kill(victim, trouble.rank)
    status = job.wait()
    attempt.problems += [f"left after the kill: {item}" for item in job.left_over()]
    if victim == "rank":
        attempt.problems += check_report(trouble, job, status)
    if status == 0:
        attempt.compare(job.losses())
    else:
        attempt.finish()


def check_report(trouble: Trouble, job: Job, status: int) -> list[str]:
    """List what is wrong with a job's report of its killed rank, and with its exit status."""
    output = job.output()
    lines = [
        line
        for line in output.splitlines()
        if re.search(rf"rank {trouble.rank} \(.*(ended by|answer)", line)
    ]
    problems = []
    # The first checkpoint comes after step 5.
    must_name_checkpoint = trouble.step > 6
    if (
        len(lines) != 1
        or "what each rank did is in " not in lines[0]
        or (must_name_checkpoint and "the same command goes on from it" not in lines[0])
    ):
        problems.append(f"it names the rank in {len(lines)} lines: {lines or output}")
    if trouble.launcher == "train":
        if status != 1:
            problems.append(f"it ended with {status}: {output}")
        if "Traceback" in output:
            problems.append(f"it shows a traceback: {output}")
    else:
        restarts = output.count("restarted by torchrun")
        if status != 0 or restarts != 1:
            problems.append(f"it ended with {status} after {restarts} restarts: {output}")
    return problems


@contextmanager
def _small_disk(path: Path) -> Iterator[Path]:
    """Put a file system of 4 MiB at ``path``, and yield a file on it that can fill it."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    has_mount = shutil.which("mount") is not None
    if not has_mount or subprocess.run(command, capture_output=True, check=False).returncode:
        raise SkippedError("a file system can only be mounted by root")
    try:
        yield path / "ballast"
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _full_disk_at_a_save(attempt: _Attempt) -> None:
    mode = f"checkpoint.async_save={'true' if attempt.trouble.choice < 0.5 else 'false'}"
    with _small_disk(attempt.run) as ballast:
        job = attempt.start(mode)
        job.wait_for_step(max(7, attempt.trouble.step))
        # On a busy machine, the save after step 5 may still be running in the background.
        saved = attempt.run / "checkpoints"
        job.wait_until(
            lambda: any(not path.name.endswith(".tmp") for path in saved.glob("step-*")),
            "a checkpoint",
        )
        _fill(ballast)
        attempt.expect(1, "could not be saved: ", "bytes are free in ", "the newest checkpoint is")
        ballast.unlink()
        names = sorted(path.name for path in (attempt.run / "checkpoints").iterdir())
        if not names or any(name.endswith(".tmp") for name in names):
            attempt.problems.append(f"the folder of checkpoints has {names}")
        rows = (attempt.run / "events.jsonl").read_text().splitlines()
        last = json.loads(rows[-1])
        if last["kind"] != "stop" or "No space left on device" not in last["text"]:
            attempt.problems.append(f"the last event is {last}")
        attempt.finish(mode)


def _full_disk_for_a_moment(attempt: _Attempt) -> None:
    with _small_disk(attempt.run) as ballast:
        job = attempt.start("checkpoint.every=0", "metrics.tensorboard=true")
        job.wait_for_step(attempt.trouble.step)
        _fill(ballast)
        full = "metrics.jsonl cannot be written: No space left on device"
        job.wait_until(lambda: full in job.output(), "warning")
        ballast.unlink()
        attempt.expect(0, "metrics.jsonl can be written again; lines lost before this: ")
        found = job.losses()
        if max(found) < jobs.STEPS or len(found) == jobs.STEPS:
            attempt.problems.append(f"the logged steps are {sorted(found)}")
        expected = attempt.killer.uninterrupted_losses(attempt.trouble.world)
        attempt.compare(expected | found)


def _ctrl_c(attempt: _Attempt) -> None:
    job = attempt.start("run.steps=100000", "optim.schedule=constant")
    time.sleep(0.5 + 8 * attempt.trouble.choice)
    generator = random.Random(attempt.trouble.choice)
    gap_s = generator.choice((0.0005, 0.005, 0.05))
    for _ in range(60):
        with suppress(ProcessLookupError):
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(gap_s)
    attempt.expect(130)
    shutil.rmtree(attempt.run)
    attempt.finish()


# At SIGUSR2 a process takes what its C library has kept of freed memory, but for small pieces. A
# limit alone would not be felt: the next steps need what earlier ones have freed, and no more.
_TAKES_ALL_MEMORY = """
import ctypes, signal
take = ctypes.CDLL(None).malloc
take.restype = ctypes.c_void_p
def take_all(*_):
    size = 2**30
    while size >= 2**16:
        if not take(ctypes.c_size_t(size)):
            size //= 2
signal.signal(signal.SIGUSR2, take_all)
"""


def _memory(attempt: _Attempt) -> None:
    site = attempt.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_TAKES_ALL_MEMORY)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    job = attempt.start("reliability.restarts=1", around=("env", f"PYTHONPATH={path}"))
    job.wait_for_step(max(7, attempt.trouble.step))
    pid = job.pid_of(attempt.trouble.rank)
    resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))
    os.kill(pid, signal.SIGUSR2)
    # A checkpoint was saved, so the ranks are started again, unless a save lacks the memory.
    attempt.expect((0, 1), f"rank {attempt.trouble.rank}", "there is not enough memory")
    attempt.finish()


def _hang(attempt: _Attempt) -> None:
    job = attempt.start(f"run.timeout_minutes={TIMEOUT_MINUTES}", "run.steps=100000")
    job.wait_for_step(attempt.trouble.step)
    os.kill(job.pid_of(attempt.trouble.rank), signal.SIGSTOP)
    attempt.expect(1, attempt.named, limit_s=NAMED_S)
    shutil.rmtree(attempt.run)
    attempt.finish()


def _hang_before_the_first_exchange(attempt: _Attempt) -> None:
    job = attempt.start(f"run.timeout_minutes={TIMEOUT_MINUTES}")
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(RuntimeError):
            os.kill(job.pid_of(attempt.trouble.rank), signal.SIGSTOP)
            break
        time.sleep(0.005)
    attempt.expect(1, attempt.named, limit_s=NAMED_S)
    attempt.finish()


# The variable that the error must name, and all that are set.
_ODD = (
    ("RANK", {"RANK": "x", "WORLD_SIZE": "2"}),
    ("RANK", {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}),
    ("MASTER_PORT", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "many"}),
    ("RANK", {"RANK": "0"}),
    ("OMP_NUM_THREADS", {"OMP_NUM_THREADS": "many"}),
)


def _odd_environment(attempt: _Attempt) -> None:
    named, variables = _ODD[int(attempt.trouble.choice * len(_ODD))]
    words = [f"{name}={value}" for name, value in variables.items()]
    attempt.start(around=("env", *words))
    attempt.expect(2, named, limit_s=40.0)
    attempt.finish()


def _renamed_folder(attempt: _Attempt) -> None:
    job = attempt.start("reliability.restarts=2", "run.steps=100000", f"optim.decay={jobs.STEPS}")
    job.wait_for_step(attempt.trouble.step)
    moved = attempt.folder / "moved"
    attempt.run.rename(moved)
    with suppress(RuntimeError):
        job.kill("rank", attempt.trouble.rank)
    attempt.expect(1, "the ranks are not started again")
    # What the ranks wrote after the folder was renamed may lie at its old place.
    shutil.rmtree(attempt.run, ignore_errors=True)
    shutil.rmtree(moved)
    attempt.finish()


def _closed_stderr(attempt: _Attempt) -> None:
    close = ("bash", "-c", 'exec "$@" 2>&-', "bash")
    job = attempt.start("reliability.restarts=1", around=close)
    job.wait_for_step(attempt.trouble.step)
    job.kill("rank", attempt.trouble.rank)
    attempt.expect(0)
    attempt.compare(job.losses())


def _hang_up(attempt: _Attempt) -> None:
    job = attempt.start()
    job.wait_for_step(attempt.trouble.step)
    os.kill(job.process.pid, signal.SIGHUP)
    attempt.expect(128 + signal.SIGHUP, "stopped by signal 1 after step ")
    attempt.finish()


def _stop_in_the_last_validation(attempt: _Attempt) -> None:
    sets = (
        "validation.every=1000",
        "validation.steps=60",
        f"validation.path={attempt.killer.folder}/corpus.txt",
    )
    job = attempt.start(*sets)
    last = attempt.run / "checkpoints" / f"step-{jobs.STEPS:08d}" / "manifest.json"
    until = time.monotonic() + jobs.LIMIT_S
    while not last.exists() and job.process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(job.process.pid, signal.SIGTERM)
    attempt.expect((128 + signal.SIGTERM, 0))
    attempt.start(*sets)
    attempt.expect(0)
    if "validation_loss" not in (attempt.run / "metrics.jsonl").read_text():
        attempt.problems.append("the last validation is lost")


_VICTIMS: tuple[Victim, ...] = ("rank", "launcher", "all")
KILLS: dict[str, Callable[[_Attempt], None]] = {
    f"kill of {victim}": partial(_kill, victim=victim) for victim in _VICTIMS
}
KINDS: dict[str, Callable[[_Attempt], None]] = {
    "full disk at a save": _full_disk_at_a_save,
    "full disk for a moment": _full_disk_for_a_moment,
    "60 Ctrl-C": _ctrl_c,
    "no memory": _memory,
    "hang": _hang,
    "hang before the first exchange": _hang_before_the_first_exchange,
    "odd environment": _odd_environment,
    "renamed folder": _renamed_folder,
    "closed standard error": _closed_stderr,
    "SIGHUP": _hang_up,
    "stop in the last validation": _stop_in_the_last_validation,
}


def kills(count: int, seed: int = 13) -> list[Trouble]:
    """Make kills of all victims in turn, and the rest at random; a seed gives the same ones."""
    generator = random.Random(seed)
    launchers: tuple[Launcher, ...] = ("train", "torchrun")
    out = []
    for number in range(count):
        kind = list(KILLS)[number // 2 % 3]
        world = generator.choice((2, 2, 3))
        rank, step = generator.randrange(world), generator.randrange(1, jobs.STEPS - 10)
        out.append(Trouble(kind, world, rank, step, launcher=launchers[number % 2]))
    return out


def troubles(count: int, seed: int = 31) -> list[Trouble]:
    """Make troubles of all kinds in turn, and the rest at random; a seed gives the same ones."""
    generator = random.Random(seed)
    kinds = list(KINDS)
    out = []
    for number in range(count):
        world = generator.choice((2, 2, 3))
        rank, step = generator.randrange(world), generator.randrange(1, jobs.STEPS - 15)
        out.append(Trouble(kinds[number % len(kinds)], world, rank, step, generator.random()))
    return out


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("jobs", __doc__)
    add_number(parser, "--cases", 40, "the number of kills")
    add_number(parser, "--troubles", 66, "the number of others")
    add_number(parser, "--seed", 31, "of the others")
    add_number(parser, "--first", 0, "begin with this case")
    parser.add_argument(
        "--skip", action="store_true", help="a trouble that this machine cannot make is no failure"
    )
    options = parser.parse_args(arguments)
    thrown = [*kills(options.cases), *troubles(options.troubles, options.seed)]
    if options.first >= len(thrown):
        parser.error(f"there is nothing to throw: case {options.first} of {len(thrown)}")
    verdicts, begin = Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-jobs-") as folder:
        killer = Killer(Path(folder))
        for number, trouble in enumerate(thrown):
            if number < options.first:
                continue
            trouble_begin = time.monotonic()
            try:
                problems = throw(killer, trouble)
                verdict = "bitwise" if not problems else "WRONG"
            except SkippedError as error:
                problems, verdict = [str(error)], "skipped"
            verdicts[verdict] += 1
            seconds = time.monotonic() - trouble_begin
            line = f"{number:>3}  {trouble!s:<64} {verdict}  {seconds:.0f} s"
            print(line, *problems, sep="\n    ", flush=True)
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(f"{verdicts.total()} kills and troubles: {words}, in {time.monotonic() - begin:.0f} s")
    unproven = 0 if options.skip else verdicts["skipped"]
    return 1 if verdicts["WRONG"] or unproven else 0
