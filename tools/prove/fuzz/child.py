"""Runs a case in a forked process, with limits and traps, and reports what happened.

A fork of a process that has imported torch starts in some milliseconds, and a case cannot change
what the next case sees.
"""

import contextlib
import importlib
import io
import json
import os
import random
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from composer3d.runtime.ends import describe_end
from tools.prove.hostile.case import (
    enter,
    marker_of,
    peak_mib,
    reset_peak_mib,
    run_main,
    secrets_in,
    watch,
)

WALL_S = 60.0  # many times the CPU time, for a busy machine
MOST_MIB = 500.0
_MOST_LINES = 110  # in one error: a recipe reports 100 problems at most
_MOST_CHARACTERS = 12_000  # in a line: a path or a key has 4,096 at most, and occurs twice
_HARD_LIMIT_BYTES = 6 << 30  # so that an endless allocation does not take the machine down
_WARM = (
    *(f"composer3d.commands.{name}" for name in ("check", "convert", "inspect", "prepare")),
    *("composer3d.commands.train", "composer3d.training.loop", "composer3d.training.build"),
    *("torch", "torch.distributed.checkpoint", "safetensors.torch", "torchdata"),
)
_CAUSES = ("Traceback (most", "panicked at", "Fatal Python error", "Segmentation fault")


class WrongError(Exception):
    """The program accepted a wrong value, refused a right one, or refused in a wrong way."""


class Case(NamedTuple):
    """One changed input.

    Attributes:
        change: what was changed, for people.
        act: runs the program on the input, and returns the name of the outcome. It raises
            WrongError if the outcome is wrong.
        cpu_s: CPU time that ``act`` may take.
    """

    change: str
    act: Callable[[], str]
    cpu_s: float = 5.0


# Makes a case in the working directory, which is empty. ``base`` has the sound files.
Maker = Callable[[Path, random.Random], Case]


@dataclass
class Verdict:
    """What became of a case.

    Attributes:
        change: what was changed.
        outcome: a few words, which are counted; empty if there are problems.
        problems: what went wrong.
        output: what the last commands printed.
        cpu_s, peak_mib: what the commands took.
    """

    change: str = ""
    outcome: str = ""
    problems: list[str] = field(default_factory=list)
    output: str = ""
    cpu_s: float = 0.0
    peak_mib: float = 0.0


class Ran(NamedTuple):
    """What a command did: its exit status, and the lines on standard output and error."""

    status: int
    output: str
    errors: list[str]


_printed: list[str] = []  # what the commands of this process printed


def command(*arguments: str, statuses: tuple[int, ...] = (0, 2)) -> Ran:
    """Run ``composer3d`` in this process.

    Raises:
        WrongError: the exit status is none of ``statuses``, or the lines of an error are not what
            a user can read: one printable line for each problem, and none without a problem.
    """
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = run_main(list(arguments))
    lines = errors.getvalue().splitlines()
    shown = output.getvalue()[-1500:] + errors.getvalue()[-1500:]
    _printed.append(f"$ composer3d {' '.join(map(repr, arguments))}   [{status}]\n{shown}")
    if status not in statuses:
        raise WrongError(f"{arguments[0]} exited with {status}, not with one of {statuses}")
    if status == 2 and not lines:
        raise WrongError(f"{arguments[0]} exited with 2 and no line")
    if len(lines) > _MOST_LINES:
        raise WrongError(f"{arguments[0]} printed {len(lines)} lines of errors")
    for line in lines:
        if not line.isprintable() or len(line) > _MOST_CHARACTERS:
            raise WrongError(f"{arguments[0]} printed a line that nobody can read: {line!r:.300}")
    return Ran(status, output.getvalue(), lines)


def warm_up() -> None:
    """Import in this process what the cases need: their processes have it from the beginning."""
    for name in _WARM:
        importlib.import_module(name)


def observe(maker: Maker, base: Path, folder: Path, seed: str) -> "Running":
    """Start a case in a process of its own, in ``folder``, which is made."""
    folder.mkdir()
    reading, writing = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            verdict = _serve(maker, base, folder, random.Random(seed))
            with open(writing, "w") as file:
                json.dump(vars(verdict), file)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return Running(child, reading, folder, begun)


class Running:
    """A case that runs in a process of its own."""

    def __init__(self, child: int, reading: int, folder: Path, begun: float) -> None:
        self._child = child
        self.pipe = reading
        self._folder = folder
        self._begun = begun
        self._answer = b""

    def poll(self) -> Verdict | None:
        """Return the verdict if the process has ended. A process that takes too long is killed."""
        while select.select([self.pipe], [], [], 0)[0]:
            piece = os.read(self.pipe, 1 << 16)
            if not piece:
                return self._finish("")
            self._answer += piece
        if time.monotonic() - self._begun > WALL_S:
            return self._finish(f"it hangs: no end after {WALL_S:.0f} s")
        return None

    def _finish(self, problem: str) -> Verdict:
        if problem:
            os.kill(self._child, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self._child, 0)
        verdict = Verdict()
        if problem:
            verdict.problems.append(problem)
        elif status != 0 or not self._answer:
            end = -os.waitstatus_to_exitcode(status)
            verdict.problems.append(f"its process {describe_end(end)}")
        else:
            verdict = Verdict(**json.loads(self._answer))
        marker = marker_of(self._folder)
        if marker.exists():
            marker.unlink()
            verdict.problems.append("it ran code of the input")
        return verdict


def _serve(maker: Maker, base: Path, folder: Path, draw: random.Random) -> Verdict:
    """Make and run the case in this process, which ends afterwards."""
    enter(folder)
    verdict = Verdict()
    try:
        case = maker(base, draw)
    except Exception:
        verdict.problems.append(f"the case cannot be made:\n{traceback.format_exc()}")
        return verdict
    verdict.change = case.change

    written = os.memfd_create("output")
    for number in (1, 2):  # libraries that are not Python print here
        os.dup2(written, number)
    before_mib = reset_peak_mib()
    touched: list[str] = []
    watch(folder, touched)
    # The signal of the CPU limit ends a loop in C, which no exception would.
    seconds = int(time.process_time() + case.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (_HARD_LIMIT_BYTES, _HARD_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    begin = time.process_time()
    try:
        verdict.outcome = case.act()
    except WrongError as error:
        verdict.problems.append(str(error))
    except BaseException:
        verdict.problems.append(f"it raised:\n{traceback.format_exc()}")
    verdict.cpu_s = time.process_time() - begin
    verdict.peak_mib = peak_mib() - before_mib
    verdict.output = "\n".join(_printed)

    if verdict.cpu_s > case.cpu_s:
        verdict.problems.append(f"it took {verdict.cpu_s:.1f} s of CPU time")
    if verdict.peak_mib > MOST_MIB:
        verdict.problems.append(f"it took {verdict.peak_mib:.0f} MiB")
    verdict.problems += [f"it touched {path}" for path in touched]
    os.lseek(written, 0, os.SEEK_SET)
    printed_below = os.read(written, 1 << 20).decode(errors="replace")
    for cause in _CAUSES:
        if cause in verdict.output or cause in printed_below:
            verdict.problems.append(f"it printed {cause!r}:\n{printed_below[-1500:]}")
    verdict.problems += secrets_in(verdict.output, folder)
    if verdict.problems:
        verdict.outcome = ""
    return verdict
