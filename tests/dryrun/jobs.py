"""A step of a real job, with its collectives and its allocations, to compare dry runs with."""

import gc
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from composer3d.dryrun.collectives import CountCollectives, is_collective
from composer3d.dryrun.report import StageReport
from composer3d.dryrun.run import run_ranks
from composer3d.dryrun.stage import fix_routing
from composer3d.parallel import Stages
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.runtime.launch import Pool
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.torch_private import DispatchMode
from composer3d.training.build import build_stages
from composer3d.training.optimizers import Optimizer, build_stages_optimizer
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
        optimizer = build_stages_optimizer(stages, recipe)
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

    torch's profiler sees the allocations of torch's allocator, inside of kernels too. It knows
    nothing of storages, tensors or kinds.
    """
    with pool_world() as device:
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            mesh = Mesh.build(recipe.mesh, device)
            stages = build_stages(recipe, mesh)
            optimizer = build_stages_optimizer(stages, recipe)
            _step(recipe, stages, optimizer, 0)
            with record_function(MARK), _TimeForGloo():
                _step(recipe, stages, optimizer, 1)
        return _peak_bytes(profiler)


class _TimeForGloo(DispatchMode):
    """Waits after each collective, so that gloo's threads release what they have sent."""

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = operator(*arguments, **(keywords or {}))
        if is_collective(operator):
            time.sleep(0.003)
        return result


class Allocation(NamedTuple):
    """An allocation, or a release (``n_bytes`` is negative), as the profiler saw it."""

    time_ns: int
    address: int
    n_bytes: int


def _peak_bytes(profiler: Any) -> int:
    """Replay allocations and releases in order; return the most live bytes since the mark."""
    allocations, begin_ns = _allocations_of(profiler)
    live = LiveBlocks()
    peak = 0
    for time_ns, address, n_bytes in allocations:
        if n_bytes > 0:
            live.allocate(address, n_bytes)
        else:
            live.release(address)
        if time_ns >= begin_ns:
            peak = max(peak, live.total)
    return peak


def _allocations_of(profiler: Any) -> tuple[list[Allocation], int]:
    """Return what was allocated and released, by time, and when the mark began.

    It leaves out what gloo allocates for itself, to pack messages: NCCL packs none.
    """
    allocations: list[Allocation] = []
    begin_ns = None
    waiting = [
        (event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()
    ]
    while waiting:
        event, in_gloo = waiting.pop()
        in_gloo = in_gloo or event.name.startswith(("gloo:", "c10d::"))
        waiting += [(child, in_gloo) for child in event.children]
        if event.name == MARK:
            begin_ns = event.start_time_ns
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if not (in_gloo and fields.alloc_size > 0):
                allocations.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    assert begin_ns is not None
    return sorted(allocations), begin_ns


class LiveBlocks:
    """The blocks of memory that are in use.

    The profiler misses what gloo's threads release after an operation. So a block that is
    allocated where others are ends these.

    Attributes:
        total: their bytes.
    """

    def __init__(self) -> None:
        self.total = 0
        self._addresses: list[int] = []  # sorted
        self._bytes: dict[int, int] = {}

    def allocate(self, address: int, n_bytes: int) -> None:
        first = bisect_right(self._addresses, address)
        if first > 0:
            before = self._addresses[first - 1]
            if before + self._bytes[before] > address:
                first -= 1
        end = bisect_left(self._addresses, address + n_bytes)
        for covered in self._addresses[first:end]:
            self.total -= self._bytes.pop(covered)
        self._addresses[first:end] = [address]
        self._bytes[address] = n_bytes
        self.total += n_bytes

    def release(self, address: int) -> None:
        if address in self._bytes:
            self.total -= self._bytes.pop(address)
            del self._addresses[bisect_left(self._addresses, address)]


def _step(recipe: Recipe, stages: Stages, optimizer: Optimizer, number: int) -> None:
    batch = local_batch(random_batch(recipe, number), stages)
    sums = compute_gradients(stages, batch)
    update(stages, optimizer, sums, max_norm=recipe.optim.clip, lr=1e-3)


def dry_run_of(pool: Pool, recipe: Recipe, pp_rank: int = 0, *, skew: float = 1.0) -> StageReport:
    """Dry-run one pipeline rank in a process of its own."""
    (report,) = run_ranks(pool, [(recipe, pp_rank)], skew=skew)
    return report


def traffic_of(report: StageReport) -> Traffic:
    return {
        axis: {name: (call.count, call.sent_bytes) for name, call in operations.items()}
        for axis, operations in report.comm.items()
    }


def recipe_of(path: Any, sets: Sequence[str]) -> Recipe:
    return load(path, list(sets), check_files=False).recipe
