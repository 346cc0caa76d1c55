"""Traces of the pipeline: when each pipeline rank of a run has run which action. No torch here.

A run writes ``timeline/pp0.jsonl`` for pipeline rank 0, and so on. Each traced step is a head and a
line for each event, in the order in which they happened::

    {"step": 3, "pp_rank": 0, "pp": 2, "schedule": "1F1B", "stages_per_rank": 1, ..., "events": 9}
    {"event": "0F0", "begin_s": 0.0012, "end_s": 0.0213}
    {"event": "messages", "begin_s": 0.0214, "end_s": 0.0415}

An event is an action as in ``facts.schedules``, or the reason of a wait. ``read`` checks every
value of the files, because a user may draw the run of somebody else.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from composer3d.facts.errors import PlanError, UserError
from composer3d.facts.files import open_plain, parse_json
from composer3d.facts.ranges import MOST_LAYERS
from composer3d.facts.schedules import SCHEDULES, Action, parse_action, parse_csv
from composer3d.facts.text import short_json

FOLDER = "timeline"  # in the folder of the run

MESSAGES = "messages"
GRADIENTS = "gradients"
# The events that are not actions.
WAITS = {
    MESSAGES: "waiting for messages of other pipeline ranks",
    GRADIENTS: "reducing gradients over data-parallel ranks",
}

_FILE_BYTES = 1 << 30
_LINE_BYTES = 4096
_MOST_EVENTS = 1 << 20  # of a rank in a step; 16,384 GPUs with 1,024 micro-batches need 10,000
_MOST_RANKS = 4096
_MOST_S = 1e7


class TracedEvent(NamedTuple):
    """An action or a wait of a pipeline rank. Times are in seconds on the clock of rank 0.

    Attributes:
        name: an action, such as "0F3", or a key of ``WAITS``.
        begin_s: its begin. 0 is shortly before the step.
        end_s: its end.
    """

    name: str
    begin_s: float
    end_s: float

    @property
    def is_action(self) -> bool:
        """Whether the event is an action. Otherwise it is a wait."""
        return self.name not in WAITS

    @property
    def action(self) -> Action | None:
        """The action; None if the event is a wait."""
        return parse_action(self.name) if self.is_action else None


@dataclass(frozen=True, kw_only=True)
class TraceHead:
    """The facts about one traced step of one pipeline rank.

    Attributes:
        step: the optimizer step, counted from 1.
        pp_rank: the pipeline rank.
        pp: the number of pipeline ranks.
        schedule: a key of ``facts.schedules.SCHEDULES``.
        stages_per_rank: the stages of each pipeline rank.
        micro_batches: the micro-batches of the step.
        device: "cpu" or "cuda". On a GPU, an event covers the work of its stream.
        started_unix_s: when the step began, in seconds since 1970. All ranks have the same value.
        clock_error_s: how far the times of this rank may be from those of rank 0 at most.
    """

    step: int
    pp_rank: int
    pp: int
    schedule: str
    stages_per_rank: int
    micro_batches: int
    device: str
    started_unix_s: float
    clock_error_s: float

    @property
    def shared(self) -> tuple[object, ...]:
        """The values that are the same on all pipeline ranks of a traced step."""
        return tuple(
            getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("pp_rank", "clock_error_s")
        )


class StepTrace(NamedTuple):
    """A traced step of a whole pipeline.

    Attributes:
        heads: by pipeline rank.
        events: those of each pipeline rank, in order.
    """

    heads: list[TraceHead]
    events: list[list[TracedEvent]]


def file_of(run: Path, pp_rank: int) -> Path:
    """Return the path of the trace of a pipeline rank. The file need not exist."""
    return run / FOLDER / f"pp{pp_rank}.jsonl"


def lines(head: TraceHead, events: Iterable[TracedEvent]) -> bytes:
    """Return a traced step as text, for the end of the rank's file."""
    rows: list[dict[str, Any]] = [
        {"event": name, "begin_s": round(begin_s, 7), "end_s": round(end_s, 7)}
        for name, begin_s, end_s in events
    ]
    first = {entry.name: getattr(head, entry.name) for entry in fields(head)}
    return "".join(
        json.dumps(row) + "\n" for row in ({**first, "events": len(rows)}, *rows)
    ).encode()


def read(run: Path, step: int | None = None) -> StepTrace:
    """Read a traced step of a run, and check all of its values.

    Args:
        run: the folder of the run.
        step: the step; None: the last one that the file of pipeline rank 0 has. If a step was
            traced several times, the last trace is read.

    Raises:
        UserError: there is no such trace, or a file cannot be read or has a wrong value. The
            message names the file and the line.
    """
    first = _read_rank(file_of(run, 0), 0, lambda head: step is None or head.step == step)
    if first is None:
        what = "no step" if step is None else f"no step {step}"
        raise UserError(
            f"{file_of(run, 0)} has {what}; train with metrics.timeline_steps = [FIRST, LAST]"
        )
    head, events = first
    heads, all_events = [head], [events]
    for rank in range(1, head.pp):
        path = file_of(run, rank)
        found = _read_rank(path, rank, lambda other: other.shared == head.shared)
        if found is None:
            raise UserError(
                f"{path} lacks step {head.step} as {file_of(run, 0)} has it; copy the files of all "
                "ranks, or trace another step"
            )
        heads.append(found[0])
        all_events.append(found[1])
    _check_actions(run, head, all_events)
    return StepTrace(heads, all_events)


