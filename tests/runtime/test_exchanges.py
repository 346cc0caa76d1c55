"""Wrong groups and wrong values of collectives are named by rank, axis and collective."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.facts.errors import ExchangeError
from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime import exchanges
from composer3d.runtime.exchanges import (
    all_collectives,
    check_exchanges,
    collectives_of_training,
    groups_of,
)
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.ranks import coordinates, group_ranks

PARALLEL = ParallelTable(cp_method="ulysses")


def check(
    table: MeshTable,
    *,
    wrong_group: tuple[int, str, str] | None = None,
    wrong_call: tuple[int, str, str] | None = None,
    is_short: bool = False,
) -> list[str]:
    """A task: check a mesh; return the axes that are checked.

    Args:
        table: the sizes of the mesh.
        wrong_group: a rank, an axis, and the axis whose group it has instead.
        wrong_call: a rank, an axis and a collective that returns something else there.
        is_short: whether to check what a training uses.
    """
    with pool_world() as device:
        mesh = Mesh.build(table, device)
        groups = groups_of(mesh, has_experts=table.ep > 1)
        if wrong_group is not None and mesh.rank == wrong_group[0]:
            by_axis = {entry.axis: entry.group for entry in groups}
            groups = [
                entry._replace(group=by_axis[wrong_group[2]])
                if entry.axis == wrong_group[1]
                else entry
                for entry in groups
            ]
        if wrong_call is not None and mesh.rank == wrong_call[0]:
            plant(wrong_call[1], wrong_call[2])
        of_axis = collectives_of_training if is_short else all_collectives
        check_exchanges(mesh, groups, lambda axis: of_axis(axis, PARALLEL))
        return [entry.axis for entry in groups]


def plant(axis: str, collective: str) -> None:
    right, right_values = exchanges.call, exchanges._values
    axes: list[str] = []

    def values(mesh: Any, entry: Any, *rest: Any) -> Any:
        axes.append(entry.axis)
        return right_values(mesh, entry, *rest)

    def wrong(name: Any, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
        right(name, x, out, group)
        if (axes[-1], name) == (axis, collective):
            out.copy_(out.roll(1) if len(out) > 1 and name != "all_reduce" else out + 1)

    exchanges.call, exchanges._values = wrong, values


CUBE = MeshTable(pp=2, dp_shard=2, tp=2)
RING = MeshTable(dp_replicate=2, dp_shard=1, cp=2, tp=2)
EXPERTS = MeshTable(dp_shard=2, tp=2, ep=2)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize(
    ("table", "axes"),
    [
        (CUBE, {"pp", "fsdp", "tp", "world"}),
        (RING, {"dp_replicate", "fsdp", "cp", "tp", "world"}),
        (EXPERTS, {"fsdp", "tp", "efsdp", "ep", "world"}),
        (MeshTable(pp=3, dp_shard=1), {"pp", "world"}),  # the previous rank is not the next one
        (MeshTable(dp_shard=1), set()),
    ],
)
def test_a_right_mesh_passes(pool: Pool, table: MeshTable, axes: set[str], is_short: bool) -> None:
    ranks = pool.run(check, {"table": table, "is_short": is_short}, world_size=table.world_size)
    assert [set(found) for found in ranks] == [axes] * table.world_size


def lines_of(pool: Pool, table: MeshTable, **faults: Any) -> Sequence[str]:
    with pytest.raises(WorkerError) as caught:
        pool.run(check, {"table": table, **faults}, world_size=table.world_size)
    error = caught.value.user_error
    assert isinstance(error, ExchangeError)
    assert error.status == 1
    assert set(caught.value.failures) == set(range(table.world_size))
    return error.lines


def test_a_wrong_group_is_named_before_any_rank_waits(pool: Pool) -> None:
    (line,) = lines_of(pool, CUBE, wrong_group=(5, "tp", "fsdp"))
    assert line.startswith("rank 5 (pp1 dp0 cp0 tp1, node 0) on ")
    assert line.endswith(": its group of tp has ranks 5, 7; it must have ranks 4-5, in this order")


@pytest.mark.parametrize(
    ("table", "axis", "collective", "end"),
    [
        (CUBE, "tp", "all_reduce", "over tp (ranks 2-3) gave the sum 117, which must be 116"),
        (CUBE, "fsdp", "all_gather", "(ranks 1, 3) gave the value of rank 3 in place of that of "
         "rank 1 (pp0 dp0 cp0 tp1)"),
        (CUBE, "world", "reduce_scatter", "gave the sum"),
        (CUBE, "pp", "send_recv", "over pp (ranks 3, 7) gave 129 in place of that of rank 7 "
         "(pp1 dp1 cp0 tp1)"),
        (RING, "cp", "all_to_all", "over cp (ranks 1, 3) gave the value of rank 3 in place of that "
         "of rank 1 (pp0 dp0 cp0 tp1)"),
        (EXPERTS, "ep", "all_to_all", "over ep (ranks 2-3) gave"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(
    pool: Pool, table: MeshTable, axis: str, collective: str, end: str
) -> None:
    (line,) = lines_of(pool, table, wrong_call=(3, axis, collective))
    assert line.startswith("rank 3 (")
    assert f": {collective} over {axis} (" in line
    assert end in line


def test_a_training_has_a_collective_for_each_axis() -> None:
    for method, expected in (
        ("ring", "send_recv"),
        ("allgather", "all_gather"),
        ("ulysses", "all_to_all"),
    ):
        parallel = ParallelTable(cp_method=method)  # type: ignore[arg-type]
        assert collectives_of_training("cp", parallel) == (expected,)
    for axis in ("pp", "dp_replicate", "fsdp", "tp", "efsdp", "ep", "world"):
        assert collectives_of_training(axis, PARALLEL)


@pytest.mark.parametrize("table", [CUBE, RING, EXPERTS, MeshTable(pp=3, dp_shard=2, cp=2, tp=2)])
def test_ranks_of_a_group_differ_on_their_axis_alone(table: MeshTable) -> None:
    axes = {
        "pp": ["pp"], "dp_replicate": ["dp_replicate"], "fsdp": ["dp_shard", "cp"],
        "dp_shard": ["dp_shard"], "cp": ["cp"], "tp": ["tp"],
    }  # fmt: skip
    for name, varied in axes.items():
        for rank in range(table.world_size):
            own = coordinates(rank, table)
            expected = [
                peer
                for peer in range(table.world_size)
                if all(own[a] == c for a, c in coordinates(peer, table).items() if a not in varied)
            ]
            assert group_ranks(name, rank, table) == expected


def hang() -> None:
    """A task: rank 1 does not join the second collective of tp."""
    from composer3d.runtime import peers
    from composer3d.runtime.process_group import open_store

    peers.GRACE_S = 1.0
    rank = int(os.environ["RANK"])
    watch = peers.explain_lost_peers(
        open_store(), rank=rank, size=2, describe=lambda peer: f"rank {peer}", advice=lambda: "look"
    )
    with watch, pool_world(timeout_s=3.0) as device:
        mesh = Mesh.build(MeshTable(dp_shard=1, tp=2), device)
        groups = groups_of(mesh, has_experts=False)
        if rank == 1:
            exchanges.call = lambda *_: dist.distributed_c10d.time.sleep(60)
        check_exchanges(mesh, groups, lambda axis: ("all_reduce",))


def test_a_rank_that_does_not_join_is_named(pool: Pool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(hang, {}, world_size=2, limit_s=60.0)
    assert caught.value.user_error is not None
    (line,) = caught.value.user_error.lines
    assert line.startswith("a collective failed: rank 1 at runtime/exchanges.py:")
