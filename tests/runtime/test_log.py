"""The log: information without a prefix, warnings with the rank's identity."""

import logging

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
