"""The coordinates of a rank, and its description."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer3d.recipe.schema import AXES, MeshTable
from composer3d.runtime.ranks import coordinates, describe_rank, identity


@given(st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}))
def test_coordinates_are_row_major_with_tp_innermost(sizes: dict[str, int]) -> None:
    table = MeshTable(**sizes)
    world = torch.arange(torch.Size(sizes.values()).numel()).view(*(sizes[axis] for axis in AXES))
    for rank in range(0, world.numel(), max(1, world.numel() // 50)):
        coords = coordinates(rank, table)
        assert tuple(coords) == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert world[tuple(coords.values())].item() == rank


def test_the_identity_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    table = MeshTable(pp=2, dp_replicate=1, dp_shard=2, cp=2, tp=2)
    monkeypatch.delenv("GROUP_RANK", raising=False)
    assert identity(11, table) == "rank 11 (pp1 dp0 cp1 tp1, node 0)"
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert identity(13, table, "cuda") == "rank 13 (pp1 dp1 cp0 tp1, node 1 gpu 5)"
    assert identity(7, MeshTable(dp_replicate=2, dp_shard=4)) == "rank 7 (pp0 dp7 cp0 tp0, node 1)"


def test_a_description_has_no_host() -> None:
    table = MeshTable(pp=2, dp_replicate=2, dp_shard=2, cp=1, tp=2)
    assert describe_rank(13, table) == "rank 13 (pp1 dp2 cp0 tp1)"
