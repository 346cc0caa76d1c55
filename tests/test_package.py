"""The public names of ``composer3d``, and the wheel that a user installs without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composer3d
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


def test_every_public_name_resolves_to_an_object_with_a_docstring() -> None:
    names = [name for name in composer3d.__all__ if name != "__version__"]
    assert sorted(names) == sorted(composer3d._MODULES)
    for name in names:
        value = getattr(composer3d, name)
        assert value.__name__ == name
        assert value.__module__ == composer3d._MODULES[name]
        assert value.__doc__
        assert getattr(composer3d, name) is value


def test_an_unknown_name_is_refused_as_in_any_module() -> None:
    with pytest.raises(
        AttributeError, match=r"^module 'composer3d' has no attribute 'no_such_name'$"
    ):
        _ = composer3d.no_such_name
    with pytest.raises(ImportError, match="cannot import name 'no_such_name' from 'composer3d'"):
        exec("from composer3d import no_such_name")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    leave = shutil.ignore_patterns("__pycache__")
    for name in ("composer3d", "recipes"):
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "source")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
    ]
    command = [*pip, "--no-index", "-w", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_holds_recipes_types_and_all_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"composer3d-{composer3d.__version__}.dist-info/METADATA").decode()
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "composer3d").rglob("*.py")}
    recipes = [*(ROOT / "recipes").glob("*.toml"), *(ROOT / "recipes").glob("*.csv")]
    wanted |= {f"composer3d/recipes/{path.name}" for path in recipes} | {"composer3d/py.typed"}
    assert len(recipes) > 10
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]
    assert f"\nVersion: {composer3d.__version__}\n" in metadata


def test_an_installed_wheel_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "composer3d", "check", "quickstart"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"# {tmp_path}/site/composer3d/recipes/quickstart.toml:" in done.stdout
