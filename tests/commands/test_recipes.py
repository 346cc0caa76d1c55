"""``composer3d recipes``: what it lists, and copies that work alone."""

import json
import os
from pathlib import Path

import pytest
import tomli

from composer3d import cli
from composer3d.commands import recipes
from composer3d.recipe.resolve import load
from tools.prove.paths import ROOT

FILES = sorted((ROOT / "recipes").glob("*.toml"), key=lambda path: path.stem)


def test_each_recipe_is_listed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "ls"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["recipe", "processes", "model", "parameters", "mesh"]
    assert [line.split()[0] for line in lines] == [file.stem for file in FILES]
    (line,) = [line for line in lines if line.startswith("llama3-70b-64-fsdp-tp ")]
    assert line.split(maxsplit=8) == [
        "llama3-70b-64-fsdp-tp",
        "64",
        "llama3-70b",
        "70.6B",
        *("dp_shard", "32", "tp", "2"),
        "Llama 3 70B on 8 nodes of 8 GPUs: tensor parallel inside a node, parameters sharded "
        "across the nodes",
    ]


def test_the_list_as_json_has_what_the_recipes_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", "ls", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in answer["recipes"]}
    assert rows.keys() == {file.stem for file in FILES}
    for name, row in rows.items():
        recipe = load(ROOT / "recipes" / f"{name}.toml", check_files=False).recipe
        assert row["processes"] == recipe.world_size
        assert row["description"], name
        assert len(row["description"]) < 250
    mesh = rows["moe-64e-1024-4d"]["mesh"]
    assert mesh == "pp 4 dp_shard 64 tp 4 ep 8"
    assert rows["debug-1-single"]["mesh"] == "one process"


def test_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("quickstart", "quickstart.toml", "recipes/quickstart.toml"):
        assert cli.main(["recipes", "show", name]) == 0
        assert capsys.readouterr().out == (ROOT / "recipes" / "quickstart.toml").read_text()


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_a_copy_works_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "copies").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    made = recipes.copy(recipes.find(name), "../copies/mine.toml")
    assert made[0] == Path("../copies/mine.toml")
    assert {path.name for path in made} == set(os.listdir("../copies"))
    original = load(ROOT / "recipes" / f"{name}.toml").recipe
    copied = load(made[0]).recipe
    if original.parallel.schedule_csv is not None:
        assert copied.parallel.schedule_csv == "../copies/zb-h1-2x4.csv"
        monkeypatch.chdir(ROOT / "recipes")
        assert load("debug-2-csv.toml").recipe.parallel.schedule_csv == "zb-h1-2x4.csv"
    else:
        assert copied == original


def test_a_copy_has_the_name_of_the_recipe_or_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "cp", "quickstart"]) == 0
    assert capsys.readouterr().out == (
        "made quickstart.toml\ntrain it: composer3d train quickstart.toml\n"
    )
    (tmp_path / "sub").mkdir()
    assert cli.main(["recipes", "cp", "quickstart-moe", "sub"]) == 0
    assert sorted(os.listdir("sub")) == ["quickstart-moe.toml", "quickstart.toml"]


def test_nothing_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "cp", "debug-2-dp"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["debug-1-single.toml", "debug-2-dp.toml"]

    # The copy itself is there.
    assert cli.main(["recipes", "cp", "debug-2-dp"]) == 2
    assert capsys.readouterr().err == (
        "debug-2-dp.toml exists, and is not overwritten; give another DEST, or remove it\n"
    )
    # A base with the same content is shared by two copies.
    assert cli.main(["recipes", "cp", "debug-4-dp-tp"]) == 0
    # A base that the user has changed is kept, and no half of a copy is left.
    Path("debug-1-single.toml").write_text("[run]\nsteps = 1\n")
    assert cli.main(["recipes", "cp", "debug-2-cp"]) == 2
    assert "debug-1-single.toml exists, and is not overwritten" in capsys.readouterr().err
    assert not Path("debug-2-cp.toml").exists()
    assert Path("debug-1-single.toml").read_text() == "[run]\nsteps = 1\n"
    # A link that leads nowhere is not followed.
    Path("mine.toml").symlink_to("elsewhere.toml")
    assert cli.main(["recipes", "cp", "quickstart", "mine.toml"]) == 2
    assert not Path("elsewhere.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["show", "quikstart"],
            "quikstart: composer3d has no such recipe; did you mean quickstart?",
        ),
        (["cp", "x\n"], "x\\n: composer3d has no such recipe; composer3d recipes ls lists them"),
        (
            ["show", "../pyproject"],
            "../pyproject: composer3d has no such recipe; composer3d recipes ls lists them",
        ),
        (["cp", "quickstart", "x"], "x: name a folder that exists, or a file that ends with .toml"),
        (
            ["cp", "quickstart", "no/x.toml"],
            "no/x.toml: the file cannot be made (No such file or directory)",
        ),
        (
            ["cp", "debug-2-dp", "debug-1-single.toml"],
            "debug-1-single.toml: the recipe inherits "
            "from a file of this name; give the copy another name",
        ),
    ],
)
def test_an_error_says_what_to_do(
    arguments: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", *arguments]) == 2
    assert capsys.readouterr() == ("", f"{error}\n")
    assert os.listdir() == []


def test_a_schedule_beside_the_recipe_is_used_if_the_working_directory_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = recipes.FOLDER / "debug-2-csv.toml"
    assert tomli.loads(file.read_text())["parallel"]["schedule_csv"] == "zb-h1-2x4.csv"
    beside = str(recipes.FOLDER / "zb-h1-2x4.csv")
    resolved = load(file)
    assert resolved.recipe.parallel.schedule_csv == beside
    # The resolved recipe is equal from any folder.
    Path("again.toml").write_text(resolved.to_toml())
    assert load("again.toml").recipe == resolved.recipe
    Path("zb-h1-2x4.csv").write_text(Path(beside).read_text())
    assert load(file).recipe.parallel.schedule_csv == "zb-h1-2x4.csv"
    # An override is relative to the working directory alone.
    Path("zb-h1-2x4.csv").unlink()
    sets = ["parallel.schedule_csv=zb-h1-2x4.csv"]
    assert load(file, sets, check_files=False).recipe.parallel.schedule_csv == "zb-h1-2x4.csv"
