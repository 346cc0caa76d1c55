"""A line of an error is one line, whatever a stranger has named a file."""

import pytest

from composer3d.facts.errors import CheckpointError
from composer3d.facts.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é and 世界", "plain, é and 世界"),
        ("a\nb\r\t", r"a\nb\r\t"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\u202ecba", r"\u202ecba"),
        ("\udcff", r"\udcff"),
    ],
)
def test_characters_that_are_not_printable_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert CheckpointError(text).lines == (shown,)
    assert CheckpointError([text, "x"]).lines == (shown, "x")
    assert str(CheckpointError(["x", text])) == f"x\n{shown}"
