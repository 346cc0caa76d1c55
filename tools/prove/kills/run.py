"""Kill trainings with SIGKILL, start them again, and compare them with an uninterrupted run.

A training is killed at each point of a save: every write (half of it done), sync, rename,
removal, and new file or folder; and with checkpoints in an object store (a server of S3 on this
machine), at every call that changes it. An uninterrupted run lists these points. It is also killed
at random instants.

The next start must resume from the newest checkpoint that was published before the kill, or from
the one in flight. Its losses and its last state must be bitwise those of the uninterrupted run,
and its next save must leave no other files.

The same lists show what a power failure could undo: files must be synced before their folder gets
its name, and that name must be synced before an older checkpoint is removed.
"""

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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer3d.facts.remote import RemotePath
from composer3d.runtime.ends import DIED
from composer3d.runtime.launch import Pool, WorkerError
from tools.object_store import new_folder, variables
from tools.prove.kills.trap import PUBLISHED, Death, Event, Outcome, train_once
from tools.prove.proof import add_names, add_number, choose, corpus_of, logged_losses, make_parser

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
STEPS = 6  # of a run that is killed in the save after BASE + 1 steps
BASE = 3
LONG_STEPS = 12  # of a run that is killed at random
LIMIT_S = 90.0
SURVIVED = "it was not killed"
RANDOM = "at random"


@dataclass(frozen=True)
class Scenario:
    """A run to kill.

    Attributes:
        name: of the scenario.
        before: what its folder holds at the start. "empty": nothing. "whole": a run of ``BASE``
            steps. "damaged": also the next checkpoint, with a flipped bit. "leftover": also the
            complete staging folder of the next checkpoint.
        sets: overrides of the recipe that change no loss.
        model: overrides of the recipe that change the losses.
        world: the number of ranks.
        dying: the rank to kill; each of its events is a point.
        keep: the number of checkpoints to keep.
        is_remote: whether the checkpoints are in an object store. Then all events of the run are
            points, and ``before`` is "empty".
    """

    name: str
    before: Literal["empty", "whole", "damaged", "leftover"] = "whole"
    sets: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    world: int = 1
    dying: int = 0
    keep: int = 2
    is_remote: bool = False

    @property
    def all_sets(self) -> list[str]:
        return [*self.model, *self.sets, f"checkpoint.keep={self.keep}"]


ASYNC = ("checkpoint.async_save=true",)
EXPERTS = (
    "model.architecture=moe",
    "model.preset=debug-moe",
    "model.router_bias=true",
    "model.balance_loss=0.1",
    "mesh.ep=2",
)
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
    Scenario("experts over 2 ranks, rank 1 dies", world=2, model=EXPERTS, dying=1),
    Scenario("object store", before="empty", is_remote=True),
    Scenario("object store, background", before="empty", sets=ASYNC, is_remote=True),
    *(
        Scenario(f"object store, 2 ranks, rank {n} dies", "empty", world=2, dying=n, is_remote=True)
        for n in (0, 1)
    ),
)


@dataclass(frozen=True)
class Kill:
    """The result of one kill.

    Attributes:
        where: the point or the instant of the kill.
        newest: the step of the newest checkpoint at that time.
        resumed: the step that the next start resumed from; -1 if it did not start.
        problem: what is wrong, or None.
    """

    where: str
    newest: int
    resumed: int
    problem: str | None


@dataclass(frozen=True)
class Uninterrupted:
    """The run that is not killed: losses by step, the last state of each rank, its loop's time."""

    losses: dict[int, float]
    states: list[str]
    loop_s: float


