"""A step of a real job, with its collectives and its allocations, to compare dry runs with."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from composer3d.dryrun.collectives import CountCollectives
from composer3d.dryrun.report import StageReport
from composer3d.dryrun.stage import fix_routing, run_stage
from composer3d.parallel import Stages
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.training.build import build_stages
from composer3d.training.optim import build_optimizer
from composer3d.training.step import compute_gradients, update
from composer3d.verify.data import random_batch
from composer3d.verify.worker import local_batch

# By axis and operation: calls, and bytes that a rank sends.
Traffic = dict[str, dict[str, tuple[int, int]]]

MARK = "the step that is measured"


class Calls(NamedTuple):
    """The traffic of a rank, and its operators."""

    traffic: Traffic
    coords: dict[str, int]


def count_real_step(recipe: Recipe) -> Calls:
    """Train two steps on this rank of a real world; count the collectives of the second one."""
    with pool_world() as device:
        mesh = Mesh.build(recipe.mesh, device)
        stages = build_stages(recipe, mesh)
        for module in stages.modules:
            fix_routing(module, recipe.mesh.ep, 1.0)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
        _step(recipe, stages, optimizer, 0)
        with CountCollectives(mesh) as counter:
            _step(recipe, stages, optimizer, 1)
        traffic = {
            axis: {name: (usage.count, usage.sent_bytes) for name, usage in operations.items()}
            for axis, operations in counter.traffic.items()
        }
        return Calls(traffic, mesh.coords)


def measure_real_memory(recipe: Recipe) -> int:
    """Train two steps on this rank of a real world; returns the peak bytes of the second one.

    torch's profiler sees every allocation and release of torch's allocator, inside of kernels too.
    It knows nothing of storages, tensors or kinds.
    """
    with pool_world() as device:
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            mesh = Mesh.build(recipe.mesh, device)
            stages = build_stages(recipe, mesh)
            optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
            _step(recipe, stages, optimizer, 0)
            with record_function(MARK):
                _step(recipe, stages, optimizer, 1)
        return _peak_bytes(profiler)


def _peak_bytes(profiler: Any) -> int:
    """Add up allocations and releases in order; return the largest sum since the mark."""
    events = profiler.profiler.kineto_results.events()
    (begin,) = (event.start_ns() for event in events if event.name() == MARK)
    memory = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    live = peak = 0
    for time_ns, n_bytes in memory:
        live += n_bytes
        if time_ns >= begin:
            peak = max(peak, live)
    return peak


def _step(recipe: Recipe, stages: Stages, optimizer: torch.optim.Optimizer, number: int) -> None:
    batch = local_batch(random_batch(recipe, number), stages)
    _, norm = compute_gradients(stages, batch)
    update(stages, optimizer, norm=norm, max_norm=recipe.optim.clip, lr=1e-3)


def dry_run_of(pool: Pool, recipe: Recipe, pp_rank: int = 0, *, skew: float = 1.0) -> StageReport:
    """Dry-run one pipeline rank in a process of its own."""
    arguments = {"recipe": recipe, "pp_rank": pp_rank, "skew": skew}
    (report,) = pool.run(run_stage, arguments, world_size=1)
    return report


def traffic_of(report: StageReport) -> Traffic:
    return {
        axis: {name: (call.count, call.sent_bytes) for name, call in operations.items()}
        for axis, operations in report.comm.items()
    }


def recipe_of(path: Any, sets: Sequence[str]) -> Recipe:
    return load(path, list(sets), check_files=False).recipe
