"""What holds of the whole package: recipes, imports, public names, docstrings."""

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from tools.prove.paths import ROOT

PACKAGE = ROOT / "composer3d"
FILES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_keeps_the_rules(path: Path) -> None:
    resolved = load(path)
    assert violations(resolved.recipe) == []
    if path.stem != "quickstart":
        model, devices = (
            path.stem.split("-")[0],
            [int(part) for part in path.stem.split("-") if part.isdigit()],
        )
        assert devices == [resolved.recipe.world_size]
        assert resolved.origins["model.dim"].startswith(f"preset {model}")


def imports(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))  # torch.distributed through plain torch
    return names


@pytest.mark.parametrize(
    "path",
    sorted((PACKAGE / "models").rglob("*.py")),
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_models_are_single_device_code(path: Path) -> None:
    assert not {name for name in imports(tree(path)) if name.startswith("torch.distributed")}


def test_commands_answer_without_torch() -> None:
    code = (
        "import sys, composer3d.cli, composer3d.recipe.resolve, composer3d.verify.proof, composer3d.commands.train, composer3d.runtime.launch\n"
        "print(sorted({'torch', 'numpy', 'tensorboard', 'torchdata'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["checkpoint", "data", "parallel"])
def test_public_names_are_those_of_all(name: str) -> None:
    module = importlib.import_module(f"composer3d.{name}")
    found = {
        each
        for each, value in vars(module).items()
        if not each.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert found == set(module.__all__)
    assert len(module.__all__) == len(set(module.__all__))


def undocumented(node: ast.Module | ast.ClassDef, place: str) -> list[str]:
    """Public classes and functions without a docstring.

    One or two statements explain themselves, ``forward`` is told by its class, a table of the recipe by its keys.
    """
    found: list[str] = []
    for each in node.body:
        if not isinstance(each, ast.ClassDef | Function) or each.name.startswith("_"):
            continue
        name = f"{place}.{each.name}"
        if isinstance(each, Function):
            told = len(each.body) <= 2 or each.name == "forward"
        else:
            fields = [entry.value for entry in each.body if isinstance(entry, ast.AnnAssign)]
            told = bool(fields) and all(
                isinstance(v, ast.Call) and ast.unparse(v.func) == "key" for v in fields
            )
            found += undocumented(each, name)
        if not told and not ast.get_docstring(each):
            found.append(name)
    return found


def test_public_names_have_docstrings() -> None:
    assert not [
        name
        for path in FILES
        for name in undocumented(tree(path), path.relative_to(ROOT).as_posix())
    ]


def test_nothing_is_left_to_be_done() -> None:
    words = ("NotImplementedError", "TO" + "DO", "FIX" + "ME")
    files = [*FILES, *RECIPES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert not [
        (path.name, word)
        for path in files
        if path != Path(__file__)
        for word in words
        if word in path.read_text()
    ]
