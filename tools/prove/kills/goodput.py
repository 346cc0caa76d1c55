"""Compare the share of time that trains with the planner's prediction, while ranks are killed.

A training runs undisturbed. That says how long a step takes, and a save. Then a few ranks are
killed, far apart, which says how long it takes to start the ranks again, and until they train.
``planner.goodput`` predicts from these times what share of the time a training keeps of which a
rank is killed at a fixed rate. Such a training follows. Both are done several times in turn,
because a machine has slower and faster minutes. Most of a step is a sleep (``paced``).

Kills come as failures do, at random, but without the chance of a small sample: the times between
them are evenly spaced quantiles of an exponential distribution, in a random order.
"""

import os
import random
import signal
import time
from collections.abc import Collection, Sequence
from math import log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from composer3d.checkpoint.steps import published
from composer3d.facts import events
from composer3d.facts.events import Event
from composer3d.planner.goodput import Costs, Goodput, goodput
from tools.prove.kills.jobs import LIMIT_S, Job, rank_of, write_inputs
from tools.prove.proof import logged_rows

WORLD = 2
EVERY = 20  # steps between checkpoints
ROUNDS = 3
KILLS = 12 * ROUNDS
MTTF_S = 8.0
# The proof fails if prediction and measurement differ by more.
MOST_POINTS = 3.0

_WARM_SAVES, _CALM_SAVES = 2, 6  # the first ones are not timed
_DRILLS = 2
_SELDOM_S = 0.5
_SETS = (
    "run.steps=1000000",
    "model.architecture=tools.prove.kills.paced:ARCHITECTURE",
    "data.global_batch=2",
    "data.micro_batch=1",
    f"checkpoint.every={EVERY}",
    "checkpoint.every_minutes=0",
    "reliability.restarts=1000000",
)


class Result(NamedTuple):
    """What was predicted and measured.

    Attributes:
        costs: the measured times of undisturbed trainings, on average.
        step_s: seconds of a step in each of them.
        predicted: where the time goes.
        measured: the share of time in which steps were done that are left at the end.
        kills: the number of kills.
        seconds: the time of the storm.
    """

    costs: Costs
    step_s: list[float]
    predicted: Goodput
    measured: float
    kills: int
    seconds: float

    @property
    def points(self) -> float:
        """How much more was measured than predicted, in percent of the time."""
        return 100 * (self.measured - self.predicted.trains)


def gaps(count: int, mean_s: float, seed: int = 31) -> list[float]:
    """Return the seconds from each start of the ranks to the next kill; a seed gives the same."""
    found = [-mean_s * log(1 - (index + 0.5) / count) for index in range(count)]
    random.Random(seed).shuffle(found)
    return found


def summary(result: Result) -> list[str]:
    """Return the lines of the text, the last of which says whether the proof holds."""
    costs, predicted = result.costs, result.predicted
    steps = ", ".join(f"{1000 * step_s:.1f}" for step_s in result.step_s)
    verdict = "within" if abs(result.points) <= MOST_POINTS else "NOT within"
    return [
        f"undisturbed: a step took {steps} ms in turn, a save {1000 * costs.stop_s:.0f} ms; "
        f"ranks start {costs.notice_s:.2f} s after a kill, and train "
        f"{costs.restart_s:.2f} s later",
        f"predicted: {predicted.trains:.1%} trains, {predicted.saves:.1%} saves, "
        f"{predicted.notices:.1%} notices, {predicted.restarts:.1%} restarts, "
        f"{predicted.redoes:.1%} redoes",
        f"measured: {result.measured:.1%} trains, with {result.kills} kills of a rank in "
        f"{result.seconds:.0f} s, {costs.mttf_s:.1f} s after its start on average, and a "
        f"checkpoint every {EVERY} steps",
        f"difference: {result.points:+.1f} points, {verdict} {MOST_POINTS:g}",
    ]


def measure(folder: Path) -> Result:
    """Run the trainings in ``folder``.

    Raises:
        RuntimeError: a training has ended, or does not go on.
    """
    write_inputs(folder)
    planned = gaps(KILLS, MTTF_S)
    calm = [_undisturbed(folder / "calm-0")]
    storms = []
    for number in range(ROUNDS):
        storms.append(_storm(folder / f"storm-{number}", planned[number::ROUNDS]))
        calm.append(_undisturbed(folder / f"calm-{number + 1}"))
    times = _Times(*map(fmean, zip(*calm, strict=True)))
    costs = Costs(
        mttf_s=fmean(life_s for storm in storms for life_s in storm.lives_s),
        step_s=times.step_s,
        stop_s=times.stop_s,
        notice_s=times.notice_s,
        restart_s=times.restart_s,
    )
    return Result(
        costs=costs,
        step_s=[each.step_s for each in calm],
        predicted=goodput(costs, EVERY),
        measured=sum(storm.kept_s for storm in storms) / sum(storm.all_s for storm in storms),
        kills=len(planned),
        seconds=sum(storm.all_s for storm in storms),
    )


