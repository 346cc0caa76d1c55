"""Kill one training again and again, at random instants, until it has survived all kills.

A kill is a SIGKILL of one process of the job, its launcher, or all of its processes, also while
they start, save or load. After the loss of a rank, the job comes back by itself: under
``composer3d train`` with ``reliability.restarts``, and under torchrun with ``--max-restarts``. If
the launcher is gone, the same command is started again, as a scheduler would. The training must end
with bitwise the losses of one that was never killed, each step once. No kill may cost more steps
than lie between two checkpoints.

A training that ends before it has survived all kills, or whose resumes are not seen, proves nothing
and fails. It may take as long as it needs, while steps are logged.

With ``--goodput``, ranks are killed at a fixed rate instead, and the share of time that trains is
compared with what the planner predicts from the times of an undisturbed training.
"""

import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tools.prove.kills import goodput
from tools.prove.kills.jobs import Job, Launcher, command_of, differences, write_inputs
from tools.prove.proof import add_number, logged_losses, logged_rows, make_parser

WORLD = 2
EVERY = 20  # steps between checkpoints
_RESTARTS = 1_000_000
# Steps of more layers and micro-batches than in the jobs: the training must outlast all kills.
_LONG_STEPS = ("model.n_layers=2", "data.micro_batch=1")
_LONGEST_LIFE_S = 8.0  # from a kill to the next one; a start takes about half of it
_RESUMED = re.compile(r"(\d+) of \d+ steps are done|starting from the beginning")

Victim = Literal["process", "launcher", "all"]


class Kill(NamedTuple):
    """One kill.

    Attributes:
        victim: one process besides the launcher, the launcher, or all processes.
        after_s: seconds after the kill before.
        choice: from 0 to 1, chooses the process.
        launcher: starts the job again if this kill has ended it.
    """

    victim: Victim
    after_s: float
    choice: float
    launcher: Launcher


def kills(count: int, seed: int = 29) -> list[Kill]:
    """Make random kills; a seed always gives the same ones. Most of them hit one process."""
    generator = random.Random(seed)
    victims: tuple[Victim, ...] = ("process", "process", "process", "launcher", "all")
    launchers: tuple[Launcher, ...] = ("train", "torchrun")
    return [
        Kill(
            generator.choice(victims),
            generator.uniform(0.0, _LONGEST_LIFE_S),
            generator.random(),
            generator.choice(launchers),
        )
        for _ in range(count)
    ]


