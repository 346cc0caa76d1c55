"""``facts.events``: what is written is read, and nothing else is."""

from pathlib import Path

import pytest

from composer3d.facts import events
from composer3d.facts.events import FILE, Event

START = Event(0, 1.7e9, "start", "8 ranks on cpu", "cpu")
SAVE = Event(50, 1.7e9 + 9, "save", "checkpoint of step 50", None, 0.25)


def test_events_come_back(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(events.line(START) + events.line(SAVE))
    assert list(events.read(tmp_path)) == [START, SAVE]


def test_a_run_without_the_file_has_no_events(tmp_path: Path) -> None:
    assert list(events.read(tmp_path)) == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'"start"',
        b'{"step": 1, "unix_s": 1, "kind": "save"}',
        b'{"step": true, "unix_s": 1, "kind": "save", "text": ""}',
        b'{"step": -1, "unix_s": 1, "kind": "save", "text": ""}',
        b'{"step": 1, "unix_s": NaN, "kind": "save", "text": ""}',
        b'{"step": 1, "unix_s": 1e999, "kind": "save", "text": ""}',
        b'{"step": 1, "unix_s": 1, "kind": "other", "text": ""}',
        b'{"step": 1, "unix_s": 1, "kind": ["save"], "text": ""}',
        b'{"step": 1, "unix_s": 1, "kind": "save", "text": 3}',
        b'{"step": 1, "unix_s": 1, "kind": "save", "text": "", "device": {}}',
        b'{"step": 1, "unix_s": 1, "kind": "save", "text": "", "seconds": "1"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_other_lines_are_no_events(line: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(line[:60_000] + b"\n" + events.line(SAVE))
    assert list(events.read(tmp_path)) == [None, SAVE]


def test_a_long_line_is_read_in_pieces(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"x" * 200_000 + b"\n" + events.line(SAVE))
    found = list(events.read(tmp_path))
    assert found[-1] == SAVE
    assert set(found[:-1]) == {None}
