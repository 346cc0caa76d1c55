"""Measurements on processes: a slow rank, a clock that is ahead, and nodes."""

import os
import time
from typing import Any

import torch

from composer3d.doctor import measure, rank
from composer3d.doctor.report import DoctorReport
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import open_store, pool_world
from composer3d.runtime.torch_private import fake_world
from tools.prove.paths import RECIPE


def make_small() -> None:
    """Measure small messages and matrices."""
    measure._SIZES["cpu"] = (1 << 10, 1 << 16)
    measure._SECONDS = 0.01
    measure._MATRIX["cpu"] = 256
    measure._COPY_BYTES["cpu"] = 1 << 20


def examine(sets: list[str], slow_rank: int, nodes: int) -> DoctorReport | None:
    """A task: examine a recipe; a product takes 20 ms longer on one rank."""
    make_small()
    own, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["GROUP_RANK"] = str(own * nodes // size)
    rank.usable_cores = lambda: 64  # so that a slow rank is judged
    if own == slow_rank:
        right = torch.mm

        def slow(*arguments: Any, **keywords: Any) -> torch.Tensor:
            time.sleep(0.02)
            return right(*arguments, **keywords)

        torch.mm = slow
    store = open_store()
    with pool_world() as device:
        return rank.examine(load(RECIPE, sets, world_size=size).recipe, device, store)


def test_a_slow_rank_and_all_axes_are_reported(pool: Pool) -> None:
    sets = ["mesh.dp_shard=2", "mesh.tp=2"]
    report, *others = pool.run(examine, {"sets": sets, "slow_rank": 3, "nodes": 2}, world_size=4)
    assert others == [None] * 3
    assert report.problems == []
    assert report.slowest_rank == 3
    line = next(note for note in report.notes if "multiplies" in note)
    assert line.startswith("slow: rank 3 (pp0 dp1 cp0 tp1, node 1) on ")
    assert set(report.axes) == {"fsdp", "tp", "world", "node", "between nodes"}
    assert report.nodes == 2
    assert (report.axes["tp"].nodes, report.axes["fsdp"].nodes) == (1, 2)
    for axis in ("fsdp", "tp", "world"):
        assert set(report.axes[axis].slowest) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert all(
        set(by_size) == {1 << 10, 1 << 16}
        for axis in report.axes.values()
        for by_size in axis.slowest.values()
    )
    clock = report.ranks[2]
    assert clock.clock_s is not None
    assert abs(clock.clock_s) <= clock.clock_error_s


def test_wrong_values_end_the_examination(pool: Pool) -> None:
    report, _ = pool.run(examine_wrong, {}, world_size=2)
    (problem,) = report.problems
    assert problem.startswith("rank 1 (pp0 dp0 cp0 tp1, node 0) on ")
    assert ": all_reduce over tp (ranks 0-1) gave the sum" in problem
    assert not report.is_measured


def examine_wrong() -> DoctorReport | None:
    """A task: examine tp 2; an all-reduce over tp is wrong on rank 1."""
    from composer3d.runtime import exchanges

    if os.environ["RANK"] == "1":
        right, calls = exchanges.call, []

        def wrong(collective: Any, x: torch.Tensor, out: torch.Tensor, group: Any) -> None:
            right(collective, x, out, group)
            calls.append(collective)
            if len(calls) == 1:
                out += 1

        exchanges.call = wrong
    return examine(["mesh.tp=2"], slow_rank=-1, nodes=1)


def compare_clocks(ahead_s: dict[int, float]) -> measure.Clock | None:
    """A task: the clocks of some ranks are ahead."""
    own = int(os.environ["RANK"])
    store = open_store()
    with pool_world():
        if own == 1:
            return None
        return measure.measure_clock(
            store, own, list(ahead_s), lambda: time.time() + ahead_s.get(own, 0.0)
        )


def test_a_clock_that_is_ahead_is_measured(pool: Pool) -> None:
    ahead_s = {2: 5.0, 3: -3.0, 4: 0.0}
    first, second, *clocks = pool.run(compare_clocks, {"ahead_s": ahead_s}, world_size=5)
    assert first is second is None
    for clock, expected_s in zip(clocks, ahead_s.values(), strict=True):
        assert abs(clock.ahead_s - expected_s) <= clock.error_s < 0.5


def links_of(nodes: list[int], rank: int) -> dict[str, list[int]]:
    with fake_world(rank, len(nodes)):
        return {entry.axis: entry.ranks for entry in measure.node_groups(rank, nodes)}


def test_links_are_measured_where_there_are_partners() -> None:
    assert links_of([0, 0, 1, 1], 1) == {"node": [0, 1], "between nodes": [1, 3]}
    # One node has nothing between nodes, and one rank a node nothing inside.
    assert links_of([0, 0], 1) == {"node": [0, 1]}
    assert links_of([0, 1], 1) == {"between nodes": [0, 1]}
    # A rank without a partner on the other node would wait.
    assert [links_of([0, 0, 1], rank) for rank in range(3)] == [{}, {}, {}]
