"""The README and the pages in ``docs/`` are true as far as a program can check.

Their Python runs, their commands parse, and the files, links and recipe keys that they name exist.
"""

import ast
import contextlib
import importlib.util
import io
import os
import re
import shlex
import socket
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli
import torch

import composer3d
from composer3d.commands.registry import make_parser, parse
from composer3d.models.registry import OURS
from composer3d.recipe.schema import model_table
from composer3d.recipe.values import FIELDS as OUR_FIELDS
from composer3d.recipe.values import entries_of
from composer3d.runtime.launch import Pool
from tools.bench import commands as bench
from tools.prove.__main__ import PROOFS
from tools.prove.paths import ROOT

README = ROOT / "README.md"
LIBRARY = ROOT / "docs" / "library.md"
# A program of LIBRARY, which its commands name. tests/test_library.py runs it.
TINY = "tiny.py"
PAGES = [
    README,
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tools" / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
# The keys of all architectures of composer3d.
FIELDS = {
    key: entry for name in OURS for key, entry in entries_of({"model": model_table(name)}).items()
} | dict(OUR_FIELDS)
CHANGELOG = ROOT / "CHANGELOG.md"  # it names files that are gone, so only its links are checked


class Snippet(NamedTuple):
    """A piece of a page. ``str()`` is the id of its test."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:60]}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def prose_of(page: Path) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    """The texts between single backticks, outside of fenced blocks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose_of(page))]


def commands_of(page: Path) -> list[str]:
    """The commands of a page: the lines of its bash blocks without comments, and inline ones."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [line.partition(" #")[0].strip() for line in lines]
    is_command = re.compile(r"(bash|python|composer3d) (?!\.\.\.)\S")
    commands += [code for code in inline_code(page) if is_command.match(code)]
    return [command for command in commands if command]


PYTHON = [Snippet(name_of(page), block) for page in PAGES for block in blocks(page, "python")]
TOML = [Snippet(name_of(page), block) for page in PAGES for block in blocks(page, "toml")]
COMMANDS = list(
    dict.fromkeys(Snippet(name_of(page), line) for page in PAGES for line in commands_of(page))
)


def has_a_test_of_its_own(snippet: Snippet) -> bool:
    """Whether another test runs a program: it has arguments, keeps checkpoints, or needs lm-eval.

    These tests are in tests/test_library.py and tests/generate/test_tasks.py.
    """
    return snippet.page == "README.md" or any(
        word in snippet.text for word in ("sys.argv", "import lm_eval")
    )


def test_the_pages_have_programs_commands_and_recipes() -> None:
    assert len(blocks(README, "python")) == 1
    assert len(PYTHON) >= 4
    assert len(commands_of(README)) > 12
    assert len(COMMANDS) > 50
    assert len(TOML) >= 3


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) < 1600


def run_block(text: str, port: int) -> dict[str, Any]:
    """Run a block as a program in a worker; returns its numbers, tensors as lists."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "page.md", "exec"), names)
    numbers = {
        name: value for name, value in names.items() if isinstance(value, torch.Tensor | float)
    }
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in numbers.items()
    }


