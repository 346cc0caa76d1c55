"""Folders with a small run."""

import shutil
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tests.data.conftest import bpe
from tests.training.jobs import RECIPE, SINGLE, train, write_corpus

__all__ = ["bpe"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a corpus and no recipe."""
    write_corpus(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained_once(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with five steps of a run on one process."""
    base = tmp_path_factory.mktemp("trained")
    write_corpus(base)
    (base / "other.txt").write_bytes(b"another text " * 100)
    (base / "recipe.toml").write_text(RECIPE.format(mesh=SINGLE))
    assert train(pool, base, "run.steps=5").returncode == 0
    return base


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of such a folder, which a test may change."""
    return shutil.copytree(trained_once, tmp_path / "copy")
