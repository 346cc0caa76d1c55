"""Progress: a bar on a terminal, a few plain lines elsewhere, and results alone on stdout."""

import io
import sys
import threading
from types import SimpleNamespace

import pytest

from composer3d.runtime import progress
from composer3d.runtime.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test moves: its ``now_s``."""
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_pipe_gets_a_line_every_ten_seconds(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("verify", 40, "layouts") as work:
        for _ in range(40):
            clock.now_s += 1.6
            work.advance()
    # At 11.2, 22.4, 33.6, 44.8 and 56 seconds.
    assert capsys.readouterr() == (
        "",
        "verify: 7 of 40 layouts, 0:00:11 so far, about 0:00:53 left\n"
        "verify: 14 of 40 layouts, 0:00:22 so far, about 0:00:42 left\n"
        "verify: 21 of 40 layouts, 0:00:34 so far, about 0:00:30 left\n"
        "verify: 28 of 40 layouts, 0:00:45 so far, about 0:00:19 left\n"
        "verify: 35 of 40 layouts, 0:00:56 so far, about 0:00:08 left\n",
    )


def test_short_work_and_the_last_piece_say_nothing_beside_the_result(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("convert", 10, "B") as work:
        clock.now_s += 9.9
        work.advance(9)
        clock.now_s += 100
        work.advance(1)
        with work.paused():
            print("result")
    assert capsys.readouterr() == ("result\n", "")


def test_bytes_and_an_unknown_total(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    for total in (8_000_000, 0):
        with Progress("copy", total, "B") as work:
            clock.now_s += 10
            work.advance(2_000_000, "3 files")
    assert capsys.readouterr().err.splitlines() == [
        "copy: 2 of 8 MB, 0:00:10 so far, about 0:00:30 left, 3 files",
        "copy: 2 MB, 0:00:10 so far, 3 files",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_which_leaves_no_thread_and_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    for delay_s, is_shown in ((0.0, True), (100.0, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(progress, "_BAR_AFTER_S", delay_s)
        with Progress("verify", 4, "layouts") as work:
            for _ in range(4):
                with work.paused():
                    print("result")
                work.advance(note="a note")
        text = terminal.getvalue()
        assert ("verify" in text) == is_shown
        # The bar is wiped at the end.
        assert text.rstrip("\r").rsplit("\r", 1)[-1].strip() == ""
        assert "\n" not in text
    assert threading.active_count() == threads
    assert capsys.readouterr().out == "result\n" * 8
