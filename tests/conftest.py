"""One pool of workers for the whole session: its forkserver imports torch once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.prove.paths import ROOT

os.environ.setdefault("OMP_NUM_THREADS", "1")

from composer3d.runtime.launch import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one-process runs are kept for all layouts that share them."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture
def root() -> Path:
    return ROOT