class Killer:
    """Kill runs and start them again, in folders of its own.

    Several threads may call its methods.

    Args:
        pool: worker processes for a single thread. Default: each thread makes its own.
        fault: called first in a run that is started again.
    """

    def __init__(self, pool: Pool | None = None, fault: Callable[[], None] | None = None) -> None:
        self._pool, self._fault = pool, fault
        self._local, self._lock = threading.local(), threading.Lock()
        self._stack = ExitStack()
        self._remote: RemotePath | None = None  # made when it is first needed
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="composer3d-kill-"))
        self.folder = Path(folder)
        corpus = self.folder / "corpus.txt"
        corpus.write_bytes(corpus_of(4_000))
        (self.folder / "recipe.toml").write_text(RECIPE.format(corpus=corpus))
        # By number of ranks, steps and overrides.
        self._uninterrupted: dict[tuple[int, int, tuple[str, ...]], Uninterrupted] = {}
        self._count = 0

    def __enter__(self) -> "Killer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def new_folder(self) -> Path:
        with self._lock:
            self._count += 1
            return self.folder / f"{self._count:05d}"

    def place(self, folder: Path) -> RemotePath:
        """The folder in the object store for the runs of ``folder``."""
        with self._lock:
            self._remote = self._remote or new_folder()
        return self._remote / folder.name

    def train(
        self, folder: Path, sets: Sequence[str], *, world: int, **train_arguments: Any
    ) -> list[Outcome]:
        """Run a training; ``train_arguments`` are further arguments of ``train_once``."""
        if self._pool is None and not hasattr(self._local, "pool"):
            self._local.pool = self._stack.enter_context(Pool())
        pool = self._pool or self._local.pool
        arguments = {
            "recipe": str(self.folder / "recipe.toml"),
            "folder": folder,
            "sets": [f"mesh.dp_shard={world}", *sets],
            "death": None,
            "variables": variables() if is_remote(sets) else None,
            **train_arguments,
        }
        outcomes: list[Outcome] = pool.run(train_once, arguments, world_size=world, limit_s=LIMIT_S)
        return outcomes

    def uninterrupted(self, world: int, steps: int, model: tuple[str, ...] = ()) -> Uninterrupted:
        """The run of these sizes, and with these overrides, that is not killed; it is made once."""
        with self._lock:
            run = self._uninterrupted.get((world, steps, model))
        if run is None:
            folder = self.new_folder()
            outcomes = self.train(folder, [*model, f"run.steps={steps}"], world=world)
            states = [outcome.state for outcome in outcomes]
            losses = logged_losses(folder / "run")
            if len(losses) != steps:
                raise RuntimeError(f"a run of {steps} steps has logged the losses {losses}")
            run = Uninterrupted(losses, states, outcomes[0].loop_s)
            self._uninterrupted[world, steps, model] = run
        return run

    def run_and_kill(
        self, folder: Path, sets: Sequence[str], world: int, death: Death
    ) -> str | None:
        """Run until a rank of ``death`` dies; return what is wrong if it ends otherwise."""
        try:
            self.train(folder, sets, world=world, death=death)
        except WorkerError as error:
            killed = any(error.failures.get(rank) == DIED for rank in death.ranks)
            return None if killed else f"something else happened: {error}"
        return SURVIVED

    def start_again(
        self,
        folder: Path,
        sets: Sequence[str],
        where: str,
        *,
        world: int,
        steps: int,
        keep: int,
        model: tuple[str, ...] = (),
    ) -> Kill:
        """Start a killed run again, and compare it with the uninterrupted one of ``model``."""
        newest, expected = published(folder), self.uninterrupted(world, steps, model)
        try:
            outcomes = self.train(folder, sets, world=world, fault=self._fault)
        except WorkerError as error:
            return Kill(where, newest, -1, f"it does not start again: {error}")
        resumed = {outcome.resumed for outcome in outcomes}
        if min(resumed) <= steps // 2:
            # Measure the time of the loop again: the machine may be busier now than it was then.
            loop_s = outcomes[0].loop_s * steps / (steps - min(resumed))
            self._uninterrupted[world, steps, model] = replace(expected, loop_s=loop_s)

        kept = self._left_in(folder, sets)
        newest_names = [f"step-{step:08d}" for step in range(steps - keep + 1, steps + 1)]
        losses = logged_losses(folder / "run")
        problem = None
        if len(resumed) > 1 or min(resumed) < newest:
            problem = f"it resumed from step {resumed}"
        elif losses != expected.losses:
            problem = f"its losses are {losses}, and of the uninterrupted run {expected.losses}"
        elif [outcome.state for outcome in outcomes] != expected.states:
            problem = "its last state differs from the one of the uninterrupted run"
        elif min(resumed) < steps and kept != newest_names:
            problem = f"it leaves {kept}"
        shutil.rmtree(folder)
        return Kill(where, newest, min(resumed), problem)

    def _left_in(self, folder: Path, sets: Sequence[str]) -> list[str]:
        """The names in the folder of checkpoints, but for the file of the job that writes them."""
        if not is_remote(sets):
            return sorted(path.name for path in checkpoints(folder).iterdir())
        files = (self.place(folder) / "run").files()
        return sorted({name.partition("/")[0] for name in files} - {"writer"})


