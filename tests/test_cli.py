"""The command line: errors that help, and help whose examples work."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.commands.parser import Parser
from composer3d.commands.registry import make_parser
from composer3d.facts.tags import COUNTED_TOKENS
from composer3d.recipe.schema import model_table
from composer3d.recipe.values import FIELDS, entries_of
from composer3d.runtime import progress
from tests.report.runs import make_run
from tools.prove.paths import ROOT

KEYS = {**entries_of({"model": model_table("moe")}), **FIELDS}
COMMANDS = {
    name: parser
    for name, parser in (make_parser().commands or {}).items()
    if isinstance(parser, Parser)
}
EXAMPLES = [(name, example) for name, parser in COMMANDS.items() for example in parser.examples]


def test_every_command_has_examples_and_a_group() -> None:
    top = make_parser()
    assert [name for name, parser in COMMANDS.items() if not 1 <= len(parser.examples) <= 3] == []
    listed = [name for group in top.groups.values() for name in group]
    assert sorted(listed) == sorted(COMMANDS)
    assert all(top.groups.values())
    text = top.format_help()
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert all(f"\n{heading}:\n" in text for heading in top.groups)


@pytest.mark.parametrize("example", make_parser().examples)
def test_the_examples_of_the_first_help_name_commands(example: str) -> None:
    program, *arguments = shlex.split(example, comments=True)
    assert program == "composer3d"
    if arguments[-1] == "--help":
        with pytest.raises(SystemExit) as stop:
            make_parser().parse_args(arguments)
        assert stop.value.code == 0
    else:
        make_parser().parse_args(arguments)


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_parses_and_is_in_the_help(
    name: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(example.partition(" > ")[0])  # the shell writes the output
    parsed = vars(make_parser().parse_args(words[words.index("composer3d") + 1 :]))
    assert parsed["command"] == name
    if parsed.get("recipe") is not None:
        assert (ROOT / "recipes" / f"{parsed['recipe']}.toml").is_file()
    for override in parsed.get("sets", []):
        assert override.partition("=")[0] in KEYS
    with pytest.raises(SystemExit):
        make_parser().parse_args([name, "--help"])
    assert f"\nexamples:\n  {COMMANDS[name].examples[0]}\n" in capsys.readouterr().out
    assert f"\n  {example}\n" in COMMANDS[name].format_help()


# Runs each command line in a process of its own. Prints its status, and which commands and large
# packages it has imported.
_IMPORTS = """
import contextlib, io, os, shlex, sys
from composer3d import cli
for line in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main(shlex.split(line))
    names = [name for name in sys.modules if name.startswith("composer3d.commands.")]
    names += {"torch", "numpy", "tensorboard"} & set(sys.modules)
    print(status, *(name.rpartition(".")[2] for name in names), flush=True)
    os._exit(0)
"""


def imports_of(lines: Sequence[str]) -> list[tuple[str, set[str]]]:
    """Return the status of each command line, and the names of what it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *lines], capture_output=True, text=True, check=True
    )
    words = [line.split() for line in done.stdout.splitlines()]
    assert len(words) == len(lines), done.stderr
    return [(status, set(names)) for status, *names in words]


def test_parsing_a_command_needs_no_other_command_and_no_torch() -> None:
    # Report draws what layout and timeline draw, with the devices of plan. The ranks of commands
    # are started and joined by one module, those of tp by another; one copies files of composer3d,
    # one copies checkpoints from and to elsewhere, and a shell completes the names of recipes. Plan
    # has modules for goodput and for comparisons, eval one for tasks.
    shared = {"arguments", "job", "parser", "registry", "shipped", "tp"}
    of_plan = {"goodput", "why"}
    uses = {
        "plan": of_plan,
        "report": {"layout", "plan", "timeline"} | of_plan,
        "timeline": {"plan"} | of_plan,
        **{name: {"sources"} for name in ("convert", "generate", "inspect", "prepare")},
        "eval": {"eval_tasks", "sources"},
        "completion": {"recipes"},
    }
    of_commands = imports_of([f"{name} --help" for name in COMMANDS])
    for name, (status, found) in zip(COMMANDS, of_commands, strict=True):
        module = {"import": "import_recipe"}.get(name, name)
        assert status == "0"
        assert found - shared == {module, *uses.get(name, ())}


