"""Train healthy ranks with what watches them, and look for a false alarm.

Each layout trains for 200 steps, with slow ranks watched as they are by default, and with replicas
compared after every tenth step. No rank may be named. The faults that must be named are planted by
``faults``: ``bash tools/prove/run faults corruption stragglers``.

All layouts have two processes. Run it on a machine that does nothing else: a rank that shares its
core with another program is slow.

    bash tools/prove/run watch                 # all layouts
    bash tools/prove/run watch --steps 50

For each layout it also prints the mean time of a step, and that of a comparison.

Exit status: 0 if no rank was named, 1 if one was.
"""

import statistics
import time
from typing import Any, NamedTuple

from composer3d.runtime.launch import Pool
from composer3d.training.loop import train
from composer3d.training.observers.replicas import ReplicaCheck
from composer3d.training.observers.stragglers import StragglerWatch
from tools.prove.proof import add_number, make_parser, watched_run

EVERY = 10
LIMIT_S = 1800.0
MOE = "model.architecture=moe model.preset=debug-moe"
LAYOUTS = (
    "mesh.dp_shard=2",
    "mesh.dp_replicate=2",
    "mesh.dp_replicate=2 precision.compute=bfloat16 memory.activation_checkpoint=full",
    f"mesh.dp_replicate=2 {MOE}",
)

RECIPE = f"""\
[run]
name = "watch"
device = "cpu"
[model]
preset = "debug-small"
[data]
source = "python"
seq_len = 128
global_batch = 8
micro_batch = 2
[checkpoint]
every = 0
[metrics]
every = 1000
tensorboard = false
[reliability]
digest_every = {EVERY}
"""


class Watched(NamedTuple):
    """What a healthy training has shown: reports on ranks, and mean times."""

    lines: list[str]
    step_s: float
    comparison_s: float


def main(arguments: list[str]) -> int:
    parser = make_parser("watch", __doc__)
    add_number(parser, "--steps", 200, "steps of each layout")
    steps = parser.parse_args(arguments).steps
    if steps < EVERY:
        parser.error(f"--steps must be at least {EVERY}: replicas are compared after each {EVERY}")
    alarms = 0
    with Pool() as pool:
        for layout in LAYOUTS:
            task = {"layout": layout, "steps": steps}
            found, *_ = pool.run(watch, task, world_size=2, limit_s=LIMIT_S)
            alarms += bool(found.lines)
            print(
                f"{'ALARM' if found.lines else 'quiet'}  {layout}: {steps} steps of "
                f"{1000 * found.step_s:.0f} ms, {steps // EVERY} comparisons of "
                f"{1000 * found.comparison_s:.0f} ms",
                *found.lines,
                sep="\n       ",
                flush=True,
            )
    print(f"{len(LAYOUTS) - alarms} of {len(LAYOUTS)} layouts without an alarm")
    return 1 if alarms else 0


def watch(layout: str, steps: int) -> Watched:
    """A task: train, and return what rank 0 reports about ranks."""
    comparisons: list[float] = []
    with watched_run(RECIPE, [f"run.steps={steps}", *layout.split()]) as (run, lines):
        replicas = run.observers.find(ReplicaCheck)
        assert replicas is not None
        assert run.observers.find(StragglerWatch) is not None
        check = replicas.check

        def timed_check(step: int) -> Any:
            begin_s = time.perf_counter()
            result = check(step)
            comparisons.append(time.perf_counter() - begin_s)
            return result

        replicas.check = timed_check  # type: ignore[method-assign]
        begin_s = time.perf_counter()
        train(run)
        training_s = time.perf_counter() - begin_s - sum(comparisons)
    if len(comparisons) != steps // EVERY:
        raise RuntimeError(f"replicas were compared {len(comparisons)} times in {steps} steps")
    return Watched(lines, training_s / steps, statistics.mean(comparisons))