def run(pool: Pool, text: str, world_size: int) -> list[dict[str, Any]]:
    """Run a block as every rank of a world."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return pool.run(run_block, {"text": text, "port": port}, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_attention_runs_as_printed(pool: Pool, world_size: int) -> None:
    for names in run(pool, blocks(LIBRARY, "python")[-1], world_size):
        ids_BT = torch.tensor(names["ids_BT"])
        mask = (ids_BT[:, None, :, None] == ids_BT[:, None, None, :]).tril()
        q, k, v = (torch.tensor(names[name]) for name in ("q_BHTD", "k_BHTD", "v_BHTD"))
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(torch.tensor(names["whole_BHTD"]), whole)


@pytest.mark.parametrize(
    "program",
    [snippet for snippet in PYTHON if not has_a_test_of_its_own(snippet)],
    ids=str,
)
def test_a_program_runs_as_printed(pool: Pool, program: Snippet) -> None:
    # An exception in the program fails the test.
    run(pool, program.text, 1)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_parses(command: Snippet) -> None:
    # What a shell does with the output is no argument.
    words = shlex.split(command.text.partition(" > ")[0])
    names = [Path(word).name for word in words]
    if "composer3d" in names:
        check_composer3d(words[names.index("composer3d") + 1 :])
    elif TINY in words:
        check_tiny(words[words.index(TINY) + 1 :])
    elif words[0] == "bash":
        check_script(words[1], words[2:])
    elif words[0] == "python":
        check_python(words[1:])
    elif words[0] == "pip":
        check_options_are_files(words[1:])
    else:
        pytest.fail(f"{command}: a program that this test does not know")


def check_composer3d(arguments: list[str]) -> None:
    """Parse the arguments of ``composer3d``. The name of a command alone must be one."""
    if len(arguments) == 1 or arguments[-1] in ("--version", "--verbose", "--help"):
        with pytest.raises(SystemExit) as stop:
            parse(arguments if arguments[-1].startswith("-") else [*arguments, "--help"])
        assert stop.value.code == 0
        return
    assert not arguments[0].startswith("-"), "no command"
    for override in getattr(make_parser().parse_args(arguments), "sets", []):
        assert override.partition("=")[0] in FIELDS


def file_of(script: str) -> Path:
    """Return the file of a script, which a page names as it is or as ``composer3d launch`` does."""
    copied = ROOT / "tools" / "launch" / script
    return copied if copied.is_file() else ROOT / script


def check_tiny(arguments: list[str]) -> None:
    """Check what the program of LIBRARY is told to do, and the keys that it is given."""
    assert f"Save this as `{TINY}`" in LIBRARY.read_text()
    job, *overrides = arguments
    assert job in ("train", "verify")
    assert {text.partition("=")[0] for text in overrides} <= FIELDS.keys()


def check_script(script: str, arguments: list[str]) -> None:
    """Check that a script exists and knows the options."""
    assert file_of(script).is_file()
    if script == "tools/prove/run":
        name, *options = arguments
        for proof in name.split("|"):
            help_text = io.StringIO()
            with pytest.raises(SystemExit), contextlib.redirect_stdout(help_text):
                importlib.import_module(PROOFS[proof]).main(["--help"])
            assert [word for word in options_in(options) if word not in help_text.getvalue()] == []
    elif script == "tools/check":
        assert arguments in ([], ["--no-tests"])
    elif script == "tools/test":
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
    else:
        assert arguments == []


def check_python(arguments: list[str]) -> None:
    """Parse the arguments of a benchmark. Other programs must exist and know their options."""
    if arguments[:2] == ["-m", "tools.bench"]:
        if arguments[2:] != ["COMMAND"]:
            bench._parser().parse_args(arguments[2:])
    elif arguments[0] == "-m":
        check_options(importlib.util.find_spec(arguments[1]), arguments[2:])
    else:
        source = file_of(arguments[0]).read_text()
        assert [word for word in options_in(arguments) if f'"{word}"' not in source] == []


def check_options(spec: Any, arguments: list[str]) -> None:
    """Check that a module exists and that its source has each option as a text."""
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    if path.with_name("__main__.py").is_file() and path.name == "__init__.py":
        path = path.with_name("__main__.py")
    source = path.read_text()
    assert [word for word in options_in(arguments) if f'"{word}"' not in source] == []


def options_in(arguments: list[str]) -> list[str]:
    """The options among arguments, without ``--help``, which argparse adds."""
    return [word for word in arguments if word.startswith("--") and word != "--help"]


def check_options_are_files(arguments: list[str]) -> None:
    """Check the constraints file of a pip command."""
    assert arguments[0] == "install"
    assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()


@pytest.mark.parametrize("block", TOML, ids=str)
def test_keys_of_a_recipe_exist(block: Snippet) -> None:
    recipe = tomli.loads(block.text)
    if "architecture" in recipe.get("model", {}):
        del recipe["model"]  # its keys are the fields of the user's own shape
    keys = {
        f"{table}.{name}"
        for table, content in recipe.items()
        if isinstance(content, dict)
        for name in content
    }
    assert keys <= FIELDS.keys()
    assert {name for name, value in recipe.items() if not isinstance(value, dict)} <= {"base"}


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them from its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose_of(page))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    words = [word for command in commands_of(page) for word in shlex.split(command)]
    words += [word for code in inline_code(page) for word in code.split()]
    named = [
        word for word in words if re.match(r"(recipes|tests|tools|composer3d|docs)/[\w./-]+$", word)
    ]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_has_links_and_pages_have_files() -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", README.read_text())
    assert len(links) > 15
    assert {name_of(page) for page in PAGES if page.parent.name == "docs"} <= {
        *links,
        *(link.partition("#")[0] for link in links),
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_in_the_text_exist(page: Path) -> None:
    tables = {key.split(".")[0] for key in FIELDS}
    named = re.findall(r"`(?:\[(\w+)\] )?([a-z]+\.[a-z_]+)(?: = [^`]*)?`", page.read_text())
    keys = [
        key
        for _, key in named
        if key.split(".")[0] in tables and not key.endswith((".jsonl", ".toml", ".json", ".py"))
    ]
    assert [key for key in keys if key not in FIELDS] == []


def test_many_keys_are_in_the_text() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert sum(f"`{key}" in text for key in FIELDS) > 25


@pytest.mark.parametrize("program", PYTHON, ids=str)
def test_programs_import_public_names_alone(program: Snippet) -> None:
    nodes = list(ast.walk(ast.parse(program.text)))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    ]
    # Under the name ``composer3d``, or as ``import composer3d as c3d``.
    assert [name for name in modules if str(name).startswith("composer3d.")] == []
    names = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "composer3d"
        for alias in node.names
    }
    names |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "c3d"
    }
    assert names <= set(composer3d.__all__)


def test_the_readmes_program_has_three_lines_of_imports() -> None:
    lines = blocks(README, "python")[0].splitlines()
    assert sum(line.startswith(("import ", "from ")) for line in lines) <= 3
    assert not any(line.endswith("(") for line in lines[:4])
