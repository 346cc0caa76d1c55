"""A step and an evaluation of one rank, on a GPU in name or on the CPU, operator by operator."""

import os
import pkgutil
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composer3d.dryrun.collectives import (
    CollectiveCounter,
    Traffic,
    axis_names,
    message_of,
    tensors_in,
)
from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.stage import (
    LAUNCH_NOTHING,
    RankWithoutData,
    Recorder,
    compose_without_data,
)
from composer3d.recipe.schema import Recipe
from composer3d.runtime.torch_private import around_pipeline_start, body_of
from composer3d.training.validation import evaluate_batch
from tools.fake_cuda import device

# Operators after which the host has a value, or whose output has a shape that only data tells.
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Their kernels for CUDA look for the true elements of a mask among the indices.
_WITH_INDICES = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_"})

# Where ``HostCopy`` copies.
OF_HOST_COPY = "host_copy.py:__init__"

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


class Copy(NamedTuple):
    """A copy between devices, or a value that the host reads from a GPU.

    Attributes:
        operator: such as "aten::_to_copy".
        source, target: the types of the devices; "host" for a value.
        place: where composer3d asked for it, as "file.py:function".
    """

    operator: str
    source: str
    target: str
    place: str


class Collective(NamedTuple):
    """A call, with the ranks of its group, and the bytes that a rank sends in it."""

    operation: str
    ranks: tuple[int, ...]
    dtype: str
    sent_bytes: int


