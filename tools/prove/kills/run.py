"""Kills trainings with SIGKILL, starts them again, and compares them with one that was left alone.

Points: every write (half of it done), sync, rename, removal and new file or folder of a save, as a run that is not
killed lists them. Instants: at random, while training. The next start must resume from the newest checkpoint that was
published before the kill, or from the one in flight; its losses and its last state must be bitwise those of the run
that nobody killed; and its next save leaves nothing over. What a power failure could undo is read from the same lists:
files must be synced before their folder gets its name, and that name before an older checkpoint goes.
"""

import argparse
import json
import random
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from composer3d.runtime.launch import Pool, WorkerError
from tools.prove.kills.trap import PUBLISHED, Death, Event, Outcome, train_once

RECIPE = """\
[run]
name = "run"
device = "cpu"
[model]
preset = "debug-tiny"
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn = 16
[data]
source = "text"
path = "{corpus}"
seq_len = 16
global_batch = 4
[optim]
decay = 12
[checkpoint]
every = 1
[metrics]
every = 1
tensorboard = false
"""
STEPS, LONG = (
    6,
    12,
)  # of a run that is killed in the save after BASE + 1 steps, and of one killed at random
BASE = 3
LIMIT_S = 90.0
LIVED, RANDOM = "it was not killed", "at random"


@dataclass(frozen=True)
class Scenario:
    """A run to kill. ``before``: what its folder holds at the start: nothing; ``BASE`` steps; and with those the next
    checkpoint with a flipped bit, or its whole staging folder. Each event of the rank ``dying`` is a point."""

    name: str
    before: str = "whole"
    sets: tuple[str, ...] = ()
    world: int = 1
    dying: int = 0
    keep: int = 2

    @property
    def all_sets(self) -> list[str]:
        return [*self.sets, f"checkpoint.keep={self.keep}"]


ASYNC = ("checkpoint.async_save=true",)
SCENARIOS = (
    Scenario("save"),
    Scenario("save in the background", sets=ASYNC),
    Scenario("first save", before="empty"),
    Scenario("save over a damaged one", before="damaged"),
    Scenario("save after a kill", before="leftover"),
    Scenario("save, keep 1", keep=1),
    Scenario("2 ranks, rank 0 dies", world=2),
    Scenario("2 ranks, rank 1 dies", world=2, dying=1),
    Scenario("2 ranks, background, rank 0 dies", world=2, sets=ASYNC),
    Scenario("2 ranks, background, rank 1 dies", world=2, sets=ASYNC, dying=1),
)


@dataclass(frozen=True)
class Kill:
    """One kill: where, the steps of the newest checkpoint then, and those that the next start had done."""

    where: str
    newest: int
    resumed: int
    problem: str | None


@dataclass(frozen=True)
class Alone:
    """The run that nobody kills: loss by step, state by rank, and the seconds of its loop."""

    losses: dict[int, float]
    states: list[str]
    loop_s: float


