"""Read the folder of a run for a report, and trust nothing in it. No torch here.

No code that a recipe names is imported, and no path in it is followed: a report on a run of
somebody else must be as safe as looking at a picture.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from composer3d.facts import events
from composer3d.facts.errors import UserError
from composer3d.facts.events import Event
from composer3d.facts.files import open_plain, read_plain
from composer3d.facts.text import one_line
from composer3d.models.registry import DEFAULT, is_ours
from composer3d.recipe.draft import parse_document
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.reliability import bad_steps
from composer3d.report import series

# Characters of a resolved recipe that are parsed; it has about 10,000.
_RECIPE_LIMIT = 256 << 10

# Of events, after the saves were taken out.
_MOST_EVENTS = 300

_MOST_LOST_REPORTS = 5
_LOST_REPORT = re.compile(r"lost-ranks-(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z(?:_(\d{1,9}))?\.txt")
_LOST_REPORT_LIMIT = 64 << 10

# Keys of [model]. A resolved recipe has the whole shape, so it needs no folder and no preset.
_LEFT_OUT = {"hf", "preset"}


class RunEvent(NamedTuple):
    """A row of the table of events.

    Attributes:
        step: the number of steps done; None if it is not known.
        when: date and time in UTC, or empty.
        kind: a word or two.
        text: what happened.
    """

    step: int | None
    when: str
    kind: str
    text: str


class LostRanks(NamedTuple):
    """A report of lost ranks: the name of its file, and the beginning of its text."""

    name: str
    text: str


@dataclass
class RunFolder:
    """What the folder of a run says.

    Attributes:
        path: the folder.
        is_copy: whether it is a copy of one in an object store, and goes.
        curves: its metrics.
        recipe_toml: the text of ``recipe.toml``; empty if there is none.
        recipe: the recipe; None if ``recipe_problem`` says why not.
        events: the newest ``_MOST_EVENTS``, without the saves.
        hidden_events: how many older ones there are.
        n_starts: how many starts of the job there are, also among the hidden ones.
        started_at: the step from which the last start went on; None if it is not known.
        saves: the saves.
        device: the name of the devices of the last start; None if it is not known.
        since: the steps that were done before the run had this recipe and these devices.
        lost_ranks: the newest reports of lost ranks, oldest first.
        hidden_lost_ranks: how many older ones there are.
        steps_done: the number of steps that the run has done, as far as its files say it.
        problems: what could not be read, in words.
    """

    path: Path
    is_copy: bool = False
    curves: series.Curves = field(default_factory=series.Curves)
    recipe_toml: str = ""
    recipe: Recipe | None = None
    recipe_problem: str = ""
    events: list[RunEvent] = field(default_factory=list)
    hidden_events: int = 0
    n_starts: int = 0
    started_at: int | None = None
    saves: list[Event] = field(default_factory=list)
    device: str | None = None
    since: int = 0
    lost_ranks: list[LostRanks] = field(default_factory=list)
    hidden_lost_ranks: int = 0
    steps_done: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the folder, which is the name of the run."""
        return self.path.resolve().name

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step, over all ranks."""
        if self.recipe is None:
            return None
        return self.recipe.data.global_batch * self.recipe.data.seq_len

    @property
    def tokens_per_s(self) -> float | None:
        """The median speed of all ranks, with the present recipe and devices; None: no step."""
        return self.curves.of("tokens_per_s").median

    @property
    def mfu(self) -> float | None:
        """The median MFU, likewise."""
        return self.curves.of("mfu").median

    @property
    def memory_gib(self) -> float | None:
        """The peak memory of a rank, likewise."""
        return self.curves.of("memory_gib").most

    @property
    def starts(self) -> list[RunEvent]:
        """The starts of the job among ``events``."""
        return [event for event in self.events if event.kind == "start"]

    @property
    def bad_steps(self) -> list[RunEvent]:
        """The bad steps among ``events``."""
        return [event for event in self.events if event.kind == "bad steps"]


def read(path: str, *, url: str | None = None) -> RunFolder:
    """Read the folder of a run.

    Args:
        path: the folder.
        url: the folder in an object store that ``path`` is a copy of; None: it is no copy.

    Raises:
        UserError: it is not the folder of a run, or its metrics cannot be read.
    """
    run = RunFolder(Path(path), is_copy=url is not None)
    label = one_line(path if url is None else url)
    if not os.path.isdir(path):
        raise UserError(f"{label}: there is no such folder; name the folder of a run")
    names = (series.FILE, "recipe.toml")
    if not any(os.path.lexists(run.path / name) for name in names):
        raise UserError(
            f"{label} is not the folder of a run: it has neither {names[0]} nor {names[1]}"
        )
    _read_recipe(run)
    _read_lost_ranks(run)
    found, done = _read_events(run)
    former_recipes = list(_former_recipes(run))
    if run.started_at is not None:
        # A run that went back to an older checkpoint has lost the lines after it.
        run.since = min(run.since, run.started_at)
    # Only now is it known since when the run has its recipe and its devices.
    _read_metrics(run, label)
    run.steps_done = max(done, run.curves.last_step)
    _order_events(run, found, former_recipes)
    return run


def _read_metrics(run: RunFolder, label: str) -> None:
    try:
        run.curves = series.read(run.path, since=run.since)
    except (OSError, ValueError) as error:
        raise UserError(f"{label}/{series.FILE} cannot be read ({error})") from None
    if run.curves.wrong_lines:
        run.problems.append(
            f"{run.curves.wrong_lines:,} lines of {series.FILE} are not metrics, and left out"
        )
    if run.curves.is_cut:
        run.problems.append(f"{series.FILE} is longer than 1 GiB; its end is left out")


def _read_recipe(run: RunFolder) -> None:
    try:
        # The page shows its text. A link could name any file of the reader, such as a key.
        content = read_plain(run.path / "recipe.toml", limit=_RECIPE_LIMIT, follow_links=False)
        run.recipe_toml = content.decode()
    except FileNotFoundError:
        run.recipe_problem = "the folder has no recipe.toml"
    except (OSError, ValueError) as error:
        run.recipe_problem = f"recipe.toml cannot be read ({error})"
    else:
        try:
            run.recipe = _recipe_of(run.recipe_toml)
        except (UserError, ValueError) as error:
            run.recipe_problem = f"recipe.toml cannot be used ({error})"
    if run.recipe_problem:
        run.problems.append(run.recipe_problem)


def _recipe_of(text: str) -> Recipe:
    """Return the recipe of a resolved text. No file that it names is opened.

    Raises:
        ValueError: the recipe names an architecture that is not composer3d's own.
        UserError: it is not a recipe of this version of composer3d.
    """
    document = parse_document(text, "recipe.toml")
    tables = {key: table for key, table in document.tables.items() if isinstance(table, dict)}
    model = tables.get("model", {})
    if not is_ours(model.get("architecture", DEFAULT)):
        raise ValueError(
            "its architecture is not one of composer3d's own, whose code a report does not run"
        )
    if "model" in tables:
        tables["model"] = {name: model[name] for name in model.keys() - _LEFT_OUT}
    try:
        return load(document._replace(tables=tables), check_files=False).recipe
    except UserError as error:
        raise UserError("; ".join(error.lines[:3])) from None


def _read_events(run: RunFolder) -> tuple[list[RunEvent], int]:
    """Return the events of a run without the saves, and the steps that it has done by them."""
    found: list[RunEvent] = []
    wrong = done = 0
    try:
        for event in events.read(run.path):
            if event is None:
                wrong += 1
                continue
            done = events.done_after(event, done)
            if event.kind == "start":
                run.n_starts += 1
                run.started_at = event.step
            if event.kind == "save":
                run.saves.append(event)
            else:
                if event.device is not None:
                    if run.device not in (None, event.device):
                        run.since = event.step
                    run.device = event.device
                found.append(RunEvent(event.step, _utc(event.unix_s), event.kind, event.text))
    except (OSError, ValueError) as error:
        run.problems.append(f"{events.FILE} cannot be read ({error})")
    if wrong:
        run.problems.append(f"{wrong:,} lines of {events.FILE} are not events, and left out")
    return found, done


def _order_events(
    run: RunFolder, found: list[RunEvent], former_recipes: Sequence[RunEvent]
) -> None:
    """Set ``run.events``: those found, and others that follow from further files."""
    # A run of an older composer3d has no events: its other files say less, but not nothing.
    kinds = {event.kind for event in found}
    others: list[RunEvent] = []
    if "bad steps" not in kinds:
        others += _ledger(run)
    if "ranks" not in kinds:
        for metric, words in (("straggler_rank", "slow"), ("corrupt_rank", "wrong bits")):
            others += [
                RunEvent(point.step, "", "ranks", f"rank {point.value:.0f}: {words}")
                for point in run.curves.of(metric).points
            ]
    others += former_recipes
    # The file has the order in which things happened. Clocks of machines differ.
    for other in sorted(others, key=lambda event: event.step or 0):
        later = (
            index
            for index, event in enumerate(found)
            if event.when and (event.step or 0) >= (other.step or 0)
        )
        found.insert(next(later, len(found)), other)
    if "lost ranks" not in kinds:
        found += [
            RunEvent(None, _when(lost.name), "lost ranks", lost.name) for lost in run.lost_ranks
        ]
    run.hidden_events = max(0, len(found) - _MOST_EVENTS)
    run.events = found[run.hidden_events :]


def _ledger(run: RunFolder) -> list[RunEvent]:
    found: list[RunEvent] = []
    wrong = 0
    try:
        with open_plain(run.path / bad_steps.FILE) as file:
            for line in islice(iter(lambda: file.readline(64 << 10), b""), 100_000):
                try:
                    entry = bad_steps.parse_line(line)
                except ValueError:
                    wrong += 1
                    continue
                batches = f"the batches of steps {entry.first} to {entry.step} are left out"
                found.append(RunEvent(entry.step, "", "bad steps", f"{entry.reason}; {batches}"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        run.problems.append(f"{bad_steps.FILE} cannot be read ({error})")
    if wrong:
        run.problems.append(f"{wrong:,} lines of {bad_steps.FILE} are wrong, and left out")
    return found


def _former_recipes(run: RunFolder) -> Iterator[RunEvent]:
    for name in _names(run.path, re.compile(r"recipe-(\d{8})\.toml")):
        step = int(name[7:15])
        run.since = max(run.since, step)
        yield RunEvent(step, "", "recipe", f"the recipe changed here; {name} is the former one")


def _read_lost_ranks(run: RunFolder) -> None:
    names = sorted(_names(run.path, _LOST_REPORT), key=_number_of)
    run.hidden_lost_ranks = max(0, len(names) - _MOST_LOST_REPORTS)
    for name in names[run.hidden_lost_ranks :]:
        try:
            with open_plain(run.path / name, follow_links=False) as file:
                text = file.read(_LOST_REPORT_LIMIT).decode(errors="replace")
        except (OSError, ValueError) as error:
            run.problems.append(f"{name} cannot be read ({error})")
            continue
        run.lost_ranks.append(LostRanks(name, text))


def _number_of(name: str) -> tuple[int, str]:
    """Return what orders the names of reports: their number, which grows over the starts."""
    return int(_fields(name)[-1] or 1), name


def _when(name: str) -> str:
    year, month, day, hour, minute, second, _ = _fields(name)
    return f"{year}-{month}-{day} {hour}:{minute}:{second}"


def _fields(name: str) -> tuple[Any, ...]:
    match = _LOST_REPORT.fullmatch(name)
    assert match is not None
    return match.groups()


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    """Return the names in a folder that match, sorted; at most 1,000."""
    with os.scandir(folder) as entries:
        found = (entry.name for entry in entries if pattern.fullmatch(entry.name))
        return sorted(islice(found, 1000))


def _utc(unix_s: float) -> str:
    """Return a time as date and time in UTC; empty if there is no such date."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return ""