def _read_rank(
    path: Path, pp_rank: int, is_wanted: Any
) -> tuple[TraceHead, list[TracedEvent]] | None:
    """Return the last traced step of a file that is wanted, or None."""
    found = None
    try:
        with open_plain(path) as file:
            numbered = _numbered_lines(file, path)
            for number, line in numbered:
                place = f"{path}:{number}"
                head, count = _head(_object(line, place), place)
                if head.pp_rank != pp_rank:
                    raise UserError(f"{place}: pp_rank is {head.pp_rank}, but must be {pp_rank}")
                if is_wanted(head):
                    found = head, _events(numbered, count, path)
                else:
                    _skip(numbered, count, place)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; a run writes it with metrics.timeline_steps = [FIRST, LAST] and "
            "mesh.pp above 1"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    return found


def _numbered_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers. Raises UserError if there is too much."""
    size = number = 0
    while line := file.readline(_LINE_BYTES + 1):
        number += 1
        size += len(line)
        if len(line) > _LINE_BYTES:
            raise UserError(f"{path}:{number} is longer than {_LINE_BYTES:,} bytes")
        if size > _FILE_BYTES:
            raise UserError(f"{path} is larger than {_FILE_BYTES:,} bytes")
        yield number, line


def _skip(numbered: Iterator[tuple[int, bytes]], count: int, place: str) -> None:
    for _ in range(count):
        if next(numbered, None) is None:
            raise UserError(f"{place}: the file ends before the {count} events of this step")


def _events(numbered: Iterator[tuple[int, bytes]], count: int, path: Path) -> list[TracedEvent]:
    events: list[TracedEvent] = []
    previous_end_s = -_MOST_S
    for _ in range(count):
        number, line = next(numbered, (0, b""))
        if not number:
            raise UserError(f"{path} ends after {len(events)} of the {count} events of a step")
        place = f"{path}:{number}"
        row = _object(line, place)
        _check_keys(row, {"event", "begin_s", "end_s"}, place)
        begin_s, end_s = (_seconds(row, key, place) for key in ("begin_s", "end_s"))
        if not previous_end_s <= begin_s <= end_s:
            raise UserError(
                f"{place}: the event is from {begin_s} to {end_s} s, but the one before it ends at "
                f"{previous_end_s} s; events follow each other"
            )
        previous_end_s = end_s
        name = row["event"]
        if not isinstance(name, str) or (name not in WAITS and parse_action(name) is None):
            raise UserError(
                f"{place}: {short_json(name)} is no event; it must be an action such as 0F0, or "
                f"one of {', '.join(WAITS)}"
            )
        events.append(TracedEvent(name, begin_s, end_s))
    return events


def _head(row: dict[str, Any], place: str) -> tuple[TraceHead, int]:
    """Return the head of a step, and the number of its events."""
    _check_keys(row, {entry.name for entry in fields(TraceHead)} | {"events"}, place)
    bounds = {
        "step": (1, 10**9),
        "pp": (2, _MOST_RANKS),
        "pp_rank": (0, _MOST_RANKS - 1),
        "stages_per_rank": (1, MOST_LAYERS),
        "micro_batches": (1, _MOST_EVENTS),
        "events": (1, _MOST_EVENTS),
    }
    for key, (least, most) in bounds.items():
        # Not ``isinstance``: True is an int too.
        if type(row[key]) is not int or not least <= row[key] <= most:
            raise UserError(
                f"{place}: {key} is {short_json(row[key])}, but must be a whole number from "
                f"{least:,} to {most:,}"
            )
    for key, choices in {"schedule": tuple(SCHEDULES), "device": ("cpu", "cuda")}.items():
        if row[key] not in choices:
            raise UserError(
                f"{place}: {key} is {short_json(row[key])}, but must be one of {', '.join(choices)}"
            )
    _seconds(row, "clock_error_s", place)
    _seconds(row, "started_unix_s", place, most_s=1e11)
    stages = row["pp"] * row["stages_per_rank"]
    if stages > MOST_LAYERS:
        raise UserError(f"{place}: pp x stages_per_rank is {stages}, above {MOST_LAYERS:,}")
    return TraceHead(**{key: value for key, value in row.items() if key != "events"}), row["events"]


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} is {short_json(row)}, but must be an object")
    return row


def _check_keys(row: dict[str, Any], expected: set[str], place: str) -> None:
    if row.keys() != expected:
        needed = ", ".join(sorted(expected))
        raise UserError(f"{place} has the keys {short_json(sorted(row))}, but must have {needed}")


def _seconds(row: dict[str, Any], key: str, place: str, most_s: float = _MOST_S) -> float:
    value = row[key]
    # NaN and infinity fail the comparison. Whole numbers are legal.
    if type(value) not in (int, float) or not abs(value) <= most_s:
        raise UserError(
            f"{place}: {key} is {short_json(value)}, but must be a finite number of seconds, at "
            f"most {most_s:.0e}"
        )
    return float(value)


def _check_actions(run: Path, head: TraceHead, events: list[list[TracedEvent]]) -> None:
    """Check that all ranks together have run a whole schedule. The file's lines become its rows."""
    rows = [[event.name for event in row if event.is_action] for row in events]
    try:
        parse_csv(
            rows,
            f"step {head.step} of {run / FOLDER}",
            pp=head.pp,
            stages_per_rank=head.stages_per_rank,
            micro_batches=head.micro_batches,
        )
    except PlanError as error:
        raise UserError(f"{error} (after the colon: the pipeline rank, counted from 1)") from None