class Killer:
    """Kills runs and starts them again, in folders of its own. Methods may be called from several threads.

    ``pool`` serves one thread; absent, each makes its own. ``fault`` is called first in a run that is started again.
    """

    def __init__(self, pool: Pool | None = None, fault: Callable[[], None] | None = None) -> None:
        self._given, self._fault, self._local, self._lock = (
            pool,
            fault,
            threading.local(),
            threading.Lock(),
        )
        self._stack = ExitStack()
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="composer3d-kill-"))
        )
        corpus = self.folder / "corpus.txt"
        corpus.write_bytes(bytes((i * i + i // 7) % 251 + 1 for i in range(4_000)))
        (self.folder / "recipe.toml").write_text(RECIPE.format(corpus=corpus))
        self._alone: dict[tuple[int, int], Alone] = {}
        self._count = 0

    def __enter__(self) -> "Killer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def new_folder(self) -> Path:
        with self._lock:
            self._count += 1
            return self.folder / f"{self._count:05d}"

    def train(self, folder: Path, sets: Sequence[str], *, world: int, **more: Any) -> list[Outcome]:
        """``more``: of ``train_once``."""
        if self._given is None and not hasattr(self._local, "pool"):
            self._local.pool = self._stack.enter_context(Pool())
        pool = self._given or self._local.pool
        arguments = {
            "recipe": str(self.folder / "recipe.toml"),
            "folder": folder,
            "death": None,
            **more,
        }
        arguments["sets"] = [f"mesh.dp_shard={world}", *sets]
        outcomes: list[Outcome] = pool.run(train_once, arguments, world_size=world, limit_s=LIMIT_S)
        return outcomes

    def alone(self, world: int, steps: int) -> Alone:
        with self._lock:
            known = self._alone.get((world, steps))
        if known is None:
            folder = self.new_folder()
            outcomes = self.train(folder, [f"run.steps={steps}"], world=world)
            known = Alone(losses(folder), [each.state for each in outcomes], outcomes[0].loop_s)
            self._alone[world, steps] = known
        return known

    def dying(self, folder: Path, sets: Sequence[str], world: int, death: Death) -> str | None:
        """Run to the death of one of ``death.ranks`` or more. Returns what is wrong: it lived, or ended otherwise."""
        try:
            self.train(folder, sets, world=world, death=death)
        except WorkerError as error:
            killed = any(error.failures.get(rank) == "the process died" for rank in death.ranks)
            return None if killed else f"something else happened: {error}"
        return LIVED

    def start_again(
        self, folder: Path, sets: Sequence[str], where: str, *, world: int, steps: int, keep: int
    ) -> Kill:
        """What became of a run that was killed."""
        newest, wanted = published(folder), self.alone(world, steps)
        try:
            outcomes = self.train(folder, sets, world=world, fault=self._fault)
        except WorkerError as error:
            return Kill(where, newest, -1, f"it does not start again: {error}")
        kept = sorted(path.name for path in checkpoints(folder).iterdir())
        resumed = {each.resumed for each in outcomes}
        if min(resumed) <= steps // 2:  # the machine may be busier now than it was then
            self._alone[world, steps] = replace(
                wanted, loop_s=outcomes[0].loop_s * steps / (steps - min(resumed))
            )
        problem = None
        if len(resumed) > 1 or min(resumed) < newest:
            problem = f"it resumed from step {resumed}"
        elif losses(folder) != wanted.losses:
            problem = f"its losses are {losses(folder)}, those of the run alone {wanted.losses}"
        elif [each.state for each in outcomes] != wanted.states:
            problem = "its last state is another one than that of the run alone"
        elif min(resumed) < steps and kept != [
            f"step-{step:08d}" for step in range(steps - keep + 1, steps + 1)
        ]:
            problem = f"it leaves {kept}"
        shutil.rmtree(folder)
        return Kill(where, newest, min(resumed), problem)


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def losses(folder: Path) -> dict[int, float]:
    """By step; every one that was ever logged and is still there."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def published(folder: Path) -> int:
    """The newest step whose checkpoint was given its name and not damaged since; 0: there is none."""
    journal = folder / "run" / PUBLISHED
    return max(map(int, journal.read_text().split())) if journal.exists() else 0


class Points:
    """A scenario's points: ``events`` of the one that dies, from its start to the end of the save after ``BASE``."""

    def __init__(self, killer: Killer, scenario: Scenario) -> None:
        self.killer, self.scenario = killer, scenario
        self._sets = [*scenario.all_sets, f"run.steps={STEPS}"]
        self._before = killer.new_folder()
        self._prepare()

    def _prepare(self) -> None:
        folder, how, world = self._before, self.scenario.before, self.scenario.world
        if how == "empty":
            folder.mkdir()
            return
        steps = BASE + (how == "damaged")
        self.killer.train(folder, [*self.scenario.all_sets, f"run.steps={steps}"], world=world)
        if how == "damaged":
            flip_a_bit(
                max(
                    (checkpoints(folder) / f"step-{steps:08d}").iterdir(),
                    key=lambda path: path.stat().st_size,
                )
            )
            (folder / "run" / PUBLISHED).write_text(f"{BASE}\n")
        elif how == "leftover":
            killed = Death(
                event=Event("rename", f"step-{BASE + 1:08d}.tmp -> step-{BASE + 1:08d}", 1)
            )
            problem = self.killer.dying(folder, self._sets, world, killed)
            assert problem is None, problem

    @cached_property
    def events(self) -> list[Event]:
        folder = shutil.copytree(self._before, self.killer.new_folder())
        outcomes = self.killer.train(folder, self._sets, world=self.scenario.world)
        events = outcomes[self.scenario.dying].events
        later = f"step-{2 if self.scenario.before == 'empty' else BASE + 2:08d}"
        return list(
            events[: next(i for i, event in enumerate(events) if event.path.startswith(later))]
        )

    def kill(self, event: Event) -> Kill:
        scenario, folder = self.scenario, shutil.copytree(self._before, self.killer.new_folder())
        where = f"{event.what} {event.path} {event.number}"
        problem = self.killer.dying(
            folder, self._sets, scenario.world, Death((scenario.dying,), event=event)
        )
        if problem is not None:
            return Kill(where, -1, -1, problem)
        how = {"world": scenario.world, "steps": STEPS, "keep": scenario.keep}
        return self.killer.start_again(folder, self._sets, where, **how)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def not_durable(events: Sequence[Event]) -> list[str]:
    """What a power failure could undo though a later event relies on it."""
    problems: list[str] = []
    dirty: set[str] = set()  # files with content, folders with names, that are not on the disk
    for what, paths, _ in events:
        path, _, target = paths.partition(" -> ")
        gets_name = re.fullmatch(r"step-\d{8}", target)
        goes = re.match(r"step-\d{8}(/|$)", path) and what not in ("fsync", "close")
        if gets_name:
            problems += [
                f"{each} was not synced when {target} got its name"
                for each in dirty
                if each.startswith(path)
            ]
        if goes and "." in dirty:
            problems.append(f"{path} went before the name of the newer one was synced")
        if what in ("fsync", "fdatasync"):
            dirty.discard(path)
        elif what == "write":
            dirty.add(path)
        elif what != "close" and (gets_name or ".tmp/" in path):
            dirty.add(path.rpartition("/")[0] or ".")
        if path in dirty and target:
            dirty = dirty - {path} | {target}
    return sorted(set(problems))


Instant = tuple[str, int, Sequence[str], tuple[int, ...], float]


def instants(count: int, seed: int = 7) -> list[Instant]:
    """What to kill at random: name, processes, overrides, dying ranks, and when, as a part of the loop's time."""
    generator = random.Random(seed)
    out: list[Instant] = []
    for number in range(count):
        sets = ASYNC if number // 2 % 2 else ()
        dying = ((0,), (1,), (0, 1))[number // 10 % 3] if number % 10 == 0 else (0,)
        world = 2 if number % 10 == 0 else 1
        out.append((f"instant {number}", world, sets, dying, generator.random()))
    return out


def kill_at_random(
    killer: Killer, name: str, world: int, sets: Sequence[str], dying: tuple[int, ...], at: float
) -> Kill:
    sets, loop_s = (
        [*sets, "checkpoint.keep=2", f"run.steps={LONG}"],
        killer.alone(world, LONG).loop_s,
    )
    for _ in range(8):  # it may have been faster than the run alone
        folder, death = killer.new_folder(), Death(dying, after_s=at * loop_s)
        problem = killer.dying(folder, sets, world, death)
        if problem != LIVED:
            break
        at *= 0.8
        shutil.rmtree(folder)
    if problem is not None:
        return Kill(name, -1, -1, problem)
    where = f"{name}: {at * loop_s:.3f} s into the loop"
    return killer.start_again(folder, sets, where, world=world, steps=LONG, keep=2)


def main(arguments: Sequence[str]) -> int:
    names = [*(each.name for each in SCENARIOS), RANDOM]
    epilog, how = (
        "\n  ".join(["scenarios, of which NAME is a part:", *names]),
        argparse.RawDescriptionHelpFormatter,
    )
    parser = argparse.ArgumentParser(
        "tools/kill", description=__doc__, epilog=epilog, formatter_class=how
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="only these scenarios; absent: all"
    )
    parser.add_argument("--instants", type=int, default=100, help="kills at random (100)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (2)")
    options = parser.parse_args(arguments)
    chosen = [name for name in names if any(part in name for part in options.names or [""])]
    if not chosen:
        parser.error(f"no scenario's name holds {' or '.join(options.names)}")
    begin, failed, every_kill = time.monotonic(), 0, []
    print(
        f"{'scenario':<36}{'kills':>6}{'failed':>8}{'s':>6}  resumed from step: times", flush=True
    )
    with Killer() as killer, ThreadPoolExecutor(options.jobs) as threads:
        for scenario in (each for each in SCENARIOS if each.name in chosen):
            since, points = time.monotonic(), Points(killer, scenario)
            killer.alone(scenario.world, STEPS)
            kills = list(threads.map(points.kill, points.events))
            failed += report(
                scenario.name,
                kills,
                not_durable(points.events) if scenario.world == 1 else [],
                since,
            )
            every_kill += kills
        if RANDOM in chosen and options.instants:
            since = time.monotonic()
            for world in (1, 2):
                killer.alone(world, LONG)
            kills = list(
                threads.map(lambda each: kill_at_random(killer, *each), instants(options.instants))
            )
            failed += report(RANDOM, kills, [], since)
            every_kill += kills
    kinds = ", ".join(
        f"{n} {kind}"
        for kind, n in Counter(each.where.split()[0] for each in every_kill).most_common()
    )
    verdict = "0 problems: every one goes on bitwise" if not failed else f"{failed} PROBLEMS"
    print(f"{len(every_kill)} kills ({kinds}), {verdict}, in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


def report(name: str, kills: Sequence[Kill], problems: Sequence[str], since: float) -> int:
    """Print a scenario's line and what failed in it; return how many did."""
    bad = [f"{kill.where}: {kill.problem}" for kill in kills if kill.problem is not None] + list(
        problems
    )
    if not kills:
        bad.append("there was nothing to kill")
    resumed = ", ".join(
        f"{step}: {times}"
        for step, times in sorted(Counter(kill.resumed for kill in kills).items())
    )
    line = f"{name:<36}{len(kills):>6}{len(bad):>8}{time.monotonic() - since:>6.0f}  {resumed}"
    print(line, *bad, sep="\n    ", flush=True)
    return len(bad)
