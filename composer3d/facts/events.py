"""The events of a run, besides its metrics: their file, and a reader that trusts nothing.

``events.jsonl`` in the run's folder has a line for each start of the job, each checkpoint and each
report about ranks or bad steps. It is only added to: unlike ``metrics.jsonl``, it keeps what a run
has done beyond the checkpoint that it went on from. No torch here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from composer3d.facts.files import open_plain, parse_json

FILE = "events.jsonl"

# start: a job starts the run or goes on with it. save: a checkpoint is whole. stop: a signal or an
# error ended the job. lost ranks: the name of a report. end: the last step is done. ranks and bad
# steps: what ``Metrics.report`` has told.
Kind = Literal["start", "save", "stop", "lost ranks", "end", "ranks", "bad steps"]
_KINDS: tuple[str, ...] = get_args(Kind)

# Bytes of the file that are read, and of a line.
_FILE_LIMIT = 64 << 20
_LINE_LIMIT = 64 << 10

_MOST_STEP = 10**9
_MOST_UNIX_S = 1e11


class Event(NamedTuple):
    """Something that happened to a run.

    Attributes:
        step: the number of optimizer steps done.
        unix_s: when, in seconds since 1970.
        kind: what.
        text: the same in words.
        device: of a start, the name of the devices, such as "NVIDIA H100 80GB HBM3" or "cpu".
        seconds: of a save, for how long the training stood still.
    """

    step: int
    unix_s: float
    kind: Kind
    text: str
    device: str | None = None
    seconds: float | None = None


def line(event: Event) -> bytes:
    """Return an event as a line of the file."""
    values = {key: value for key, value in event._asdict().items() if value is not None}
    return (json.dumps(values) + "\n").encode()


def done_after(event: Event, done_before: int) -> int:
    """Return how many steps a run has done as of an event.

    Args:
        event: the next event of its file.
        done_before: what this function returned for the event before it; 0 for none.
    """
    # Only a start goes back, to a checkpoint.
    return event.step if event.kind == "start" else max(done_before, event.step)


def read(run: Path) -> Iterator[Event | None]:
    """Yield the events of a run in the order of its file, and None for each line that is none.

    A missing file has no events. At most 64 MiB are read.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        file = open_plain(run / FILE)
    except FileNotFoundError:
        return
    with file:
        size = 0
        while size < _FILE_LIMIT and (text := file.readline(_LINE_LIMIT)):
            size += len(text)
            yield _event(text)


def has_saved(run: Path) -> bool:
    """Return whether the events of a run have a save, since it last began. Raises OSError."""
    found = False
    for event in read(run):
        if event is not None and event.kind == "start" and not event.step:
            found = False
        elif event is not None and event.kind == "save":
            found = True
    return found


def _event(text: bytes) -> Event | None:
    try:
        row = parse_json(text)
    except ValueError:
        return None
    if not isinstance(row, dict) or not {"step", "unix_s", "kind", "text"} <= row.keys():
        return None
    values: dict[str, Any] = {key: row.get(key) for key in Event._fields}
    is_event = (
        # Not ``isinstance``: True is an int too.
        type(values["step"]) is int
        and 0 <= values["step"] <= _MOST_STEP
        and _is_seconds(values["unix_s"])
        and isinstance(values["kind"], str)
        and values["kind"] in _KINDS
        and isinstance(values["text"], str)
        and (values["device"] is None or isinstance(values["device"], str))
        and (values["seconds"] is None or _is_seconds(values["seconds"]))
    )
    return Event(**values) if is_event else None


def _is_seconds(value: object) -> bool:
    # NaN fails the comparison.
    return type(value) in (int, float) and 0 <= value <= _MOST_UNIX_S  # type: ignore[operator]
