"""``tools/house.py``: the counts of small sources, and the figures in ``docs/architecture.md``."""

import ast
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tools import house

PAGE = (house.ROOT / house.PAGE).read_text()
SOURCES = house.read_tree()
MOST_LINES = {"tensor parallelism": 1_900, "context parallelism": 2_700}


def test_the_page_says_how_long_the_reading_path_is() -> None:
    told = " ".join(PAGE.split())
    for technique, most in MOST_LINES.items():
        lines = house.lines_of(SOURCES, house.reading_path(PAGE, technique))
        assert f"{lines} lines with {technique}" in told
        assert lines <= most


@pytest.mark.parametrize("technique", house.TECHNIQUES)
def test_the_reading_path_is_whole(technique: str) -> None:
    """The files that every reader reads are those of the design, and each of them is there."""
    files = house.reading_path(PAGE, technique)
    assert set(files) <= set(SOURCES)
    heart = ("loop", "step", "compose", "stages", "executor", "contract")
    assert [Path(file).stem for file in files[2:8]] == list(heart)
    folder = technique.partition(" ")[0]
    assert sum(f"/parallel/{folder}/" in file for file in files) >= 3


def test_branches() -> None:
    function = """
        def pay(coins):
            if coins and (coins[0] or coins[1]) and coins[2]:
                return [coin for coin in coins if coin if coin > 1]
            for coin in coins:
                while coin:
                    coin = 1 if coin else 2
            try:
                match coins:
                    case 1: pass
                    case _: pass
            except ValueError:
                pass
    """
    # if, two ands, one or; a comprehension with two ifs; for, while, if-else; two cases; except.
    assert house.branches(ast.parse(dedent(function))) == 4 + 3 + 3 + 2 + 1


def test_functions_are_counted_with_their_inner_ones_and_without_docstrings() -> None:
    text = '''
        class Till:
            def pay(self):
                """Pay.

                All of it.
                """
                def refund():
                    return [c for c in self]
                return refund
    '''
    (body,) = house.functions({"composer3d/till.py": dedent(text), "tests/a.py": "def f(): pass"})
    assert body.place == "composer3d/till.py:3 Till.pay"
    assert (body.lines, body.statement_lines, body.branches) == (8, 4, 1)


def test_names_comments_and_copies() -> None:
    long = "a text that is so long that it does not stand twice by chance alone, or does it"
    body = f"    a = 1\n    b = 2\n    return {long!r}\n"
    sources = {
        "composer3d/a.py": f"class Row: ...\nWIDTH: int = 3\nLEFT = _right = 1\ndef f():\n{body}",
        "composer3d/b.py": f"def _g():\n    def h():\n        class Row: ...\n{body}  # a # b\n",
        "tests/c.py": "class Row: ...\nclass Other: ...\n",
        "README.md": "class Row",
    }
    package = {path: text for path, text in sources.items() if path.startswith("composer3d/")}
    assert house.class_names_in_many_files(package) == {"Row": [*package]}
    assert house.class_names_in_many_files(sources) == {"Row": [*package, "tests/c.py"]}
    assert house.public_names(package) == 4  # Row, WIDTH, LEFT and f
    assert house.comments(package) == 1
    assert house.duplicates(sources) == 1  # the text
    twice = {"composer3d/a.py": f"def f():\n{body}", "composer3d/b.py": f"def g():\n{body}"}
    assert house.duplicates(twice) == 2  # the body as well


def test_a_class_name_of_the_package_means_one_thing() -> None:
    """Only ``Options`` stands in many files: each command has its own."""
    package = {path: text for path, text in SOURCES.items() if path.startswith("composer3d/")}
    assert set(house.class_names_in_many_files(package)) == {"Options"}


def test_a_commit_is_read_without_a_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True)

    git("init", "--quiet")
    files = ["README.md", house.PAGE, "recipes/a.toml", "composer3d/a/b.py", "tests/c.py"]
    for name in [*files, "docs/other.md", "other.py", "recipes/a/b.toml"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / "README.md").write_text("changed\n")
    assert house.read_commit("HEAD", tmp_path) == {name: f"{name}\n" for name in files}
    assert house.read_tree(tmp_path) == {name: f"{name}\n" for name in files} | {
        "README.md": "changed\n"
    }