def test_these_commands_answer_without_torch(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "llama-175b-1024-3d.toml"
    configuration = ROOT / "tools" / "prove" / "imports" / "moe-64e-1024.txt"
    run = make_run(tmp_path / "run")
    statuses = {
        "--version": "0",
        "check quickstart": "0",
        "plan quickstart --gpus 8 --json --top 1": "0",
        f"timeline {recipe} --json": "0",
        f"layout {recipe} --json": "0",
        "recipes ls": "0",
        f"report {run}": "0",
        f"import {configuration}": "1",  # open points
    }
    for line, (status, found) in zip(statuses, imports_of([*statuses]), strict=True):
        assert status == statuses[line], line
        assert found.isdisjoint({"torch", "numpy", "tensorboard"}), line


# These need no torch, and no file that a user must bring. The others are parsed only.
QUICK = ("check", "layout", "plan", "recipes", "timeline")


@pytest.mark.parametrize(
    "example",
    [example for name, example in EXAMPLES if name in QUICK and "--measured" not in example],
)
def test_an_example_runs(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_LINE_EVERY_S", float("inf"))  # the machine may be slow
    status = cli.main(shlex.split(example)[1:])
    out, errors = capsys.readouterr()
    assert (status, errors) == (0, ""), out + errors


USAGE = "usage: composer3d "


@pytest.mark.parametrize(
    ("line", "usage", "error"),
    [
        ("trian quickstart", "", "composer3d: error: unknown command 'trian'; did you mean train?"),
        ("", "", "composer3d: error: name a command; composer3d --help lists them"),
        (
            "my.toml",
            "",
            "composer3d: error: unknown command 'my.toml'; to train a recipe, write "
            "composer3d train my.toml",
        ),
        ("--verison", "", "composer3d: error: unknown option --verison; did you mean --version?"),
        (
            "--json check quickstart",
            "",
            "composer3d: error: unknown option --json; options of a command stand after its name",
        ),
        # The unknown option comes first, and not the recipe that seems to be missing.
        (
            "train --sett run.steps=3",
            "train",
            "composer3d train: error: unknown option --sett; did you mean --set?",
        ),
        (
            "train quickstart --sets=run.steps=3",
            "train",
            "composer3d train: error: unknown option --sets; did you mean --set?",
        ),
        (
            "inspect --tensor x",
            "inspect",
            "composer3d inspect: error: unknown option --tensor; did you mean --tensors?",
        ),
        ("inspect x --qq", "inspect", "composer3d inspect: error: unknown option --qq"),
        ("inspect x -q", "inspect", "composer3d inspect: error: unknown option -q"),
        (
            "train quickstart mesh.tp=2",
            "train",
            "composer3d train: error: unexpected argument 'mesh.tp=2'; to override a value, "
            "write --set mesh.tp=2",
        ),
        ("inspect a b", "inspect", "composer3d inspect: error: unexpected argument 'b'"),
        (
            "convert a b --to hff",
            "convert",
            "composer3d convert: error: argument --to: 'hff' is not one of hf, meta, torch, dcp; "
            "did you mean hf?",
        ),
        (
            "train",
            "train",
            "composer3d train: error: the following arguments are required: RECIPE",
        ),
    ],
)
def test_an_error_shows_the_usage_of_its_command_and_what_was_meant(
    line: str, usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(f"{USAGE}{usage}")
    assert errors.endswith(f"\n{error}\n")
    assert errors.count("usage:") == 1


def test_an_unknown_command_without_a_similar_one_gets_the_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["frobnicate"]) == 2
    errors = capsys.readouterr().err
    assert errors.endswith(f"the commands are {', '.join(COMMANDS)}\n")


@pytest.mark.parametrize("word", ["\x1b[31mtrain", "x\ny", "train" * 1000, "\udcff"])
def test_a_hostile_word_is_shown_on_one_short_line(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([word], ["inspect", "a", word], ["convert", "a", "b", "--to", word]):
        assert cli.main(arguments) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("composer3d")
        assert last.isprintable()
        assert len(last) < 400


@pytest.mark.parametrize("name", ["qickstart", "recipes/qickstart.toml", "qickstart.toml"])
def test_a_misspelt_recipe_gets_a_suggestion(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", name]) == 2
    assert capsys.readouterr().err == (
        f"{name}: there is no such file, and no such recipe in composer3d; "
        "did you mean quickstart?\n"
    )


@pytest.mark.parametrize("command", ["train", "report"])
def test_help_says_which_tokens_count(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert COUNTED_TOKENS in " ".join(capsys.readouterr().out.split())


def test_help_fits_a_narrow_and_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 100, 250):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = make_parser().format_help().splitlines()
        rows = [line for line in lines if not line.startswith("  composer3d ")]
        assert max(map(len, rows)) <= min(columns, 100)
