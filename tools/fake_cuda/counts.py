"""A step and an evaluation of one rank, on a GPU in name or on the CPU, operator by operator."""

import os
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composer3d.dryrun.collectives import message_of, tensors_in
from composer3d.dryrun.memory import MemoryLedger
from composer3d.dryrun.stage import Recorder, compose_without_data, take_a_step
from composer3d.recipe.schema import Recipe
from composer3d.runtime.torch_private import around_pipeline_start, body_of
from composer3d.training.step import evaluate_batch
from tests.fake_cuda import device

# Operators after which the host has a value, or whose output has a shape that only data tells.
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Their kernels for CUDA look for the true elements of a mask among the indices.
_WITH_INDICES = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_"})

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


class Counts(NamedTuple):
    """What one rank does.

    Attributes:
        operators: by name, without views.
        copies: how often each was made.
        collectives: in order.
    """

    operators: Counter[str]
    copies: Counter[Copy]
    collectives: list[Collective]


class Seen(NamedTuple):
    step: Counts
    evaluation: Counts


def run_ranks(recipe: Recipe, library: Path) -> Seen:
    """Run a pipeline rank on a GPU (workers with an even RANK) or on the CPU (the others)."""
    pp_rank, on_cpu = divmod(int(os.environ["RANK"]), 2)
    return run_rank(recipe, pp_rank, None if on_cpu else library)


def run_rank(recipe: Recipe, pp_rank: int, library: Path | None) -> Seen:
    """Run a step and an evaluation as the first rank of ``pp_rank``; with a library, on a GPU."""
    on = torch.device("cpu")
    if library is not None:
        device.install(library)
        on = torch.device("cuda", 0)
    watcher = _Watcher(MemoryLedger(offload=recipe.memory.cpu_offload))
    with compose_without_data(recipe, pp_rank, 1.0, watcher, on) as rank:
        # What happens once in a training only is not of interest.
        take_a_step(rank, watcher.ledger)
        watcher.begin()
        with around_pipeline_start(watcher.ignoring):
            take_a_step(rank, watcher.ledger)
            step = watcher.begin()
            evaluate_batch(rank.stages, rank.batch)
            return Seen(step, watcher.begin())


class _Watcher(Recorder):
    """Sees the devices of every operator."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__(ledger)
        self.begin()

    def begin(self) -> Counts:
        """Start to count; return what was counted before."""
        before = getattr(self, "_counts", None)
        self._counts = Counts(Counter(), Counter(), [])
        return before or self._counts

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(operator, types, arguments, keywords)
        if result is not NotImplemented and body_of(operator) is None and not self.ignores:
            self._count(operator, arguments, result)
        return result

    def _count(self, operator: Any, arguments: tuple[Any, ...], result: Any) -> None:
        name = operator.name().partition(".")[0]
        returns_views = all(entry.alias_info is not None for entry in operator._schema.returns)
        if not returns_views or name in _COPIES:
            self._counts.operators[name] += 1
        message = message_of(operator, arguments)
        if message is not None and message.group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(message.group))
            sent = Collective(message.operation, ranks, str(message.dtype), message.sent_bytes)
            self._counts.collectives.append(sent)

        sources = {tensor.device.type for tensor in tensors_in(list(arguments))}
        targets = {tensor.device.type for tensor in tensors_in(result)}
        if "cuda" in sources and _reads(operator, name, arguments):
            self._counts.copies[Copy(name, "cuda", "host", _place())] += 1
        elif name in _COPIES and len(sources | targets) > 1:
            # ``copy_`` has its target among its arguments, and returns it.
            (target,) = targets
            source = "cpu" if target == "cuda" else "cuda"
            self._counts.copies[Copy(name, source, target, _place())] += 1


def _reads(operator: Any, name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether the host waits for a value of a GPU before the operator is done."""
    if name in _WITH_INDICES:
        return any(tensor.dtype is torch.bool for tensor in tensors_in(list(arguments[1])))
    if name == "aten::_grouped_mm":
        # Without bfloat16, torch runs a product for each group, and copies their ends to the host.
        return arguments[0].dtype is not torch.bfloat16
    return not _READS.isdisjoint(operator.tags)


def _place() -> str:
    """Return the innermost function of composer3d on the stack, outside of dry runs."""
    frames: Sequence[traceback.FrameSummary] = traceback.extract_stack()
    for frame in reversed(frames):
        if "/composer3d/" in frame.filename and "/dryrun/" not in frame.filename:
            return f"{Path(frame.filename).name}:{frame.name}"
    return "torch"