def _start(folder: Path) -> Job:
    return Job(folder, WORLD, "train", *_SETS)


class _Times(NamedTuple):
    """Seconds of a step, of a save, and from a kill until ranks start, and from then to steps."""

    step_s: float
    stop_s: float
    notice_s: float
    restart_s: float


def _undisturbed(folder: Path) -> _Times:
    """Time a training, and then a few kills of a rank, each after a while."""
    job = _start(folder)
    try:
        first, *saves = _wait_for_saves(job, _WARM_SAVES + _CALM_SAVES)[_WARM_SAVES - 1 :]
        stop_s = fmean(save.seconds or 0.0 for save in saves)
        step_s = ((saves[-1].unix_s - first.unix_s) / len(saves) - stop_s) / EVERY
        drills = [_drill(job, step_s) for _ in range(_DRILLS)]
    finally:
        job.end()
    notice_s, restart_s = (fmean(times) for times in zip(*drills, strict=True))
    return _Times(step_s, stop_s, notice_s, restart_s)


def _drill(job: Job, step_s: float) -> tuple[float, float]:
    """Kill a rank; return the seconds until ranks are started again, and until they train.

    The training itself tells when it saved first, and how long each step before took. All but the
    time of usual steps is the restart's.
    """
    count = len(_events(job, "save"))
    old, killed_s = _kill(job, 0)
    started_s = _wait_for_ranks(job, old)
    # At least one save comes after the start; the kill may have come just after another one.
    _wait_for_saves(job, count + 2)
    start = _events(job, "start")[-1]
    save = next(save for save in _events(job, "save") if save.unix_s > start.unix_s)
    steps_s = _steps_s(job)
    others = (steps_s[step] for step in range(start.step + 2, save.step + 1))
    first_ended_s = save.unix_s - (save.seconds or 0.0) - sum(others)
    return started_s - killed_s, first_ended_s - step_s - started_s


class _Storm(NamedTuple):
    """Seconds of the steps that are left, of each life of the ranks, and of all."""

    kept_s: float
    lives_s: list[float]
    all_s: float


def _storm(folder: Path, planned: Sequence[float]) -> _Storm:
    """Kill a rank after each of these times, and start the ranks once more.

    Each step tells how long it took. That of the first one after a start is the restart's, too.
    """
    job = _start(folder)
    lives_s = []
    try:
        begin_s = started_s = _wait_for_ranks(job, ())
        for number, gap_s in enumerate(planned):
            time.sleep(gap_s)
            old, killed_s = _kill(job, number % WORLD)
            lives_s.append(killed_s - started_s)
            started_s = _wait_for_ranks(job, old)
        newest = int(published(folder / "run" / "checkpoints")[-1].name.removeprefix("step-"))
        firsts = {start.step + 1 for start in _events(job, "start")}
        steps_s = _steps_s(job)
        kept_s = newest * fmean(steps_s[step] for step in steps_s.keys() - firsts)
        return _Storm(kept_s, lives_s, started_s - begin_s)
    finally:
        job.end()


def _ranks(job: Job) -> dict[int, int]:
    """Return the ranks of a job by their processes."""
    ranks = {pid: rank_of(pid) for pid in job.processes()}
    return {pid: rank for pid, rank in ranks.items() if rank is not None}


def _kill(job: Job, victim: int) -> tuple[Collection[int], float]:
    """Kill a rank; return the processes that were ranks, and when it was killed.

    To find them takes a while, in which they train.
    """
    ranks = _ranks(job)
    for pid, rank in ranks.items():
        if rank == victim:
            os.kill(pid, signal.SIGKILL)
    return ranks.keys(), time.time()


def _wait_for_ranks(job: Job, old: Collection[int]) -> float:
    """Wait until all ranks have started whose processes are not ``old``; return when."""
    job.wait_until(lambda: len(_ranks(job).keys() - old) == WORLD, "start of the ranks")
    return time.time()


def _events(job: Job, kind: events.Kind) -> list[Event]:
    """Return the events of a kind that the training has told, in their order."""
    found = events.read(job.folder / "run")
    return [event for event in found if event is not None and event.kind == kind]


def _steps_s(job: Job) -> dict[int, float]:
    """Return the seconds of each step. Lines of slow ranks and the like have none."""
    rows = logged_rows(job.folder / "run")
    return {row["step"]: row["step_s"] for row in rows if "step_s" in row}


def _wait_for_saves(job: Job, count: int) -> list[Event]:
    """Return the saves when there are ``count``. It looks seldom, to disturb nothing.

    Raises:
        RuntimeError: they do not come.
    """
    until = time.monotonic() + LIMIT_S
    while len(found := _events(job, "save")) < count:
        if job.process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{len(found)} saves of {count}: {job.output()}")
        time.sleep(_SELDOM_S)
    return found
