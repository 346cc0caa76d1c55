"""Arguments that have no effect in their combination are refused, by one rule for all commands."""

import shlex
from dataclasses import fields
from importlib import import_module

import pytest

from composer3d import cli
from composer3d.commands.registry import COMMANDS


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("check quickstart --schema", "RECIPE has no effect with --schema; leave it out"),
        ("check --schema --gpus 8", "--gpus has no effect with --schema; leave it out"),
        ("check --schema --set a.b=1", "--set has no effect with --schema; leave it out"),
        ("plan quickstart --memory --top 3", "--top has no effect with --memory; leave it out"),
        (
            "plan quickstart --memory --gpus-per-node 4",
            "--gpus-per-node has no effect with --memory; leave it out",
        ),
        (
            "plan quickstart --memory --calibrate 100",
            "--calibrate has no effect with --memory; leave it out",
        ),
        (
            "plan quickstart --keep x.toml",
            "--keep has no effect without --calibrate; give both, or leave it out",
        ),
        (
            "timeline quickstart --gpus-per-node 4",
            "--gpus-per-node has no effect without --gpu; give both, or leave it out",
        ),
        (
            "timeline --measured run --gpu H100",
            "--gpu has no effect without RECIPE; give both, or leave it out",
        ),
        (
            "timeline --measured run --set mesh.pp=2",
            "--set has no effect without RECIPE; give both, or leave it out",
        ),
        (
            "timeline --measured run --gpus 2",
            "--gpus has no effect without RECIPE; give both, or leave it out",
        ),
        (
            "sweep quickstart --set run.seed=1,2 --print --json",
            "--json has no effect with --print; leave it out",
        ),
        (
            "sweep quickstart --set run.seed=1,2 --print -o x.html",
            "--out has no effect with --print; leave it out",
        ),
        (
            "generate src --prompt a --top-k 5",
            "--top-k has no effect without --temperature; give both, or leave it out",
        ),
        (
            "generate src --prompt a --top-p 0.5",
            "--top-p has no effect without --temperature; give both, or leave it out",
        ),
        (
            "generate src --prompt a --seed 5",
            "--seed has no effect without --temperature; give both, or leave it out",
        ),
        (
            "generate src --prompt a --chat --no-special-tokens",
            "--no-special-tokens has no effect with --chat; leave it out",
        ),
    ],
)
def test_an_argument_without_an_effect_is_refused(
    line: str, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.err == f"composer3d {words[0]}: {refused}\n"


def test_each_such_argument_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "quickstart", "--schema", "--gpus", "8"]) == 2
    names = [line.split()[2] for line in capsys.readouterr().err.splitlines()]
    assert names == ["RECIPE", "--gpus"]


def test_an_argument_that_has_an_effect_all_the_same_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan llama3-8b-8-fsdp --memory --goodput 30 --gpus-per-node 4"
    assert cli.main(shlex.split(words)) in (0, 1)
    # As if it was not given.
    assert cli.main(["check", "--schema", "--set", "a.b=1"]) == 2
    assert cli.main(["timeline", "quickstart", "--gpus-per-node", "8"]) == 0
    capsys.readouterr()


def test_a_seed_may_stand_beside_a_temperature_of_0(capsys: pytest.CaptureFixture[str]) -> None:
    words = "generate nowhere --prompt a --temperature 0 --seed 5 --top-k 5 --top-p 0.5"
    assert cli.main(shlex.split(words)) == 2
    assert capsys.readouterr().err == "nowhere does not exist; give another path\n"


def test_rules_name_arguments_of_their_command() -> None:
    modules = {"import": "import_recipe"}
    for command in COMMANDS:
        module = import_module(f"composer3d.commands.{modules.get(command, command)}")
        declared = [entry.metadata for entry in fields(module.Options) if "needs" in entry.metadata]
        names = {name for rule in declared for name in rule["names"]}
        names |= {rule["keywords"].get("metavar") for rule in declared if not rule["names"]}
        for rule in declared:
            assert {*rule["needs"], *rule["without"], *rule["unless"]} <= names, command
