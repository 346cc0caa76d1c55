"""Record when this pipeline rank runs the actions of a step, on a clock that all ranks share."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from composer3d.facts.trace import TracedEvent
from composer3d.runtime.torch_private import around_pipeline_work

_ROUNDS = 8


class SharedClock(NamedTuple):
    """The clock of pipeline rank 0, as another rank reads it.

    Attributes:
        offset_s: what must be added to ``time.perf_counter()`` of this rank.
        error_s: how far the sum may be from the clock of rank 0 at most.
        started_unix_s: the time at which the shared clock shows 0, in seconds since 1970.
    """

    offset_s: float
    error_s: float
    started_unix_s: float


def _share_clock(group: dist.ProcessGroup, device: torch.device) -> SharedClock:
    """Measure the offset of this rank's clock from that of rank 0 of ``group``.

    In each round, rank 0 reads its clock before one all-reduce and after another one, and the other
    ranks read theirs between both. No rank leaves an all-reduce before all ranks have entered it,
    so each of these times is between the two of rank 0. Their middle is wrong by half of the
    distance at most. The round with the shortest distance counts. With gloo on one machine the
    error is some tenths of a millisecond, with NCCL it is less.

    Collective over ``group``: 17 all-reduces of at most 18 float64. On a GPU, the host waits for
    each of them.

    Args:
        group: the ranks of one pipeline.
        device: the device of this rank.
    """
    rank = dist.get_rank(group)

    def meet(values: list[float]) -> list[float]:
        """Return the sums of the values of all ranks."""
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(sums, group=group)
        return sums.tolist()

    before_s, own_s, after_s = [], [], []
    for _ in range(_ROUNDS):
        before_s.append(time.perf_counter())
        meet([0.0])
        own_s.append(time.perf_counter())
        meet([0.0])
        after_s.append(time.perf_counter())

    # Only rank 0 adds something, so that the sums are its times.
    times_s = [*before_s, *after_s, time.perf_counter(), time.time()]
    *both_s, zero_s, started_unix_s = meet(times_s if rank == 0 else [0.0] * len(times_s))
    if rank == 0:
        return SharedClock(-zero_s, 0.0, started_unix_s)
    rounds = zip(both_s[:_ROUNDS], own_s, both_s[_ROUNDS:], strict=True)
    first_s, here_s, last_s = min(rounds, key=lambda times_s: times_s[2] - times_s[0])
    offset_s = (first_s + last_s) / 2 - here_s
    return SharedClock(offset_s - zero_s, (last_s - first_s) / 2, started_unix_s)


@dataclass
class Recording:
    """What this rank has recorded.

    Attributes:
        clock: the clock of the times.
        events: in order; empty until the recorded step has ended.
    """

    clock: SharedClock
    events: list[TracedEvent] = field(default_factory=list)


@contextmanager
def record(
    stages: Sequence[PipelineStage], group: dist.ProcessGroup, device: torch.device
) -> Iterator[Recording]:
    """Record the actions and waits of ``stages`` inside of the context.

    On the CPU, times are those of ``time.perf_counter``. On a GPU, they are those of CUDA events in
    the current stream: a wait is the time in which the stream waits for a message. The host waits
    for the GPU before the first action and after the last one, and never between them.

    Collective over ``group``: see ``_share_clock``.

    Args:
        stages: all stages of this rank.
        group: the ranks of the pipeline.
        device: the device of this rank.
    """
    recording = Recording(_share_clock(group, device))
    watch = _GpuWatch(device) if device.type == "cuda" else _HostWatch()
    marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begin = watch.mark()
        yield
        marks.append((name, begin, watch.mark()))

    with around_pipeline_work(stages, timed):
        yield recording
    watch.finish()
    offset_s = recording.clock.offset_s
    recording.events += [
        TracedEvent(name, watch.seconds(begin) + offset_s, watch.seconds(end) + offset_s)
        for name, begin, end in marks
    ]


class _HostWatch:
    """Marks are times of the host."""

    def mark(self) -> Any:
        return time.perf_counter()

    def finish(self) -> None:
        """Do nothing: the marks are times already."""

    def seconds(self, mark: Any) -> float:
        return float(mark)


class _GpuWatch:
    """Marks are CUDA events in the current stream, whose times can be read after ``finish``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The GPU is idle, so that the first event happens at once, some microseconds later.
        torch.cuda.synchronize(device)
        self._origin_s = time.perf_counter()
        self._origin = self.mark()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, mark: Any) -> float:
        """Return the time of a mark on the host's clock."""
        return self._origin_s + self._origin.elapsed_time(mark) / 1000
