"""The lines of keys, compared with tomli's values, on every recipe and on misleading texts.

In our texts every number is the line on which its statement begins. So the values that tomli
reads say where each key is.
"""

import contextlib
import time
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from composer3d.facts.statements import KeyPath, key_lines, statements
from tools.prove.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

TRICKY = {
    "dotted and quoted": """a.b . "c.d" = 1
'a'."x y".'' = 2
"\\u0061\\"#" = 3
a."b]".c = 4
""",
    "headers": """# [no]
[ a . 'b.c' ]  # [nor this]
d = 3
[a]
d = 5
["]"]
"=" = 7
""",
    "strings that look like keys": '''s1 = "x = 1 # no"
s2 = 'y = "2"'
s3 = """
z = 4
\\""" still = "inside" ""\\"
[no]"""
k = 7
s4 = \'\'\'
w = 'q' \\
''\'\'\'
m = 11
s5 = """"quoted""""" # five quotes end it
s6 = """"""
s7 = \'\'\'\'\'\'
n = 15
''',
    "arrays": """a = [ # one
  2, [2, "]"], { b = 2, c.d = 2 },
  # 3 = 3
  "4 = 4", 4
  , 5,
]
b = [[7], []]
""",
    "inline tables": """p = { a = 1, b.c = 1, "}" = 1, d = { e = 1, f = [1, 1] }, g = {} }
q = { s = "}, x = 2", t = 2 }
[r]
p = { a = 4 }
""",
    "inline tables over lines": """p = {
  a = 1, # }
  b = { c = 1,
    d = 1 },
}
q = 6
""",
    "scalars": """d = 1979-05-27 07:32:00
e = 1979-05-27 # x = 1
f = +1.5e-3
g = true
h = 5
""",
    "numbers with points": """a = [1.5, 2.5,
  3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5, 12.5, 13.5, 14.5, 15.5, 16.5, 17.5, 18.5, 19.5]
b = 3
""",
    "comments between lines of an array": """a = [
  # [ { \"\"\"
  1.5, # '
# ]

  # \"
  ]  # [
b = 8
""",
    "no line at the end": "a = 1\nb = 2",
    "carriage returns": 'a = 1\r\ns = """\r\n\r\n"""\r\n[t]\r\nb = 6\r\n',
    "nothing": "  \t\n# a = 1\n",
}


def paths_of(value: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    """Return every key of a tree that tomli made, with its value."""
    found: dict[KeyPath, Any] = {path: value} if path else {}
    for key, inner in value.items() if isinstance(value, dict) else ():
        found |= paths_of(inner, (*path, key))
    return found


def lines_by_trial(text: str) -> dict[KeyPath, int]:
    """Find the lines slowly, as a reference: a statement is the fewest lines that tomli accepts."""

    def paths(tree: dict[str, Any], path: KeyPath = ()) -> list[KeyPath]:
        return [
            inner
            for key, value in tree.items()
            for inner in (
                (isinstance(value, dict) and paths(value, (*path, key))) or [(*path, key)]
            )
        ]

    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    begin, pending = 1, ""
    for number, line in enumerate(text.split("\n"), start=1):
        pending += f"{line}\n"
        try:
            found = paths(tomli.loads(pending))
        except ValueError:  # the statement goes on
            continue
        if pending.lstrip().startswith("["):
            table, found = found[-1], [()]
        for path in (table + path for path in found):
            for depth in range(1, len(path) + 1):
                lines.setdefault(path[:depth], begin)
        begin, pending = number + 1, ""
    return lines


def assert_lines_are_right(text: str) -> None:
    values, lines = paths_of(tomli.loads(text)), key_lines(statements(text))
    assert lines == lines_by_trial(text)
    assert lines.keys() == values.keys()
    for path, value in values.items():
        if type(value) is int:
            assert lines[path] == value, path
        elif isinstance(value, dict):
            inner = [line for other, line in lines.items() if other[: len(path)] == path]
            assert lines[path] <= min(inner)


@pytest.mark.parametrize("text", TRICKY.values(), ids=TRICKY)
def test_tricky_texts(text: str) -> None:
    assert_lines_are_right(text)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes(path: Path) -> None:
    text = path.read_text()
    lines = key_lines(statements(text))
    assert lines == lines_by_trial(text)
    assert lines.keys() == paths_of(tomli.loads(text)).keys()
    written = text.splitlines()
    for keys, line in lines.items():
        assert keys[-1] in written[line - 1]


NAMES = st.text(alphabet="ab.-_ #=[]{}\"'\\\u00e9", max_size=3) | st.sampled_from(
    ["x", "y1", "-", "z_z"]
)
NOISE = st.sampled_from(["", "", "\n", "# a = 1\n", "  # [t]\n\n", "\t\n"])
LEAVES = st.sampled_from(
    [
        "1",
        "1",
        "'''\n'''",
        '"""a\n\\"""\n"""',
        '"]"',
        "'}'",
        "2020-01-01 01:02:03",
        "2020-01-01",
        "[]",
    ]
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def written_key(name: str) -> str:
    bare = name and name.isascii() and all(char.isalnum() or char in "-_" for char in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Writer:
    """Writes trees as TOML with noise between statements.

    It writes each number 1 as the line on which its statement begins.
    """

    def __init__(self, draw: Any) -> None:
        self.text, self.draw = "", draw

    def line(self) -> int:
        return self.text.count("\n") + 1

    def value(self, tree: Any, line: int) -> None:
        if isinstance(tree, list):
            self.text += "["
            for element in tree:
                self.text += self.draw(NOISE) + " "
                self.value(element, line)
                self.text += ","
            self.text += self.draw(NOISE) + "]"
        elif isinstance(tree, dict):
            self.text += "{"
            for index, (name, inner) in enumerate(tree.items()):
                self.text += ", " * (index > 0) + written_key(name) + " ="
                self.value(inner, line)
            self.text += "}"
        else:
            self.text += f" {line}" if tree == "1" else f" {tree}"

    def document(self, tables: dict[str, dict[str, Any]]) -> None:
        for table, content in tables.items():
            self.text += f"{self.draw(NOISE)}[ {written_key(table)} ] # x\n"
            for name, inner in content.items():
                self.text += f"{self.draw(NOISE)}{written_key(name)}\t="
                self.value(inner, self.line())
                self.text += "\n"


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, TREES, max_size=4), max_size=3), st.data())
def test_any_text(tables: dict[str, dict[str, Any]], data: Any) -> None:
    writer = Writer(data.draw)
    writer.document(tables)
    assert_lines_are_right(writer.text)


