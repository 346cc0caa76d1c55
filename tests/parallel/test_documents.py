"""Faults of the mask of packed documents in a ring: ``verify`` must see them. (Exact layouts are in layouts.txt.)"""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from composer3d.launch import Pool
from composer3d.parallel import cp
from composer3d.verify import verify_layout

RECIPE = str(Path(__file__).parents[1] / "verify.toml")


def mask_blocks_as_if_cut_in_order() -> None:
    """The ring takes documents for cut contiguously, while its tokens lie in zigzag."""
    part, seen = cp._part, cp._seen

    def wrong(*arguments: Tensor) -> Tensor | None:
        cp._part = lambda x, dim, rank, size: x.chunk(size, dim)[rank]
        try:
            return seen(*arguments)  # type: ignore[arg-type]
        finally:
            cp._part = part

    cp._seen = wrong  # type: ignore[assignment]


def forget_that_a_query_sees_nothing() -> None:
    """What the CPU's kernel returns for a query without a key is merged as if it were a key with a score of 0."""
    right = cp._merge
    cp._merge = lambda out, lse, block, block_lse: right(out, lse, block, block_lse.nan_to_num(neginf=0.0))


@pytest.mark.parametrize("fault", [mask_blocks_as_if_cut_in_order, forget_that_a_query_sees_nothing])
def test_planted_fault_is_seen(pool: Pool, references: Path, fault: Callable[[], None]) -> None:
    sets = ["mesh.cp=2", "data.packing=documents"]
    verdict = verify_layout(pool, references, RECIPE, sets, dtype="float64", steps=1, fault=fault)
    assert not verdict.passed
    assert verdict.max_grad_rel_err is not None, verdict.error  # it ran, and was wrong
    assert verdict.max_grad_rel_err > 1e-3
