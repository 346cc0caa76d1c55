"""The public names of ``composer3d``, and the wheel that a user installs without the repository."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import composer3d
import setup
from composer3d.commands.launch import SCRIPTS
from tools.prove.paths import ROOT


def test_importing_composer3d_does_not_import_torch() -> None:
    code = (
        "import sys, composer3d\n"
        "names_are_listed = set(composer3d.__all__) <= set(dir(composer3d))\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)), names_are_listed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] True\n"


# The one public name that is a package as well. It can be called.
PACKAGE = "verify"
# Public values that are neither a class nor a function.
VALUES = {"IGNORE_INDEX"}


def test_every_public_name_resolves_to_an_object_with_a_docstring() -> None:
    names = [name for name in composer3d.__all__ if name != "__version__"]
    assert sorted(names) == sorted(composer3d._MODULES)
    for name in set(names) - VALUES - {PACKAGE}:
        value = getattr(composer3d, name)
        assert value.__name__ == name
        assert value.__module__ == composer3d._MODULES[name]
        assert value.__doc__
        assert getattr(composer3d, name) is value
    for name in VALUES:
        assert getattr(composer3d, name) == getattr(
            importlib.import_module(composer3d._MODULES[name]), name
        )


def test_the_stub_lists_names_in_one_way() -> None:
    """Each is re-exported to type checkers (``as NAME``), once, and nothing else stands there."""
    tree = ast.parse((ROOT / "composer3d" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert [alias.asname for alias in aliases] == [alias.name for alias in aliases]
    assert len({alias.name for alias in aliases}) == len(aliases)
    (rest,) = (node for node in tree.body if node not in imports)
    assert ast.unparse(rest) == "__version__: str"
    # A type checker and a user see the same names.
    assert {alias.name for alias in aliases} | {"__version__"} == set(composer3d.__all__)


@pytest.mark.parametrize(
    "first", ["", "import composer3d.verify.proof; ", "from composer3d.verify import call; "]
)
def test_verify_is_a_function_whatever_was_imported_before(first: str) -> None:
    code = (
        f"{first}import composer3d; from composer3d import verify; "
        "assert verify is composer3d.verify and callable(verify); "
        "from composer3d.verify import proof, judge; "
        "print(composer3d.verify is verify, composer3d.verify.proof is proof, verify.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True True composer3d.verify\n"


def test_a_former_name_works_and_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(composer3d._RENAMED, "FormerMesh", "Mesh")
    with pytest.warns(
        DeprecationWarning, match=r"^composer3d\.FormerMesh is now composer3d\.Mesh,"
    ):
        value = composer3d.FormerMesh
    assert value is composer3d.Mesh
    assert "FormerMesh" not in composer3d.__all__


def test_an_unknown_name_is_refused_as_in_any_module() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'composer3d' has no attribute 'no_such_name'$"
    ):
        _ = composer3d.no_such_name
    with pytest.raises(ImportError, match="cannot import name 'no_such_name' from 'composer3d'"):
        exec("from composer3d import no_such_name")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built: setuptools writes beside it."""
    folder = tmp_path_factory.mktemp("source")
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("composer3d", "recipes", "tools/launch"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel. torch stays where it is."""
    folder = tmp_path_factory.mktemp("installed")
    command = [
        *PIP,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        str(folder),
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_wheel_holds_recipes_types_and_all_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"composer3d-{composer3d.__version__}.dist-info/METADATA").decode()
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "composer3d").rglob("*.py")}
    recipes = [*(ROOT / "recipes").glob("*.toml"), *(ROOT / "recipes").glob("*.csv")]
    wanted |= {f"composer3d/recipes/{path.name}" for path in recipes} | {
        "composer3d/py.typed",
        "composer3d/__init__.pyi",
    }
    wanted |= {f"composer3d/launch_scripts/{script.file}" for script in SCRIPTS.values()}
    words = list((ROOT / "composer3d" / "imports").glob("*.toml"))
    wanted |= {f"composer3d/imports/{path.name}" for path in words}
    assert len(words) > 5
    assert len(recipes) > 10
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]
    assert f"\nVersion: {composer3d.__version__}\n" in metadata


def test_the_text_for_an_index_is_the_readme_without_links_into_the_repository(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"composer3d-{composer3d.__version__}.dist-info/METADATA").decode()
    head, _, text = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head.splitlines()
    lines = text.splitlines()
    readme = (ROOT / "README.md").read_text().splitlines()
    (picture,) = (number for number, line in enumerate(readme) if line.startswith("!["))
    del readme[picture : picture + 2]  # with the empty line after it
    links = 0
    for line, original in zip(lines, readme, strict=True):
        assert "](" not in line  # the README has no link to a web page
        # Each link adds its file at most, in parentheses.
        parts = re.split(r"\[([^\]]*)\]\(([^)]*)\)", original)
        links += len(parts) // 3
        for words, file in zip(parts[1::3], parts[2::3], strict=True):
            original = original.replace(
                f"[{words}]({file})",
                file if words in file and "." in words else f"{words} ({file})",
            )
        assert line == original
    assert links > 30


@pytest.mark.parametrize(
    ("text", "plain", "linked"),
    [
        ("a [b c](d/e.md#f), g", "a b c (d/e.md), g", "a [b c](https://x/d/e.md#f), g"),
        ("[e.md](d/e.md)", "d/e.md", "[e.md](https://x/d/e.md)"),
        ("a\n\n![b](c.svg)\n\nd", "a\n\nd", "a\n\nd"),
        *((same, same, same) for same in ("[a](https://b/c)", "[a](#b)", "```\n[a](b.md)\n```")),
    ],
)
def test_a_link_of_the_readme_names_its_file_or_leads_to_the_address(
    text: str, plain: str, linked: str
) -> None:
    assert setup.description(text, None) == plain
    assert setup.description(text, "https://x/") == linked


def test_sdist_holds_no_links(source: Path, tmp_path: Path) -> None:
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        members = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    for path in (ROOT / "recipes").iterdir():
        assert members[f"composer3d/recipes/{path.name}"].isfile()
    for script in SCRIPTS.values():
        assert members[f"composer3d/launch_scripts/{script.file}"].isfile()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--version", f"composer3d {composer3d.__version__} (torch "),
        ("recipes ls", "\nquickstart "),
        ("launch show node", "exec torchrun "),
        ("check quickstart", "/composer3d/recipes/quickstart.toml:"),
        # A recipe that needs a second file, the schedule beside it.
        ("check debug-2-csv", "/composer3d/recipes/zb-h1-2x4.csv"),
        ("verify debug-2-dp --steps 1", "exact   dp_shard 2 "),
    ],
)
def test_an_installed_wheel_works_in_an_empty_folder(
    arguments: str, shown: str, installed: Path, tmp_path: Path
) -> None:
    program = installed / "bin" / "composer3d"
    done = subprocess.run(
        [str(program), *arguments.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert shown in done.stdout
    # It is the installed package that has answered, and it has left nothing behind.
    assert str(ROOT) not in done.stdout
    assert os.listdir(tmp_path) == []
