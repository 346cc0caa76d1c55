"""The log: information without a prefix, warnings with the rank's identity."""

import logging
import re
import time
from pathlib import Path

import pytest

from composer3d.runtime import log


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        (True, ["plain", "[rank 3 (tp1)] warning: two", "[rank 3 (tp1)] warning: lines"]),
        (False, ["[rank 3 (tp1)] warning: two", "[rank 3 (tp1)] warning: lines"]),
    ],
)
def test_log_names_the_rank(
    main: bool, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("rank 9", main=True)
    log.setup("rank 3 (tp1)", main=main)  # replaces the first
    log.get().info("plain")
    log.get().warning("two\nlines")
    assert capsys.readouterr().err.splitlines() == expected
    assert log.get() is logging.getLogger("composer3d")


def lines_of(path: Path) -> list[str]:
    """The lines of a log, whose times are checked and removed."""
    lines = path.read_text().splitlines()
    stamped = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (.*)", line) for line in lines]
    assert all(stamped)
    return [match[1] for match in stamped if match is not None]


def test_the_file_has_early_lines_and_later_ones_and_grows_over_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / log.FILE
    for start in range(2):
        log.setup("rank 0", main=True)
        log.get().info(f"early {start}")
        assert path.exists() == (start == 1)
        log.keep_in(path, lambda: True)
        log.get().warning("two\nlines")
        log.keep(["kept alone"])
    warned = ["[rank 0] warning: two", "[rank 0] warning: lines"]
    assert lines_of(path) == [
        *("early 0", *warned, "kept alone"),
        *("early 1", *warned, "kept alone"),
    ]
    assert "kept alone" not in capsys.readouterr().err


def test_nothing_is_written_for_another_rank_or_without_permission(tmp_path: Path) -> None:
    path = tmp_path / log.FILE
    log.setup("rank 1", main=False)
    log.keep_in(path, lambda: True)
    log.get().warning("of rank 1")
    log.setup("rank 0", main=True)
    log.get().info("early")
    log.keep_in(path, lambda: False)
    log.get().info("the folder belongs to another job")
    assert not path.exists()


@pytest.mark.parametrize("place", ["link", "folder", "missing"])
def test_a_file_that_cannot_be_written_is_warned_of_once(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "inner" / log.FILE
    if place != "missing":
        path.parent.mkdir()
    if place == "link":
        path.symlink_to(tmp_path / "theirs")
    if place == "folder":
        path.mkdir()
    log.setup("", main=True)
    log.get().info("one")
    log.keep_in(path, lambda: True)
    log.get().info("two")
    one, warning, two = capsys.readouterr().err.splitlines()
    assert (one, two) == ("one", "two")
    assert warning.startswith(f"warning: {path} cannot be written: ")
    assert not (tmp_path / "theirs").exists()


def test_phases_of_the_start_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("", main=True)
    log.add_phase("processes", time.monotonic() - 2.0)
    with log.phase("model"):
        pass
    time.sleep(0.3)
    log.say_phases()
    log.say_phases()  # they are said once
    said = capsys.readouterr().err
    seconds = re.fullmatch(
        r"started in (\d+\.\d) s: processes (\d+\.\d), model (\d+\.\d), other (\d+\.\d)\n", said
    )
    assert seconds is not None
    total, processes, model, other = map(float, seconds.groups())
    assert total >= 2.3
    assert other >= 0.3
    assert total == pytest.approx(processes + model + other, abs=0.2)


def test_a_long_phase_is_said_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_SLOW_S", 0.01)
    for main in (True, False):
        log.setup("", main=main)
        with log.phase("data"):
            time.sleep(0.2)
        assert capsys.readouterr().err == ("starting: data ...\n" if main else "")
