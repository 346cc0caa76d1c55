"""The trace of a training: what it has, and that a training without it is as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from composer3d.dryrun.collectives import CountCollectives
from composer3d.facts import trace
from composer3d.planner.schedule import actions
from composer3d.recipe.resolve import load
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import DispatchMode
from composer3d.training.build import build_stages
from composer3d.training.observers.timeline import TimelineWriter
from composer3d.training.step import compute_gradients
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch
from tests.training.jobs import RECIPE, build_and_train, built_run, losses

MESH = "pp = 2\ndp_shard = 2"
SETS = ["run.steps=4", "optim.warmup=1", "optim.decay=4", "checkpoint.every=0"]
SCHEDULE = "ZBVZeroBubble"


class _Operators(DispatchMode):
    """Collects the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_losses_are_the_same_with_a_trace(folder: Path, pool: Pool) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh="pp = 2"))
    schedule = f"parallel.schedule={SCHEDULE}"
    for out_dir, more in (("off", []), ("on", ["metrics.timeline_steps=[2, 3]"])):
        sets = [*SETS, schedule, f"run.out_dir={out_dir}", *more]
        pool.run(build_and_train, {"folder": str(folder), "sets": sets}, world_size=2)
    assert losses(folder, "off") == losses(folder, "on")
    assert len(losses(folder, "on")) == 4
    assert not (folder / "off" / "small" / trace.FOLDER).exists()

    run = folder / "on" / "small"
    assert sorted(path.name for path in (run / trace.FOLDER).iterdir()) == [
        "pp0.jsonl",
        "pp1.jsonl",
    ]
    planned = actions(SCHEDULE, 2, 2, 4)
    for step in (2, 3):
        found = trace.read(run, step)
        for row, cells in zip(found.events, planned, strict=True):
            ran = [event.action for event in row if event.is_action]
            assert ran == [action for cell in cells for action in cell]
            assert sum(event.name == trace.GRADIENTS for event in row) >= 1
        assert found.heads[1].clock_error_s < 1
        # A message is received after it was sent.
        sent = {event.name: event.end_s for event in found.events[0]}
        received = {event.name: event.begin_s for event in found.events[1]}
        assert received["1F0"] >= sent["0F0"] - 2 * found.heads[1].clock_error_s


def test_nothing_remains_of_a_trace(folder: Path, pool: Pool) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=MESH))
    sets = [f"data.path={folder / 'corpus.txt'}", f"parallel.schedule={SCHEDULE}"]
    arguments = {"recipe_file": str(folder / "recipe.toml"), "sets": sets}
    for before, traced, after in pool.run(steps_around_a_trace, arguments, world_size=4):
        assert before == after
        # A traced step differs by the clock's all-reduces only.
        assert before["loss"] == traced["loss"]
        clock = ("all_reduce", "allreduce_", "aten.", "c10d.")
        extra = list(traced["operators"])
        for name in before["operators"]:
            extra.remove(name)
        assert all(name.startswith(clock) for name in extra)
        assert sum("allreduce_" in name for name in extra) in (0, 17)


def steps_around_a_trace(recipe_file: str, sets: list[str]) -> list[dict[str, Any]]:
    """Facts of three equal steps, the second of which is traced by the ranks of one pipeline."""
    facts = []
    with pool_world() as device:
        recipe = load(recipe_file, sets).recipe
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        batch = local_batch(random_batch(recipe, 0), stages)
        compute_gradients(stages, batch)  # the first step also prepares
        wait = schedules._wait_batch_p2p
        for is_traced in (False, True, False):
            with _Operators() as operators, CountCollectives(mesh) as collectives:
                if is_traced and mesh.coords["dp_shard"] == 0:
                    with stages.executor.record() as recording:
                        sums = compute_gradients(stages, batch)
                    assert recording.events
                else:
                    sums = compute_gradients(stages, batch)
            pipeline: Any = stages.executor
            facts.append(
                {
                    "loss": sums.await_values().loss,
                    "operators": operators.names,
                    "collectives": {
                        axis: {name: (use.count, use.sent_bytes) for name, use in found.items()}
                        for axis, found in collectives.traffic.items()
                    },
                    "functions": [
                        schedules._wait_batch_p2p is wait,
                        *(
                            name in vars(stage)
                            for stage in pipeline._stages
                            for name in ("forward_one_chunk", "backward_one_chunk")
                        ),
                    ],
                }
            )
    return facts


def test_only_the_ranks_of_one_pipeline_trace(folder: Path, pool: Pool) -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(mesh=MESH))
    # The ranks of pp 0 and pp 1, with two data-parallel ranks each.
    assert pool.run(has_timeline, {"folder": str(folder)}, world_size=4) == [
        True,
        False,
        True,
        False,
    ]


def has_timeline(folder: str) -> bool:
    with built_run(folder, ["metrics.timeline_steps=[1, 1]"]) as run:
        run.observers.close()
        return run.observers.find(TimelineWriter) is not None


@pytest.mark.gpu
def test_a_gpu_times_the_work_of_its_stream() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from composer3d.parallel.pipeline.trace import _GpuWatch

    watch = _GpuWatch(torch.device("cuda"))
    begin = watch.mark()
    torch.cuda._sleep(10**8)
    end = watch.mark()
    watch.finish()
    assert watch.seconds(end) - watch.seconds(begin) > 0.01