def is_remote(sets: Sequence[str]) -> bool:
    """Whether a run with these overrides has its checkpoints in an object store."""
    return any(each.startswith("checkpoint.folder=") for each in sets)


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoints"


def published(folder: Path) -> int:
    """The newest step whose checkpoint was published and not damaged since, or 0."""
    journal = folder / "run" / PUBLISHED
    return max(map(int, journal.read_text().split())) if journal.exists() else 0


class Points:
    """The points of a scenario, and kills at them."""

    def __init__(self, killer: Killer, scenario: Scenario) -> None:
        self.killer, self.scenario = killer, scenario
        self._before = killer.new_folder()
        self._prepare()

    def _sets(self, folder: Path) -> list[str]:
        """The overrides of a run in ``folder``."""
        sets = [*self.scenario.all_sets, f"run.steps={STEPS}"]
        if self.scenario.is_remote:
            sets.append(f"checkpoint.folder={self.killer.place(folder)}")
        return sets

    def _prepare(self) -> None:
        """Make the folder that each kill starts from."""
        folder, before, world = self._before, self.scenario.before, self.scenario.world
        if before == "empty":
            folder.mkdir()
            return
        steps = BASE + 1 if before == "damaged" else BASE
        self.killer.train(folder, [*self.scenario.all_sets, f"run.steps={steps}"], world=world)
        if before == "damaged":
            files = (checkpoints(folder) / f"step-{steps:08d}").iterdir()
            flip_a_bit(max(files, key=lambda path: path.stat().st_size))
            (folder / "run" / PUBLISHED).write_text(f"{BASE}\n")
        elif before == "leftover":
            name = f"step-{BASE + 1:08d}"
            death = Death(event=Event("rename", f"{name}.tmp -> {name}", 1))
            problem = self.killer.run_and_kill(folder, self._sets(folder), world, death)
            assert problem is None, problem

    @cached_property
    def events(self) -> list[Event]:
        """The events of the dying rank from its start to the end of its first save."""
        folder = shutil.copytree(self._before, self.killer.new_folder())
        outcomes = self.killer.train(folder, self._sets(folder), world=self.scenario.world)
        events = outcomes[self.scenario.dying].events
        if self.scenario.is_remote:
            return list(events)
        next_save = f"step-{2 if self.scenario.before == 'empty' else BASE + 2:08d}"
        end = next(index for index, event in enumerate(events) if event.path.startswith(next_save))
        return list(events[:end])

    def kill(self, event: Event) -> Kill:
        """Kill the run at one point, and start it again."""
        scenario, folder = self.scenario, shutil.copytree(self._before, self.killer.new_folder())
        where = f"{event.what} {event.path} {event.number}"
        death = Death((scenario.dying,), event=event)
        sets = self._sets(folder)
        problem = self.killer.run_and_kill(folder, sets, scenario.world, death)
        if problem is not None:
            return Kill(where, -1, -1, problem)
        return self.killer.start_again(
            folder,
            sets,
            where,
            world=scenario.world,
            steps=STEPS,
            keep=scenario.keep,
            model=scenario.model,
        )


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def not_durable(events: Sequence[Event]) -> list[str]:
    """List what a power failure could undo although a later event relies on it."""
    problems: list[str] = []
    has_published = False
    # Files whose content, and folders whose names, are not yet on the disk.
    dirty: set[str] = set()
    for what, paths, _ in events:
        path, _, target = paths.partition(" -> ")
        is_published = re.fullmatch(r"step-\d{8}", target)
        is_removed = re.match(r"step-\d{8}(/|$)", path) and what not in ("fsync", "close")
        if is_published:
            has_published = True
            problems += [
                f"{unsynced} was not synced when {target} got its name"
                for unsynced in dirty
                if unsynced.startswith(path)
            ]
        if is_removed and "." in dirty:
            problems.append(f"{path} was removed before the name of the newer one was synced")
        if what in ("fsync", "fdatasync"):
            dirty.discard(path)
        elif what == "write":
            dirty.add(path)
        elif what != "close" and (is_published or ".tmp/" in path):
            dirty.add(path.rpartition("/")[0] or ".")
        if path in dirty and target:
            dirty = dirty - {path} | {target}
    if not has_published:
        problems.append("no checkpoint got its name, so nothing was checked")
    return sorted(set(problems))


class Instant(NamedTuple):
    """A kill of some ranks at a fraction of the loop's time."""

    name: str
    world: int
    sets: Sequence[str]
    dying: tuple[int, ...]
    fraction: float


