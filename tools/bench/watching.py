"""What it costs a step to watch slow ranks and bad steps.

Each rank has two runs of the same recipe: one watches all that a run can watch in each step, and
the other nothing. They step in turns, so what disturbs the machine disturbs both. Their steps take
the time of the processor, which does not count the time that other programs take. To watch waits
for nobody: the waits of a step are counted by ``counts``.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import Run, build
from composer3d.training.loop import do_step
from composer3d.training.observers.stragglers import StragglerWatch

# All that a run can watch in each step, with a window that fills at once; and nothing.
WATCHED = (
    "reliability.on_bad_step=skip",
    "reliability.spike_sigma=100",
    "reliability.spike_window=8",
)
UNWATCHED = ("reliability.straggler_factor=0",)
WARM_UP = 3  # steps that are not timed
_LIMIT_S = 1200.0


class Row(NamedTuple):
    """Processor milliseconds of the steps of all ranks, in the order of time.

    Attributes:
        name: the layout.
        unwatched_ms: without watching.
        watched_ms: of the steps that were done in turns with these.
    """

    name: str
    unwatched_ms: list[float]
    watched_ms: list[float]

    @property
    def ratio(self) -> float:
        """The time of a watched step as a ratio of the other one: the median over the turns."""
        pairs = zip(self.watched_ms, self.unwatched_ms, strict=True)
        return statistics.median(watched / unwatched for watched, unwatched in pairs)


def measure(pool: Pool, recipe: str, name: str, sets: Sequence[str], steps: int) -> Row:
    """Measure one layout.

    Args:
        pool: where the ranks run.
        recipe: the path of the recipe.
        name: of the layout.
        sets: the overrides of the layout.
        steps: the steps of each side.
    """
    world_size = load(recipe, sets, check_files=False).recipe.world_size
    with tempfile.TemporaryDirectory(prefix="composer3d-watching-") as folder:
        arguments = {"recipe": recipe, "sets": list(sets), "steps": steps, "folder": folder}
        ranks = pool.run(step_in_turns, arguments, world_size=world_size, limit_s=_LIMIT_S)
    row = Row(name, [], [])
    for unwatched_ms, watched_ms in ranks:
        row.unwatched_ms.extend(unwatched_ms)
        row.watched_ms.extend(watched_ms)
    return row


def step_in_turns(
    recipe: str, sets: list[str], steps: int, folder: str
) -> tuple[list[float], list[float]]:
    """A task: step both runs in turns; returns the processor milliseconds of each one's steps."""
    torch.set_num_threads(1)
    times: tuple[list[float], list[float]] = ([], [])
    with pool_world() as device:
        runs: list[Run] = []
        for side, further in (("unwatched", UNWATCHED), ("watched", WATCHED)):
            own = [f"run.out_dir={folder}/{side}", f"run.steps={steps}", "checkpoint.every=0"]
            resolved = load(recipe, [*sets, *further, *own])
            runs.append(build(resolved.recipe, device, resolved.to_toml()))
        watches = [found for run in runs if (found := run.observers.find(StragglerWatch))]
        for step in range(steps):
            # Each one is the first in every second turn.
            for side in (0, 1) if step % 2 else (1, 0):
                with watches[side].watching():
                    begin_s = time.process_time()
                    do_step(runs[side])
                    times[side].append(1000 * (time.process_time() - begin_s))
        for run in runs:
            run.loader.close()
            run.observers.close()
    return times[0][WARM_UP:], times[1][WARM_UP:]
