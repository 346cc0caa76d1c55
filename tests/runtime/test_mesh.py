"""The groups of each rank: the ranks that it communicates with on each axis."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.facts.errors import MeshError
from composer3d.recipe.schema import MeshTable
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import fake_world

CPU = torch.device("cpu")

# Of 8 ranks, with two other axes outside and inside: the ranks of each one's pair.
PAIRS = [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]


def meshes_of(table: MeshTable) -> list[dict[str, Any]]:
    """Each rank's view of its mesh as plain data, in a world without other processes."""
    return [view_of(table, rank) for rank in range(table.world_size)]


def view_of(table: MeshTable, rank: int) -> dict[str, Any]:
    with fake_world(rank, table.world_size):
        mesh = Mesh.build(table, CPU)
        groups = {
            axis: dist.get_process_group_ranks(mesh.device_mesh.get_group(axis))
            for axis in ("pp", "fsdp", "tp")
        }
        return {
            **groups,
            "cp_group": mesh.cp_group and dist.get_process_group_ranks(mesh.cp_group),
            "replicas": mesh.replicas().mesh.tolist(),
            "pp_group": dist.get_process_group_ranks(mesh.pp_group),
            "fsdp_mesh": None if mesh.fsdp is None else mesh.fsdp.mesh.tolist(),
            "tp_mesh": None if mesh.tp is None else mesh.tp.mesh.tolist(),
            "coords": list(mesh.coords.values()),
            "batch": (mesh.batch_rank, mesh.batch_ranks),
            "stage_ranks": mesh.stage_ranks,
            "identity": mesh.identity,
        }


def reduce_scalars() -> list[float]:
    with pool_world() as device:
        mesh = Mesh.build(MeshTable(dp_shard=2), device)
        rank = mesh.rank
        return mesh.sum_over_world(
            1 + 2**-40, torch.tensor(rank + 1, dtype=torch.int64), torch.tensor(0.5 * rank)
        )


def test_a_world_of_another_size_is_refused_with_the_product_of_the_axes() -> None:
    with fake_world(0, 2), pytest.raises(MeshError) as caught:
        Mesh.build(MeshTable(pp=2, dp_shard=1, tp=3), CPU)
    assert caught.value.lines == (
        "mesh pp 2 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 3 = 6 processes, but the world has 2; "
        "start 6 processes, or change an axis of [mesh]",
    )


def test_groups_of_three_axes() -> None:
    ranks = meshes_of(MeshTable(pp=2, dp_shard=2, tp=2))
    assert [rank["tp"] for rank in ranks] == [[r - r % 2, r - r % 2 + 1] for r in range(8)]
    assert [rank["fsdp"] for rank in ranks] == PAIRS
    assert [rank["pp"] for rank in ranks] == [[r % 4, r % 4 + 4] for r in range(8)]
    assert all(rank["pp_group"] == rank["pp"] for rank in ranks)
    assert all(
        rank["fsdp_mesh"] == rank["fsdp"] and rank["tp_mesh"] == rank["tp"] for rank in ranks
    )
    assert ranks[6]["coords"] == [1, 0, 1, 0, 0]
    assert ranks[6]["identity"].startswith("rank 6 (pp1 dp1 cp0 tp0, node ")
    assert [rank["batch"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
    assert {rank["stage_ranks"] for rank in ranks} == {4}


def test_replicas_are_the_outer_dim_of_the_fsdp_mesh() -> None:
    ranks = meshes_of(MeshTable(dp_replicate=2, dp_shard=2, tp=2))
    assert ranks[0]["fsdp_mesh"] == [[0, 2], [4, 6]]
    assert ranks[7]["fsdp_mesh"] == [[1, 3], [5, 7]]
    assert [rank["batch"] for rank in ranks] == [(dp, 4) for dp in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert {rank["stage_ranks"] for rank in ranks} == {8}


def test_context_parallel_ranks_share_the_rows_of_a_batch() -> None:
    ranks = meshes_of(MeshTable(dp_replicate=2, dp_shard=2, cp=2))
    assert [rank["cp_group"] for rank in ranks] == [[r - r % 2, r - r % 2 + 1] for r in range(8)]
    assert [rank["batch"] for rank in ranks] == [(dp, 4) for dp in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert ranks[5]["fsdp_mesh"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ranks[5]["replicas"] == [[rank] for rank in range(8)]
    ranks = meshes_of(MeshTable(pp=2, dp_shard=1, cp=2, tp=2))
    assert [rank["cp_group"] for rank in ranks] == PAIRS
    assert ranks[3]["replicas"] == [[1], [3]]


def test_an_axis_of_one_has_no_mesh() -> None:
    for rank in meshes_of(MeshTable(pp=2, dp_shard=1)):
        assert rank["fsdp_mesh"] is None
        assert rank["cp_group"] is None
        assert rank["tp_mesh"] is None


def test_scalars_are_reduced_in_float64(pool: Pool) -> None:
    expected = [2 + 2**-39, 3.0, 0.5]
    assert pool.run(reduce_scalars, {}, world_size=2) == [expected, expected]


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ({"tp": 4, "ep": 2}, "efsdp"),
        ({"tp": 4, "ep": 1}, "tp"),
        ({"dp_shard": 2, "tp": 4, "ep": 2}, "efsdp"),
        ({"dp_replicate": 2, "tp": 4, "ep": 2}, "dp_replicate x efsdp"),
        ({"dp_replicate": 2, "tp": 4, "ep": 4}, "dp_replicate"),
    ],
)
def test_ranks_that_hold_the_same_experts_have_a_name(sizes: dict[str, int], axis: str) -> None:
    table = MeshTable(**{"dp_shard": 1, **sizes})
    with fake_world(1, table.world_size):
        mesh = Mesh.build(table, CPU)
        name = mesh.axis_of(mesh.expert_replicas().get_group("expert_replica"))
    assert name == axis
