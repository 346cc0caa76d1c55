"""Traces of the pipeline: what is written is read, and files of others are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer3d.facts import trace
from composer3d.facts.errors import UserError
from composer3d.facts.trace import TracedEvent, TraceHead

Rows = list[dict[str, Any]]

FIRST = [
    TracedEvent("0F0", 0.1, 0.2),
    TracedEvent("messages", 0.2, 0.35),
    TracedEvent("0B0", 0.35, 0.5),
    TracedEvent("gradients", 0.5, 0.6),
]
SECOND = [
    TracedEvent("messages", 0.1, 0.21),
    TracedEvent("1F0", 0.21, 0.3),
    TracedEvent("1B0", 0.3, 0.34),
]


def head(pp_rank: int, step: int = 3, started_unix_s: float = 1e9) -> TraceHead:
    return TraceHead(
        step=step,
        pp_rank=pp_rank,
        pp=2,
        schedule="1F1B",
        stages_per_rank=1,
        micro_batches=1,
        device="cpu",
        started_unix_s=started_unix_s,
        clock_error_s=0.001 * pp_rank,
    )


def write(run: Path, step: int = 3, started_unix_s: float = 1e9) -> None:
    """Add a step to the files of both ranks."""
    (run / trace.FOLDER).mkdir(exist_ok=True)
    for rank, events in enumerate((FIRST, SECOND)):
        with trace.file_of(run, rank).open("ab") as file:
            file.write(trace.lines(head(rank, step, started_unix_s), events))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    for step in (3, 4):
        write(tmp_path, step)
    found = trace.read(tmp_path, 3)
    assert found.heads == [head(0), head(1)]
    assert found.events == [FIRST, SECOND]
    assert trace.read(tmp_path).heads == [head(0, 4), head(1, 4)]


def test_the_last_trace_of_a_step_is_read_from_all_ranks(tmp_path: Path) -> None:
    for started_unix_s in (1e9, 2e9):
        write(tmp_path, 3, started_unix_s)
    assert [one.started_unix_s for one in trace.read(tmp_path).heads] == [2e9, 2e9]
    # Rank 1 was killed before it wrote the second trace.
    path = trace.file_of(tmp_path, 1)
    path.write_bytes(trace.lines(head(1), SECOND))
    with pytest.raises(UserError, match=r"pp1\.jsonl lacks step 3 as .*pp0\.jsonl has it"):
        trace.read(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pp0\.jsonl is missing; a run writes it with metrics"):
        trace.read(tmp_path)
    write(tmp_path)
    with pytest.raises(UserError, match=r"pp0\.jsonl has no step 9; train with metrics"):
        trace.read(tmp_path, 9)
    trace.file_of(tmp_path, 0).write_bytes(b"")
    with pytest.raises(UserError, match=r"pp0\.jsonl has no step; train with metrics"):
        trace.read(tmp_path)
    trace.file_of(tmp_path, 0).unlink()
    os.mkfifo(trace.file_of(tmp_path, 0))
    with pytest.raises(UserError, match=r"pp0\.jsonl cannot be read \(is a named pipe"):
        trace.read(tmp_path)


def set_in_head(key: str, value: object) -> Callable[[Rows], object]:
    return lambda rows: rows[0].update({key: value})


def set_in_event(key: str, value: object) -> Callable[[Rows], object]:
    return lambda rows: rows[1].update({key: value})


HOSTILE: list[tuple[Callable[[Rows], object], str]] = [
    *(
        (set_in_head(key, value), rf":1: {key} is .*, but must be a whole number from")
        for key, value in (
            ("step", 0),
            ("step", True),
            ("pp", 1),
            ("pp", 10**12),
            ("pp", 2.0),
            ("stages_per_rank", 10**9),
            ("micro_batches", "1"),
            ("events", -1),
            ("events", 10**9),
        )
    ),
    (set_in_head("pp_rank", 1), ":1: pp_rank is 1, but must be 0"),
    (set_in_head("stages_per_rank", 9999), ":1: pp x stages_per_rank is 19998, above 10,000"),
    (
        set_in_head("schedule", "x" * 3000),
        r':1: schedule is "x+\.\.\. \(3,002 characters\), but must be one of GPipe',
    ),
    (set_in_head("schedule", ["1F1B"]), ":1: schedule is"),
    (set_in_head("device", None), ":1: device is null"),
    (set_in_head("started_unix_s", 1e300), ":1: started_unix_s is 1e.300, but must be a finite"),
    (set_in_head("clock_error_s", 10**400), ":1 is not JSON .* of 401 digits"),
    (set_in_head("more", 1), ":1 has the keys .*, but must have clock_error_s"),
    (lambda rows: rows[0].pop("pp"), ":1 has the keys"),
    (lambda rows: rows[0].update(events=5), "pp0.jsonl ends after 4 of the 5 events"),
    (lambda rows: rows[0].update(events=3), ":5 has the keys"),
    (set_in_event("event", "0X0"), ':2: "0X0" is no event; it must be an action such as 0F0'),
    (set_in_event("event", 7), ":2: 7 is no event"),
    (set_in_event("event", "0F" + "9" * 50), ':2: "0F9+" is no event'),
    (set_in_event("begin_s", float("nan")), r":2 is not JSON \(it holds NaN"),
    (set_in_event("begin_s", "0.1"), ':2: begin_s is "0.1", but must be a finite number'),
    (set_in_event("begin_s", False), ":2: begin_s is false"),
    (set_in_event("end_s", 1e9), r":2: end_s is 1000000000.0, but must be .* at most 1e\+07"),
    (set_in_event("end_s", 0.0), ":2: the event is from 0.1 to 0.0 s"),
    (set_in_event("end_s", 0.3), ":3: the event is from 0.2 to 0.35 s, but the one before it ends"),
    (set_in_event("event", "0F1"), ":1: 0F1 is beyond the 1 micro-batches"),
    (set_in_event("event", "1F0"), "must put stages 0 to 1 on 2 ranks"),
    (set_in_event("event", "messages"), ":1: 0B0 comes before 0F0"),
    (set_in_head("micro_batches", 2), "lacks step 3 as"),
]


@pytest.mark.parametrize(("change", "words"), HOSTILE)
def test_a_wrong_value_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[Rows], object], words: str
) -> None:
    write(tmp_path)
    path = trace.file_of(tmp_path, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=words) as caught:
        trace.read(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1]\n", r":1 is \[1\], but must be an object"),
        (b"\xff\n", ":1 is not JSON"),
        (b"[" * 4000 + b"\n", ":1 is not JSON"),
        (b'{"step": 1' + b" " * 5000, ":1 is longer than 4,096 bytes"),
        (b'{"step": 1' + b"0" * 4000 + b"}\n", ":1 is not JSON|:1 has the keys"),
    ],
)
def test_a_file_without_steps_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    write(tmp_path)
    trace.file_of(tmp_path, 0).write_bytes(content)
    with pytest.raises(UserError, match=words):
        trace.read(tmp_path)


def test_a_schedule_that_cannot_have_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    events = [SECOND[1]._replace(name="1B0"), SECOND[2]._replace(name="1F0")]
    trace.file_of(tmp_path, 1).write_bytes(trace.lines(head(1), events))
    with pytest.raises(UserError, match=r"step 3 of .*timeline:2: 1B0 comes before 1F0"):
        trace.read(tmp_path)
