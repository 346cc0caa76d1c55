"""Python text as data."""

import pytest

from composer3d.facts.errors import RecipeError
from composer3d.imports.literal import Unread, arithmetic, dicts_of


@pytest.mark.parametrize(
    ("text", "value"), [("8*8*8", 512), ("-2 + 3", 1), ("7 // 2", 3), ("8/2", 4), ("2*(3%2)", 2)]
)
def test_arithmetic_of_integers(text: str, value: int) -> None:
    assert arithmetic(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "7/2",
        "1.5*2",
        "2**3",
        "9**9**9",
        "x",
        "f(1)",
        "1/0",
        "10**18*10",
        "9" * 19,
        "(" * 150,
        "1" + "+1" * 300,
        "",
    ],
)
def test_other_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|expression|operator|number"):
        arithmetic(text)


def test_dicts_and_keywords_are_read() -> None:
    text = (
        "import os\n"
        "a = {'x': 1, 'in': {'y': [1, 2]}, 'z': 2 * 4, 'e': os.environ['N'], **b}\n"
        "config: dict = TransformerConfig(num_layers=4, init=os.system('touch /tmp/never'))\n"
        "def f():\n    return dict(w=None)\n"
    )
    entries = dicts_of(text, "x.py")
    assert {".".join(entry.path): entry.value for entry in entries} == {
        "x": 1,
        "in.y": [1, 2],
        "z": 8,
        "e": Unread("os.environ['N']"),
        "num_layers": 4,
        "init": Unread("os.system('touch /tmp/never')"),
        "w": None,
    }
    assert entries[0].line == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = {", "x.py:1: not Python"),
        ("a = " + "(" * 50_000, "x.py"),
        ("a = " + "-" * 50_000 + "1", "x.py"),
        ("a = {'x': " + "9" * 10_000 + "}", "x.py"),
        ("a = '\0'", "x.py"),
    ],
)
def test_what_is_no_python_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        dicts_of(text, "x.py")
