"""Which ranks form a group: the formula, compared with counting by hand and with another one."""

import pytest

from composer3d.full.places import GROUPS, corner, members, of_all_ranks, some_ranks
from composer3d.recipe.schema import MeshTable
from composer3d.runtime.ranks import coordinates, group_ranks

MESH = MeshTable(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, ep=4)


def test_groups_of_one_rank_by_hand() -> None:
    # Rank 29 is pp 1, dp_replicate 0, dp_shard 1, cp 0, tp 1.
    assert members("tp", 29, MESH) == (28, 29)
    assert members("cp", 29, MESH) == (29, 31)
    assert members("sequence", 29, MESH) == (28, 29, 30, 31)
    assert members("fsdp", 29, MESH) == (25, 27, 29, 31, 33, 35)
    assert members("dp_replicate", 29, MESH) == (29, 41)
    assert members("pp", 29, MESH) == (5, 29)
    assert members("stage", 29, MESH) == tuple(range(24, 48))
    assert members("ep", 29, MESH) == (28, 29, 30, 31)
    assert members("efsdp", 29, MESH) == (25, 29, 33)
    assert members("expert_replicas", 29, MESH) == (25, 29, 33, 37, 41, 45)
    assert members("world", 29, MESH) == tuple(range(48))


@pytest.mark.parametrize("group", GROUPS)
def test_groups_cut_the_world_into_equal_parts(group: str) -> None:
    parts = {members(group, rank, MESH) for rank in range(48)}
    assert sorted(rank for part in parts for rank in part) == list(range(48))
    assert len({len(part) for part in parts}) == 1
    assert all(rank in members(group, rank, MESH) for rank in range(48))


def test_the_formula_agrees_with_that_of_the_program() -> None:
    for group in ("tp", "cp", "fsdp", "dp_replicate", "pp", "ep", "efsdp", "world"):
        for rank in range(48):
            assert list(members(group, rank, MESH)) == group_ranks(group, rank, MESH)


def test_the_places_of_ranks_by_hand() -> None:
    places = [*of_all_ranks(MESH)]
    assert len(places) == 48
    assert places[29] == (
        {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 1},
        1,
    )
    # The second replica of three shards: the last one of two pipeline ranks, cp and tp.
    assert [places[rank].batch_rank for rank in (0, 4, 8, 12, 16, 20, 23, 47)] == [
        *range(6),
        *(5, 5),
    ]
    assert [place.coordinates for place in places] == [coordinates(n, MESH) for n in range(48)]


def test_some_ranks_are_all_of_a_small_world_and_the_ends_of_a_large_one() -> None:
    assert some_ranks(MESH, 48) == list(range(48))
    large = MeshTable(pp=16, dp_shard=128, tp=8)
    chosen = some_ranks(large, 24)
    assert len(chosen) == len(set(chosen)) == 24
    assert {0, 1, 7, 8, 1016, 1024, 15360, 16383} <= set(chosen)
    assert coordinates(corner(large, 3, 2), large) == {
        "pp": 3, "dp_replicate": 0, "dp_shard": 64, "cp": 0, "tp": 0,
    }  # fmt: skip