def test_dates_are_skipped_as_a_whole() -> None:
    found = tomli.loads(TRICKY["scalars"])
    assert isinstance(found["d"], datetime)
    assert isinstance(found["e"], date)


SIZE = 256 << 10
# Texts as large as a recipe may be.
LARGE = {
    "3,000 lines of an array": "[parallel]\nstages = [\n" + "  1,\n" * 3000 + "]\n",
    "an array": "a = [" + "1," * (SIZE // 2) + "]",
    "an array of lines": "a = [" + "1.5,\n" * (SIZE // 5) + "]",
    "open brackets": "a = " + "[" * SIZE,
    "pairs of brackets": "a = [" + "[]," * (SIZE // 3) + "]",
    "quotes": "a = " + '"' * SIZE,
    "literal quotes": "a = " + "'" * SIZE,
    "quotes in a long string": 'a = """' + '" ' * (SIZE // 2) + '"""',
    "escapes": 'a = "' + "\\\\" * (SIZE // 2) + '"',
    "keys": "".join(f"k{number} = 1\n" for number in range(SIZE // 11)),
    "a dotted key": "a." * (SIZE // 2) + "b = 1",
    "a dotted key in a table": "t = { " + "a." * (SIZE // 2) + "b = 1 }",
    "headers": "".join(f"[a.b.c.d.e.f.g.h{number}]\n" for number in range(4000)),
    "an inline table": "a = {" + ",".join(f"k{number}=1" for number in range(SIZE // 9)) + "}",
    "comments": "#\n" * (SIZE // 2),
    "blank lines": "\n" * SIZE,
    "blanks": " \t" * (SIZE // 2),
    "a long line": "a = '" + "x" * SIZE + "'",
    "a long key": "x" * SIZE + " = 1",
    "a string without end": 'a = """' + "x\n" * (SIZE // 2),
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_large_text_takes_linear_time(text: str) -> None:
    def seconds(text: str) -> float:
        begin = time.process_time()
        with contextlib.suppress(ValueError):
            key_lines(list(statements(text)))
        return time.process_time() - begin

    assert seconds(text) < 2  # quadratic time would take minutes


@pytest.mark.parametrize(
    ("opening", "what"), [("[", "brackets"), ("{ t = ", "brackets"), ("a.", "the parts of a key")]
)
def test_deep_nesting_is_refused_with_its_line(opening: str, what: str) -> None:
    assert len(list(statements("x = 1\n" + opening * 16))) == 2
    with pytest.raises(ValueError, match=f"^line 2 nests {what} deeper than 16$"):
        list(statements("x = 1\n" + opening * 17))
