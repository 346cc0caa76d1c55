"""Fixtures of all tests: one pool of workers for the session, whose server imports torch once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.prove.paths import ROOT

# Before torch is imported: a worker that ran several threads would slow down the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from composer3d.runtime.launch import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one-process runs, which all layouts that share one read."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture
def root() -> Path:
    """The folder of the repository."""
    return ROOT
