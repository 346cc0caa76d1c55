"""Profile chosen steps of chosen ranks with torch's profiler, for Perfetto.

Beside what torch names by itself (operators, kernels, FSDP's units, the optimizer), the trace has a
region for each collective, named by its axis ("tp: all_gather"), and with a pipeline one for each
action, named by its stage. On a GPU a snapshot of the allocator comes with it.
"""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from composer3d.facts.schedules import parse_action
from composer3d.parallel import Stages
from composer3d.parallel.pipeline.runtime import Pipeline
from composer3d.recipe.schema import Recipe
from composer3d.runtime import log
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import (
    DispatchMode,
    group_by_name,
    group_of_argument,
    start_memory_history,
    write_memory_history,
)
from composer3d.training.observers.observer import Observer

FOLDER = "profile"

_ACTION_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
}

# The operators of these namespaces that have a group are collectives, or have some inside.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "composer3d")


class _NameCollectives(DispatchMode):
    """Puts each collective of this thread, and of its backward, into a region named by its axis.

    Args:
        mesh: the mesh of the job, which knows the axes of groups.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(of_argument, DTensor) for of_argument in types):
            return NotImplemented  # DTensor calls the operators of its shards
        name = self._region(operator, arguments)
        if name is None:
            return operator(*arguments, **(keywords or {}))
        with record_function(name):
            return operator(*arguments, **(keywords or {}))

    def _region(self, operator: Any, arguments: Sequence[Any]) -> str | None:
        namespace, _, name = operator.name().partition("::")
        if namespace not in _NAMESPACES:
            return None
        name = name.partition(".")[0].strip("_")
        if name == "wait_tensor":
            return "wait for a collective"
        group = _group_of(operator, arguments)
        if group is not None:
            return f"{self._mesh.axis_of(group)}: {name}"
        return None if namespace == "composer3d" else f"collective: {name}"


def _group_of(operator: Any, arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    for entry, argument in zip(operator._schema.arguments, arguments, strict=False):
        if entry.name == "group_name":
            # Attention of one rank that holds whole sequences names no group.
            return group_by_name(argument) if argument else None
        if entry.name == "process_group":
            return group_of_argument(argument)
    return None


def _around_action(name: str) -> AbstractContextManager[object]:
    """Return the region of an action of the pipeline, or of a wait of its schedule."""
    action = parse_action(name)
    if action is None:
        return record_function(f"pp: wait for {name}" if name == "messages" else f"reduce {name}")
    words = _ACTION_NAMES.get(action.kind, action.kind)
    return record_function(f"pp: stage {action.stage} {words}, micro-batch {action.micro_batch}")


class Profiler(Observer):
    """Profiles the steps ``first`` to ``last`` of this rank, and writes one trace of them.

    Args:
        path: the trace, ``….json.gz``.
        first, last: the steps, counted from 1.
        stages: this rank's stages.
        names_collectives: whether collectives get regions. A compiled block may not run inside of
            the mode that does it; torch's own events then have the group.
    """

    def __init__(
        self,
        path: Path,
        *,
        first: int,
        last: int,
        stages: Stages,
        names_collectives: bool,
    ) -> None:
        self._path, self._first, self._last = path, first, last
        self._stages = stages
        self._naming = _NameCollectives(stages.mesh) if names_collectives else None
        self._profile: profile | None = None
        self._on_gpu = stages.mesh.device.type == "cuda"

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the step inside of this context if it is one of those wanted. No collective."""
        if not self._first <= number <= self._last:
            yield
            return
        if self._profile is None:
            self._start()
        with ExitStack() as regions:
            regions.enter_context(record_function(f"step {number}"))
            if isinstance(self._stages.executor, Pipeline):
                regions.enter_context(self._stages.executor.around_actions(_around_action))
            if self._naming is not None:
                regions.enter_context(self._naming)
            yield

    def check_state(self, step: int) -> None:
        # Not in ``step``: a step that is left out has no such context.
        if step >= self._last:
            self.close()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            start_memory_history()
        self._profile = profile(activities=activities)
        self._profile.start()

    def close(self) -> None:
        """Write the trace if one has begun: after the last wanted step, or at the end of the run.

        A trace that cannot be written is reported, and the run goes on.
        """
        if self._profile is None:
            return
        found, self._profile = self._profile, None
        found.stop()
        try:
            _write(self._path, lambda staging: found.export_chrome_trace(staging))
            if self._on_gpu:
                name = self._path.name.replace(".json.gz", ".memory.pickle")
                _write(self._path.with_name(name), write_memory_history)
        except (OSError, RuntimeError) as error:
            log.get().warning(f"the profile {self._path} could not be written: {error}")
        else:
            log.get().info(f"wrote the profile {self._path}")


def _write(path: Path, write: Any) -> None:
    """Write a file under a random name, and rename it: nothing is written through a link."""
    staging = path.with_name(f".{uuid.uuid4().hex}{''.join(path.suffixes[-2:])}")
    try:
        write(str(staging))
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def make_profiler(recipe: Recipe, stages: Stages, folder: Path) -> Profiler | None:
    """Return what profiles the recipe's steps on this rank, or None if it profiles none.

    Raises OSError if the folder for the traces cannot be made.
    """
    steps, rank = recipe.metrics.profile_steps, stages.mesh.rank
    if steps is None or rank not in recipe.metrics.profile_ranks:
        return None
    (folder / FOLDER).mkdir(exist_ok=True)
    return Profiler(
        folder / FOLDER / f"rank{rank}-steps{steps[0]}-{steps[1]}.json.gz",
        first=steps[0],
        last=steps[1],
        stages=stages,
        names_collectives=not recipe.compile.enabled,
    )
