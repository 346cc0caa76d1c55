"""Rules for the whole package: recipes load, imports have no circles, no work is unfinished."""

import ast
import importlib
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

from composer3d.recipe.resolve import load
from composer3d.recipe.rules import violations
from tools.prove.paths import ROOT

PACKAGE = ROOT / "composer3d"
FILES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_keeps_the_rules(path: Path) -> None:
    """A recipe is named <model>-<devices>-<purpose>, except for the quickstarts.

    <model> is a preset, or the architecture if the recipe changes the sizes of a preset.
    """
    resolved = load(path)
    recipe = resolved.recipe
    assert violations(recipe) == []
    if not path.stem.startswith("quickstart"):
        parts = path.stem.split("-")
        assert [int(part) for part in parts if part.isdigit()] == [recipe.world_size]
        if parts[0] != recipe.model.architecture:
            assert resolved.origins["model.dim"].startswith(f"preset {parts[0]}")


def mentioned_names(module: ast.Module) -> set[str]:
    """The dotted names that a module imports or reads as attributes."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            # ``import torch`` alone gives access to ``torch.distributed``.
            names.add(ast.unparse(node))
    return names


@pytest.mark.parametrize(
    "path",
    sorted((PACKAGE / "models").rglob("*.py")),
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_models_are_single_device_code(path: Path) -> None:
    names = mentioned_names(parse(path))
    assert not {name for name in names if name.startswith("torch.distributed")}


def module_names(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """The modules of ``packages`` in the folder ``root``, by dotted name."""
    modules = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            modules[".".join(parts)] = path
    return modules


def import_statements(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run with the module: those in functions run later and make no circle."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif not isinstance(statement, Function):
            for field in ("body", "orelse", "finalbody"):
                yield from import_statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from import_statements(handler.body)


def imported_modules(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules in ``modules`` that the module ``name`` imports when it is imported itself."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    imported: set[str] = set()
    for statement in import_statements(parse(path).body):
        if isinstance(statement, ast.Import):
            imported |= {alias.name for alias in statement.names}
            continue
        source = resolve_name("." * statement.level + (statement.module or ""), package)
        for alias in statement.names:
            submodule = f"{source}.{alias.name}"
            imported.add(submodule if submodule in modules else source)

    # Python imports the packages around a module first. The packages around ``name`` itself are
    # left out: they may import their own modules.
    for target in list(imported):
        ancestors = target.split(".")
        for length in range(1, len(ancestors)):
            ancestor = ".".join(ancestors[:length])
            if not f"{name}.".startswith(f"{ancestor}."):
                imported.add(ancestor)
    return {target for target in imported if target in modules and target != name}


def import_circle(modules: Mapping[str, Path]) -> list[str]:
    """An import circle among ``modules``, each importing the next one; empty without a circle."""
    graph = {name: imported_modules(name, path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # The second argument is the circle, in which each module is imported by the next one.
        return list(reversed(error.args[1]))
    return []


def test_no_module_is_part_of_an_import_circle() -> None:
    modules = module_names(ROOT, ("composer3d", "tools", "tests"))
    assert {"composer3d.parallel.compose", "tools.prove", "tests.test_gate"} <= set(modules)
    circle = import_circle(modules)
    assert not circle, f"import circle: {' imports '.join(circle)}"


def test_import_circles_are_found(tmp_path: Path) -> None:
    (tmp_path / "shop" / "goods").mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").write_text("from shop.till import pay\n")
    (tmp_path / "shop" / "till.py").write_text("def pay():\n    import shop.goods\n")
    (tmp_path / "shop" / "goods" / "__init__.py").write_text("from shop.goods.apple import eat\n")
    (tmp_path / "shop" / "goods" / "apple.py").write_text("eat = print\n")
    assert import_circle(module_names(tmp_path, ("shop",))) == []

    (tmp_path / "shop" / "goods" / "__init__.py").write_text("")
    (tmp_path / "shop" / "till.py").write_text("try:\n    from .goods import apple\nfinally: pass")
    (tmp_path / "shop" / "goods" / "apple.py").write_text("from shop import till as eat\n")
    circle = import_circle(module_names(tmp_path, ("shop",)))
    assert circle[0] == circle[-1]
    assert set(circle) == {"shop.till", "shop.goods.apple"}


def test_commands_answer_without_torch() -> None:
    code = (
        "import sys\n"
        "import composer3d.cli, composer3d.recipe.resolve, composer3d.verify.proof\n"
        "import composer3d.commands.train, composer3d.commands.dryrun, composer3d.runtime.launch\n"
        "print(sorted({'torch', 'numpy', 'tensorboard', 'torchdata'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["checkpoint", "data", "parallel"])
def test_public_names_are_those_of_all(name: str) -> None:
    module = importlib.import_module(f"composer3d.{name}")
    for attribute in module.__all__:
        getattr(module, attribute)  # imports what is imported when it is first used
    public_names = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not isinstance(value, types.ModuleType)
    } - {"TYPE_CHECKING", "Any"}
    assert public_names == set(module.__all__)
    assert len(module.__all__) == len(set(module.__all__))


def test_no_file_has_unfinished_work() -> None:
    # In two parts, so that this file does not contain the words either.
    words = ("NotImplementedError", "TO" + "DO", "FIX" + "ME")
    files = [*FILES, *RECIPES, *sorted((ROOT / "tests").rglob("*.py"))]
    assert not [
        (path.name, word)
        for path in files
        if path != Path(__file__)
        for word in words
        if word in path.read_text()
    ]


# Files that parse what other processes of composer3d have sent, or a corpus, which has bounds of
# its own. All other texts come from outside, and are parsed within the bounds of ``facts.bounds``.
PARSERS = {
    "facts": {"files.py", "statements.py", "toml.py"},
    "runtime": {"peers.py", "situation.py", "trackers.py"},
    "data": {
        *("chat_template.py", "documents.py", "example_lines.py", "examples.py"),
        *("tokenizer.py", "tokenizer_worker.py", "table_worker.py"),
    },
    "reliability": {"lock.py"},
    "verify": {"proof.py"},
}
IMPORTERS = {
    "__init__.py",
    "commands/registry.py",
    "models/registry.py",
    "recipe/draft.py",
    "recipe/schema.py",
    "recipe/tables.py",  # of an architecture that a program in Python names
}
IMPORTERS |= {"runtime/agreement.py", "runtime/starter.py"}


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the name of what it calls, such as ``json.loads`` or ``load``."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_texts_from_outside_are_parsed_in_one_place() -> None:
    allowed = {f"{folder}/{name}" for folder, names in PARSERS.items() for name in names}
    parse_calls = {"json.load", "json.loads", "tomli.load", "tomli.loads", "tomllib.loads"}
    package = ROOT / "composer3d"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for name, _ in calls_of(path)
        if name in parse_calls
    }
    assert found == allowed


def test_only_commands_and_programs_let_a_recipe_import() -> None:
    """The user names the recipe to a command, or in Python to ``load_recipe``."""
    package = ROOT / "composer3d"
    importers = set()
    for path in package.rglob("*.py"):
        for name, call in calls_of(path):
            words = [word for word in call.keywords if word.arg == "may_import"]
            if any(not isinstance(word.value, ast.Name) for word in words):
                in_python = path == package / "recipe" / "tables.py"
                assert in_python or path.parent == package / "commands", path
            if any(word.arg == "hub_names" for word in call.keywords):
                # Of a file that is imported, only what the user gives with --set.
                assert str(path.relative_to(package)) in ("imports/result.py", "recipe/resolve.py")
            if name.rpartition(".")[2] in ("import_module", "__import__", "import_architecture"):
                importers.add(str(path.relative_to(package)))
    assert importers == IMPORTERS