def instants(count: int, seed: int = 7) -> list[Instant]:
    """The kills at random; a seed always gives the same ones."""
    generator = random.Random(seed)
    out: list[Instant] = []
    for number in range(count):
        sets = ASYNC if number // 2 % 2 else ()
        # Every tenth run has two ranks, of which the first, the second or both are killed.
        has_two_ranks = number % 10 == 0
        dying = ((0,), (1,), (0, 1))[number // 10 % 3] if has_two_ranks else (0,)
        world = 2 if has_two_ranks else 1
        out.append(Instant(f"instant {number}", world, sets, dying, generator.random()))
    return out


def kill_at_random(killer: Killer, instant: Instant) -> Kill:
    """Kill a run at a random time, and start it again."""
    sets = [*instant.sets, "checkpoint.keep=2", f"run.steps={LONG_STEPS}"]
    after_s = instant.fraction * killer.uninterrupted(instant.world, LONG_STEPS).loop_s
    # A run that is faster than the uninterrupted one survives: it is killed earlier then.
    for _ in range(8):
        folder = killer.new_folder()
        death = Death(instant.dying, after_s=after_s)
        problem = killer.run_and_kill(folder, sets, instant.world, death)
        if problem != SURVIVED:
            break
        after_s *= 0.8
        shutil.rmtree(folder)
    if problem is not None:
        return Kill(instant.name, -1, -1, problem)
    where = f"{instant.name}: {after_s:.3f} s into the loop"
    return killer.start_again(folder, sets, where, world=instant.world, steps=LONG_STEPS, keep=2)


def main(arguments: Sequence[str]) -> int:
    names = [*(scenario.name for scenario in SCENARIOS), RANDOM]
    parser = make_parser("kills", __doc__, "\n  ".join(["scenarios:", *names]))
    add_names(parser, "scenario's name")
    add_number(parser, "--instants", 100, "kills at random")
    add_number(parser, "--jobs", 2, "trainings at the same time", least=1)
    options = parser.parse_args(arguments)
    chosen = choose(parser, names, options.names, "no scenario's name holds")

    begin, failed = time.monotonic(), 0
    all_kills: list[Kill] = []
    print(
        f"{'scenario':<36}{'kills':>6}{'failed':>8}{'s':>6}  resumed from step: times", flush=True
    )
    with Killer() as killer, ThreadPoolExecutor(options.jobs) as threads:
        for scenario in SCENARIOS:
            if scenario.name not in chosen:
                continue
            scenario_begin = time.monotonic()
            points = Points(killer, scenario)
            # Made here, so that the threads do not all make it.
            killer.uninterrupted(scenario.world, STEPS, scenario.model)
            kills = list(threads.map(points.kill, points.events))
            is_on_disk = scenario.world == 1 and not scenario.is_remote
            undurable = not_durable(points.events) if is_on_disk else []
            failed += report(scenario.name, kills, undurable, scenario_begin)
            all_kills += kills

        if RANDOM in chosen and options.instants:
            scenario_begin = time.monotonic()
            for world in (1, 2):
                killer.uninterrupted(world, LONG_STEPS)
            kills = list(threads.map(partial(kill_at_random, killer), instants(options.instants)))
            failed += report(RANDOM, kills, [], scenario_begin)
            all_kills += kills

    counts = Counter(kill.where.split()[0] for kill in all_kills).most_common()
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts)
    verdict = f"{failed} PROBLEMS" if failed else "0 problems: all resume bitwise"
    print(f"{len(all_kills)} kills ({kinds}), {verdict}, in {time.monotonic() - begin:.0f} s")
    return 1 if failed or not all_kills else 0


def report(name: str, kills: Sequence[Kill], undurable: Sequence[str], begin: float) -> int:
    """Print a scenario's line and its problems; return the number of problems."""
    problems = [f"{kill.where}: {kill.problem}" for kill in kills if kill.problem is not None]
    problems += undurable
    if not kills:
        problems.append("there was nothing to kill")
    counts = sorted(Counter(kill.resumed for kill in kills).items())
    resumed = ", ".join(f"{step}: {count}" for step, count in counts)
    seconds = time.monotonic() - begin
    line = f"{name:<36}{len(kills):>6}{len(problems):>8}{seconds:>6.0f}  {resumed}"
    print(line, *problems, sep="\n    ", flush=True)
    return len(problems)
