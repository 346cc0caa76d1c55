"""A rank that sleeps in its own time is named; healthy ranks are not.

These ranks differ by so much that no other program on the machine decides who is slow. That a rank
of 1.5 times the time is named within 20 steps is shown by simulated times
(``tests/reliability/test_stragglers.py``) and by ``tools/prove/run faults stragglers``.
"""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from composer3d.runtime.launch import Pool
from composer3d.training import loop
from tests.training.jobs import RECIPE, Listener, built_run

# Two windows must agree; a report comes one step later.
WINDOW = 3
STEPS = 8
SETS = [
    "checkpoint.every=0",
    "data.global_batch=8",
    "data.seq_len=64",
    "metrics.every=100",
    f"reliability.straggler_window={WINDOW}",
    f"run.steps={STEPS}",
    f"optim.decay={STEPS}",
]
HEALTHY_S, SLOW_S = 0.1, 0.5


def train_with_a_slow_rank(
    folder: str, sets: list[str], slow_rank: int | None
) -> list[tuple[int, list[str], dict[str, float]]]:
    """A task: train; every rank sleeps in each step, ``slow_rank`` the longest.

    Returns:
        The reports of this rank.
    """
    wait = dist.Work.wait
    with built_run(folder, sets) as run:
        move_router_biases = run.stages.move_router_biases

        def at_the_end_of_a_step(*arguments: Any) -> None:
            move_router_biases(*arguments)
            time.sleep(SLOW_S if run.stages.mesh.rank == slow_rank else HEALTHY_S)

        run.stages.move_router_biases = at_the_end_of_a_step  # type: ignore[method-assign]
        listener = Listener()
        run.observers.add(listener)
        loop.train(run)
        # Nothing remains of the clocks around waits.
        assert dist.Work.wait is wait
    return listener.reports


def run_all(
    pool: Pool, folder: Path, mesh: str, *sets: str, slow_rank: int | None
) -> list[list[tuple[int, list[str], dict[str, float]]]]:
    """Train on a mesh of two ranks on each of its axes."""
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=mesh))
    arguments = {"folder": str(folder), "sets": [*SETS, *sets], "slow_rank": slow_rank}
    world_size = 2 ** len(mesh.splitlines())
    return pool.run(train_with_a_slow_rank, arguments, world_size=world_size)


def test_a_slow_rank_is_named(pool: Pool, folder: Path) -> None:
    first, *others = run_all(pool, folder, "pp = 2\ndp_shard = 2", slow_rank=1)
    assert not any(others)
    # Each rank waits for the slow one. If waits counted as own time, all would look alike.
    ((step, (line,), values),) = first
    assert 2 * WINDOW < step <= STEPS
    assert line.startswith(f"straggler: rank 1 (pp0 dp1 cp0 tp0) on {socket.gethostname()} takes ")
    assert values["straggler_rank"] == 1
    assert values["straggler_factor"] >= 1.3


@pytest.mark.parametrize("factor", [2, 0])
def test_healthy_ranks_are_not_named(pool: Pool, folder: Path, factor: int) -> None:
    # The default factor is proven by tools/prove/run watch, on a machine without other work.
    sets = f"reliability.straggler_factor={factor}"
    assert run_all(pool, folder, "dp_shard = 2", sets, slow_rank=None) == [[], []]