@dataclass
class Storm:
    """A training and what happened to it.

    Attributes:
        folder: of the training.
        sets: overrides of its recipe.
        problems: what was wrong.
        hits: the number of kills by victim.
        lost_steps: for each kill after which the training was resumed, how many steps were done
            again.
        commands: how often the command was started.
    """

    folder: Path
    sets: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    hits: Counter[str] = field(default_factory=Counter)
    lost_steps: list[int] = field(default_factory=list)
    commands: int = 0
    # The newest step that was logged at the last kill, and the resumes that the job has printed.
    _logged: int = 0
    _resumes_seen: int = 0

    def run(self, planned: Sequence[Kill]) -> None:
        """Kill the training ``len(planned)`` times, and let it end."""
        job = self._start("train")
        try:
            for kill in planned:
                self._live(job, kill.after_s)
                if job.process.poll() not in (None, 0):
                    # The kill before has ended it.
                    job = self._start(kill.launcher)
                    self._live(job, kill.after_s)
                if job.process.poll() == 0:
                    self.problems.append(f"the training ended before {kill}: it needs more --steps")
                    return
                self._note_resumes(job)
                self._logged = max(logged_losses(self.folder / "run"), default=0)
                if self._kill(job, kill):
                    job.wait()
                    self.problems += [f"left after {kill}: {item}" for item in job.left_over()]
                    job = self._start(kill.launcher)
            self._end(job)
        finally:
            job.end()

    def _start(self, launcher: Launcher) -> Job:
        """Start the job, which comes back by itself after the loss of a rank, however often."""
        self.commands += 1
        self._resumes_seen = 0
        recipe = self.folder.parent / f"recipe-{WORLD}.toml"
        command = command_of(launcher, recipe, WORLD, _RESTARTS)
        by_train = (f"reliability.restarts={_RESTARTS}",) if launcher == "train" else ()
        return Job(self.folder, WORLD, launcher, *self.sets, *by_train, command=command)

    def _live(self, job: Job, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and job.process.poll() is None:
            time.sleep(0.01)

    def _kill(self, job: Job, kill: Kill) -> bool:
        """Kill, and return whether the launcher was killed."""
        self.hits[kill.victim] += 1
        others = sorted(set(job.processes()) - {job.process.pid})
        if kill.victim == "process" and others:
            with suppress(ProcessLookupError):
                os.kill(others[int(kill.choice * len(others))], signal.SIGKILL)
            return False
        job.kill("all" if kill.victim == "all" else "launcher", 0)
        return True

    def _note_resumes(self, job: Job) -> None:
        """Count the steps that were lost by the kill before, if the training was resumed since."""
        found = _RESUMED.findall(job.output())
        if len(found) > self._resumes_seen:
            self.lost_steps.append(self._logged - int(found[-1] or 0))
        self._resumes_seen = len(found)

    def _end(self, job: Job) -> None:
        newest = -1
        while (status := job.wait_while_it_trains()) != 0:
            logged = max(job.losses(), default=0)
            if logged <= newest:
                self.problems.append(f"it does not go on: {status}: {job.output()[-2000:]}")
                return
            newest = logged
            job = self._start("train")
        self._note_resumes(job)
        self.problems += [f"left at the end: {item}" for item in job.left_over()]


def check(storm: Storm, expected: dict[int, float]) -> list[str]:
    """Return all problems of a training that has ended."""
    problems = list(storm.problems)
    rows = [row for row in logged_rows(storm.folder / "run") if "loss" in row]
    found = {row["step"]: row["loss"] for row in rows}
    problems += differences(found, expected)
    steps = [row["step"] for row in rows]
    if steps != sorted(set(steps)):
        problems.append("a step is logged twice, or steps are out of order")
    if storm.hits and not storm.lost_steps:
        problems.append("no resume was seen after a kill, so its lost steps were not counted")
    most = max(storm.lost_steps, default=0)
    # The step that was running when the kill came is not logged yet.
    if most > EVERY:
        problems.append(f"a kill cost {most} steps, but a checkpoint was due every {EVERY}")
    return problems


def prove(folder: Path, count: int, steps: int) -> tuple[Storm, list[str]]:
    """Run the training with and without kills, in ``folder``. Return it and all problems.

    Raises:
        RuntimeError: the training without kills has failed.
    """
    write_inputs(folder)
    schedule = (f"run.steps={steps}", f"checkpoint.every={EVERY}", "checkpoint.every_minutes=0")
    sets = (*_LONG_STEPS, *schedule)
    calm = Job(folder / "calm", WORLD, "train", *sets)
    if calm.wait_while_it_trains() != 0:
        raise RuntimeError(f"the training without kills failed: {calm.output()}")
    storm = Storm(folder / "storm", sets)
    storm.run(kills(count))
    return storm, check(storm, calm.losses())


def main(arguments: Sequence[str]) -> int:
    parser = make_parser("storm", __doc__)
    add_number(parser, "--kills", 100, "the number of kills", least=1)
    add_number(parser, "--steps", 5000, "of the training", least=1)
    parser.add_argument("--goodput", action="store_true", help="about 9 minutes, without the rest")
    options = parser.parse_args(arguments)
    if options.goodput:
        with tempfile.TemporaryDirectory(prefix="kill-storm-") as folder:
            result = goodput.measure(Path(folder))
        print(*goodput.summary(result), sep="\n")
        return 0 if abs(result.points) <= goodput.MOST_POINTS else 1
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-storm-") as folder:
        storm, problems = prove(Path(folder), options.kills, options.steps)
    hits = ", ".join(f"{number} of {victim}" for victim, number in sorted(storm.hits.items()))
    print(
        f"{sum(storm.hits.values())} kills ({hits}); the command was started {storm.commands} "
        f"times; a kill cost at most {max(storm.lost_steps, default=0)} steps, with a checkpoint "
        f"every {EVERY}; {options.steps} steps, {time.monotonic() - begin:.0f} s"
    )
    print(*(problems or ["all losses are bitwise those of the training without kills"]), sep="\n")
    return 1 if problems else 0
