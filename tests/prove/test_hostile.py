"""A fixed slice of the hostile cases; ``bash tools/prove/run hostile`` runs all of them.

Nothing of them is executed, nothing outside of their folders is read or written, and each ends
within its bounds with a message and no traceback.
"""

import os
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from tools.prove.hostile.base import make_base
from tools.prove.hostile.case import SECRET, Case, marker_of, prepare_outside, problems_of
from tools.prove.hostile.cases import CASES


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    prepare_outside(root)
    make_base(root / "base", pool)
    return root


def test_there_are_enough_cases_with_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(names) >= 400
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", sorted(CASES, key=str)[::15], ids=str)
def test_hostile_input_does_no_harm(ground: Path, pool: Pool, case: Case) -> None:
    assert problems_of(case, ground, pool) == []


def _reads_outside(folder: Path) -> list[str]:
    (folder / "x.toml").symlink_to(folder.parent / "outside/secret.txt")
    return ["check", "x.toml"]


def _writes_outside(folder: Path) -> list[str]:
    os.symlink(folder.parent, folder / "away")
    return ["prepare", "../base/corpus.txt", "-o", "away/written", "--tokenizer", "bytes"]


def _marks(folder: Path) -> list[str]:
    marker_of(folder).touch()
    return ["check", "x.toml"]


def _copies(folder: Path) -> list[str]:
    (folder / "copy").write_text(SECRET)
    return ["check", "x.toml"]


@pytest.mark.parametrize("make", [_reads_outside, _writes_outside, _marks, _copies])
def test_each_trap_can_be_sprung(ground: Path, pool: Pool, make: object) -> None:
    """The traps see these, although a user may name any file on the command line."""
    case = Case(f"trap{make.__name__}", make, None)  # type: ignore[attr-defined, arg-type]
    assert problems_of(case, ground, pool)
