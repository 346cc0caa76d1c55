"""The wheel: what a user gets who installs composer3d without its repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composer3d
from tools.prove.paths import ROOT


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
