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
        "**b": Unread("b"),
        "num_layers": 4,
        "init": Unread("os.system('touch /tmp/never')"),
        "w": None,
    }
    assert entries[0].line == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What may not run is unsure.
        ("c = dict(a=1)\nif X:\n  c['b'] = 2\nelse:\n  c.b = 3", "a=1 b=2? b=3?"),
        ("for x in y:\n  c['a'] = 1\nwhile x:\n  c = {'b': 2}", "a=1? b=2?"),
        ("try:\n  c.a = 1\nexcept E:\n  c.a = 2", "a=1? a=2?"),
        ("match x:\n  case 1:\n    c.a = 1", "a=1?"),
        ("c = {'a': 1} if x else dict(a=2)", "a=1? a=2?"),
        ("with x:\n  c.a = 1\nif __name__ == '__main__':\n  c.b = 2", "a=1 b=2"),
        # A function may change its own names; that it is called is not known.
        ("def f():\n  c = g()\n  c.a = 1\n  c.update(b=2)\n  return dict(d=3)", "a=1 b=2 d=3"),
        ("def f(d):\n  c.a = 1\n  c.update(b=2)\n  d.e = 3", "a=1? b=2? e=3?"),
        # What is merged.
        (
            "B = dict(a=1)\nc = {**B, 'b': 2}\nd = dict(B, e=3)\nB.update({'f': 4})",
            "a=1 b=2 e=3 f=4",
        ),
        ("c = {'b': 2, **B}\nc.update(D)\nc = dict(E) | {'f': 3}", "b=2 **B **D **E f=3"),
        ("B = {}\nB = g()\nc = {**B}", "**B"),
        ("B = {}\ndef f(B):\n  return T(**B)", "**B"),
        ("B = {'a': 1}\nB |= {'b': 2}\nB |= D\nc = B | dict(e=3)", "a=1 b=2 **D e=3"),
        # What is computed.
        ("c['a'] *= 2\ndel c['b']\nc.d, c.e = 1, 2", "a b d e"),
        ("c[k] = 1\nd = {f'{x}': 2, 3: 4}\nx[0] = x[1:2] = 5", "[k]=1 [f'{x}']=2"),
        ("c.a = c.b = 1\nc.d: int = 2", "a=1 b=1 d=2"),
    ],
)
def test_what_may_not_count_is_told(text: str, expected: str) -> None:
    found = []
    for path, value, _, is_unsure in dicts_of(text, "x.py"):
        shown = "" if isinstance(value, Unread) else f"={value}"
        found.append(f"{'.'.join(path)}{shown}{'?' if is_unsure else ''}")
    assert " ".join(found) == expected


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
