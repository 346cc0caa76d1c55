"""A rank that sleeps for a part of its own time is named; healthy ranks are not."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training import loop
from composer3d.training.build import build
from tests.training.jobs import RECIPE

SLOW_FROM = 9
SETS = ["checkpoint.every=0", "data.global_batch=16", "data.seq_len=64", "metrics.every=100"]


def train_with_a_slow_rank(
    folder: str, sets: list[str], slow_rank: int | None, slowness: float
) -> list[tuple[int, list[str], dict[str, float]]]:
    """A task: train; after step ``SLOW_FROM``, one rank takes ``slowness`` times its own time.

    Returns:
        The reports of this rank.
    """
    os.chdir(folder)
    reports = []
    wait = dist.Work.wait
    with pool_world() as device:
        resolved = load("recipe.toml", sets, world_size=int(os.environ["WORLD_SIZE"]))
        run = build(resolved.recipe, device, resolved.to_toml())
        move_router_biases = run.stages.move_router_biases

        def at_the_end_of_a_step(*arguments: Any) -> None:
            move_router_biases(*arguments)
            if run.step >= SLOW_FROM and run.stages.mesh.rank == slow_rank:
                watch = run.stragglers
                time.sleep(
                    (slowness - 1) * (time.perf_counter() - watch._begun_s - watch._blocked_s)
                )

        run.stages.move_router_biases = at_the_end_of_a_step  # type: ignore[method-assign]
        run.metrics.report = (  # type: ignore[method-assign]
            lambda step, lines, values: reports.append((step, lines, values))
        )
        loop.train(run)
        # Nothing remains of the clocks around waits.
        assert dist.Work.wait is wait
    return reports


def run_all(
    pool: Pool,
    folder: Path,
    mesh: str,
    *sets: str,
    world_size: int,
    slow_rank: int | None,
    slowness: float = 1.5,
) -> list[list[tuple[int, list[str], dict[str, float]]]]:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = {
        "folder": str(folder),
        "sets": [*SETS, *sets],
        "slow_rank": slow_rank,
        "slowness": slowness,
    }
    return pool.run(train_with_a_slow_rank, arguments, world_size=world_size)


@pytest.mark.parametrize(
    ("mesh", "world_size", "slowness"),
    # Four processes on two cores slow each other down: the second one needs more of a difference.
    [("dp_shard = 2", 2, 1.5), ("pp = 2\ndp_shard = 2", 4, 2.0)],
    ids=["dp", "pp"],
)
def test_a_slow_rank_is_named_within_20_steps(
    pool: Pool, folder: Path, mesh: str, world_size: int, slowness: float
) -> None:
    sets = [f"run.steps={SLOW_FROM + 20}", f"optim.decay={SLOW_FROM + 20}"]
    first, *others = run_all(
        pool, folder, mesh, *sets, world_size=world_size, slow_rank=1, slowness=slowness
    )
    assert not any(others)
    # On a machine that is shared with others, they may slow down another rank as well.
    named = [report for report in first if report[2].get("straggler_rank") == 1]
    (step, lines, values), *_ = named
    line = next(line for line in lines if "rank 1 (" in line)
    assert SLOW_FROM < step <= SLOW_FROM + 20
    assert line.startswith(f"straggler: rank 1 (pp0 dp1 cp0 tp0) on {socket.gethostname()} takes ")
    assert values["straggler_rank"] == 1
    assert 1.3 <= values["straggler_factor"] < 2.5


@pytest.mark.parametrize("sets", [[], ["reliability.straggler_factor=0"]], ids=["on", "off"])
def test_healthy_ranks_are_not_named(pool: Pool, folder: Path, sets: list[str]) -> None:
    # 200 steps are a proof of their own: tools/prove/run watch.
    sets = ["run.steps=15", "optim.decay=15", *sets]
    assert run_all(pool, folder, "dp_shard = 2", *sets, world_size=2, slow_rank=None) == [[], []]
