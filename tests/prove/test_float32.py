"""A slice of the float32 proof: ``verify`` calls no random layout wrong in float32."""

from itertools import islice
from pathlib import Path

import pytest

from composer3d.runtime.launch import Pool
from composer3d.verify.proof import verify_layout
from tools.prove import float32
from tools.prove.paths import RECIPE, ROOT

SMALL = list(islice((sets for sets in float32.layouts(40) if float32.world(sets) <= 2), 4))


@pytest.mark.parametrize("sets", SMALL, ids=" ".join)
def test_a_random_layout_is_exact_in_float32(
    pool: Pool, references: Path, sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name schedule files relative to it
    verdict = verify_layout(
        pool, references, str(RECIPE), sets, dtype="float32", steps=float32.STEPS
    )
    assert verdict.passed, verdict


def test_layouts_are_the_same_for_a_seed() -> None:
    few, more = list(float32.layouts(3)), list(float32.layouts(5))
    assert few == more[:3]
    assert list(float32.layouts(3, seed=1)) != few
    assert all(float32.is_legal(sets) for sets in more)
