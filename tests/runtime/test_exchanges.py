"""Wrong groups and wrong values of collectives are named by rank, axis and collective."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

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
    wrong_calls: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """A task: check a mesh; return the axes that are checked.

    Args:
        table: the sizes of the mesh.
        wrong_group: a rank, an axis, and the axis whose group it has instead.
        wrong_calls: axes and collectives that return something else on rank 3.
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
        if mesh.rank == 3:
            plant(wrong_calls)
        check_exchanges(mesh, groups, lambda axis: all_collectives(axis, PARALLEL))
        return [entry.axis for entry in groups]


def plant(wrong_calls: Sequence[tuple[str, str]]) -> None:
    right, right_values = exchanges.call, exchanges._values
    axes: list[str] = []

    def values(mesh: Any, entry: Any, *rest: Any) -> Any:
        axes.append(entry.axis)
        return right_values(mesh, entry, *rest)

    def wrong(name: Any, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
        right(name, x, out, group)
        if (axes[-1], name) in wrong_calls:
            out.copy_(out.roll(1) if len(out) > 1 and name != "all_reduce" else out + 1)

    exchanges.call, exchanges._values = wrong, values


CUBE = MeshTable(pp=2, dp_shard=2, tp=2)
RING = MeshTable(dp_replicate=2, dp_shard=1, cp=2, tp=2)
EXPERTS = MeshTable(dp_shard=2, tp=2, ep=2)


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
def test_a_right_mesh_passes(pool: Pool, table: MeshTable, axes: set[str]) -> None:
    ranks = pool.run(check, {"table": table}, world_size=table.world_size)
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
    ("table", "ends"),
    [
        (
            CUBE,
            {
                ("pp", "send_recv"): "(ranks 3, 7) gave 129 in place of that of rank 7 "
                "(pp1 dp1 cp0 tp1)",
                ("fsdp", "all_gather"): "(ranks 1, 3) gave the value of rank 3 in place of that "
                "of rank 1 (pp0 dp0 cp0 tp1)",
                ("tp", "all_reduce"): "(ranks 2-3) gave the sum 117, which must be 116",
                ("world", "reduce_scatter"): "(ranks 0-7) gave the sum 2401, which must be 2400",
            },
        ),
        (
            RING,
            {
                ("cp", "all_to_all"): "(ranks 1, 3) gave the value of rank 3 in place of that "
                "of rank 1 (pp0 dp0 cp0 tp1)",
            },
        ),
    ],
)
def test_wrong_values_are_named(
    pool: Pool, table: MeshTable, ends: dict[tuple[str, str], str]
) -> None:
    lines = lines_of(pool, table, wrong_calls=list(ends))
    assert all(line.startswith("rank 3 (") for line in lines)
    expected = [f"{collective} over {axis} {end}" for (axis, collective), end in ends.items()]
    assert [line.partition(": ")[2] for line in lines] == expected


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