class Phase(Enum):
    """A part of a step. What checkpointing computes again belongs to backward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Counts(NamedTuple):
    """What one rank does.

    Attributes:
        operators: by name, without views; those of the host as well.
        launched: what the host launches on the device: operators that compute, fill, copy or
            communicate, by name, without views and allocations.
        copies: how often each was made.
        collectives: in order.
        blocking: how many of them make the host wait at once for what the device has to do.
    """

    operators: Counter[str]
    launched: dict[Phase, Counter[str]]
    copies: Counter[Copy]
    collectives: list[Collective]
    blocking: Counter[Copy]

    @property
    def waits(self) -> int:
        """How often the host waits for the device.

        It waits for each ``HostCopy``, and once for all other copies that do not block.
        """
        later = {
            copy: count
            for copy, count in (self.copies - self.blocking).items()
            if copy.source == "cuda"
        }
        alone = sum(count for copy, count in later.items() if copy.place == OF_HOST_COPY)
        return self.blocking.total() + alone + any(copy.place != OF_HOST_COPY for copy in later)


class Seen(NamedTuple):
    """What a rank does in a step and in an evaluation.

    Attributes:
        traffic: of the step, by axis and operation.
    """

    step: Counts
    evaluation: Counts
    traffic: Traffic


def with_more_blocks(recipe: Recipe) -> tuple[Recipe, int]:
    """Return ``recipe`` with one block more in each stage, and how many more a rank has."""
    pp = recipe.mesh.pp
    blocks = recipe.parallel.stages_per_rank if pp > 1 else 1
    model = replace(recipe.model, n_layers=recipe.model.n_layers + pp * blocks)
    return replace(recipe, model=model), blocks


def launched_by_more_blocks(shallow: Seen, deep: Seen) -> dict[Phase, Counter[str]]:
    """Return what a rank launches in a step of ``deep`` that it does not in one of ``shallow``."""
    return {phase: deep.step.launched[phase] - shallow.step.launched[phase] for phase in Phase}


class Job(NamedTuple):
    """A rank to run.

    Attributes:
        on_gpu: on a GPU in name, or on the CPU.
        prepare: the place of a function, as ``module:name``, to call first.
    """

    recipe: Recipe
    rank: int = 0
    on_gpu: bool = True
    prepare: str | None = None


def run_one_of(jobs: Sequence[Job], library: Path) -> Seen:
    """Run the job of this worker: worker RANK has ``jobs[RANK]``."""
    return run_rank(jobs[int(os.environ["RANK"])], library)


def run_rank(job: Job, library: Path) -> Seen:
    """Run a step and an evaluation. The process must end afterwards, as for ``tape_stage``."""
    if job.prepare is not None:
        pkgutil.resolve_name(job.prepare)()
    recipe = job.recipe
    on = torch.device("cpu")
    if job.on_gpu:
        device.install(library)
        on = torch.device("cuda", 0)
    watcher = Watcher(MemoryLedger(offload=recipe.memory.cpu_offload))
    with (
        compose_without_data(recipe, job.rank, 1.0, watcher, on) as rank,
        around_pipeline_start(watcher.ignoring),
    ):
        # What happens once in a training only is not of interest.
        watcher.take_a_step(rank)
        watcher.begin()
        collectives = CollectiveCounter(axis_names(rank.stages.mesh))
        with watcher.counting(collectives):
            watcher.take_a_step(rank)
        step = watcher.begin()
        evaluate_batch(rank.stages, rank.batch)
        return Seen(step, watcher.begin(), collectives.traffic)


class Watcher(Recorder):
    """Sees the devices of every operator."""

    # Each is one call of the host, and some have kernels of their own on a GPU: ``rms_norm``.
    opens_composed = False

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self._updates = False
        self.begin()

    def begin(self) -> Counts:
        """Start to count; return what was counted before."""
        before = getattr(self, "_counts", None)
        launched: dict[Phase, Counter[str]] = {phase: Counter() for phase in Phase}
        self._counts = Counts(Counter(), launched, Counter(), [], Counter())
        return before or self._counts

    def take_a_step(self, rank: RankWithoutData) -> None:
        """Run one optimizer step as ``training.loop`` does."""
        rank.take_a_step(before_update=self._begin_update)
        self._updates = False

    def _begin_update(self) -> None:
        self._updates = True

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is not NotImplemented and body_of(operator) is None and not self.ignores:
            self._count(operator, arguments, keywords or {}, result)
        return result

    def _count(
        self,
        operator: Any,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        result: Any,
    ) -> None:
        name = operator.name().partition(".")[0]
        returns_views = all(entry.alias_info is not None for entry in operator._schema.returns)
        if not returns_views or name in _COPIES:
            self._counts.operators[name] += 1
        message = message_of(operator, arguments)
        if message is not None or _is_launched(operator, name, arguments, result):
            self._counts.launched[self._phase()][name] += 1
        if message is not None and message.group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(message.group))
            sent = Collective(message.operation, ranks, str(message.dtype), message.sent_bytes)
            self._counts.collectives.append(sent)

        sources = {tensor.device.type for tensor in tensors_in(list(arguments))}
        targets = {tensor.device.type for tensor in tensors_in(result)}
        if "cuda" in sources and _reads(operator, name, arguments, keywords):
            copy = Copy(name, "cuda", "host", _place())
            self._counts.copies[copy] += 1
            self._counts.blocking[copy] += 1
        elif name in _COPIES and len(sources | targets) > 1:
            # ``copy_`` has its target among its arguments, and returns it.
            (target,) = targets
            source = "cpu" if target == "cuda" else "cuda"
            copy = Copy(name, source, target, _place())
            self._counts.copies[copy] += 1
            may_go_on = keywords.get("non_blocking") or True in arguments[2:3]
            if not may_go_on:
                # torch waits for the stream after such a copy, in either direction.
                self._counts.blocking[copy] += 1

    def _phase(self) -> Phase:
        if self._updates:
            return Phase.UPDATE
        # Every thread that runs a part of a backward pass knows its number.
        return Phase.FORWARD if torch._C._current_graph_task_id() < 0 else Phase.BACKWARD


def _is_launched(operator: Any, name: str, arguments: tuple[Any, ...], result: Any) -> bool:
    """Return whether the device runs an operator, which is no collective.

    Some operators return their argument or a copy of it: only storages tell views.
    """
    inputs, outputs = list(tensors_in(list(arguments))), list(tensors_in(result))
    if not any(tensor.is_cuda for tensor in (*inputs, *outputs)) or name in LAUNCH_NOTHING:
        return False
    if operator._schema.is_mutable:
        return True
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(tensor.untyped_storage()._cdata not in known for tensor in outputs)


def _reads(
    operator: Any, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> bool:
    """Return whether the host waits for a value of a GPU before the operator is done."""
    if name in _WITH_INDICES:
        return any(tensor.dtype is torch.bool for tensor in tensors_in(list(arguments[1])))
    if name == "aten::_grouped_mm":
        # Without bfloat16, torch runs a product for each group, and copies their ends to the host.
        return arguments[0].dtype is not torch.bfloat16
    if name == "aten::repeat_interleave":
        # A caller who gives the length of the output spares the host the sum of the repeats.
        return keywords.get("output_size") is None
    return not _READS.isdisjoint(operator.tags)


def _place() -> str:
    """Return the innermost function of composer3d on the stack, outside of dry runs."""
    frames: Sequence[traceback.FrameSummary] = traceback.extract_stack()
    for frame in reversed(frames):
        if "/composer3d/" in frame.filename and "/dryrun/" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.name}"
    return "torch"
