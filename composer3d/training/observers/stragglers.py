"""Measure the own time of each rank, and name the ranks that are slower than their peers."""

import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from composer3d.recipe.schema import ReliabilityTable
from composer3d.reliability.report import Report
from composer3d.reliability.stragglers import StragglerJudge, time_of_window
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import Gathering
from composer3d.runtime.ranks import describe_rank
from composer3d.runtime.torch_private import watch_waits
from composer3d.training.observers.observer import Observer, StepResult

# What a rank sends for a window: its own time, and the start of the name of its host.
_MESSAGE = struct.Struct("<d64s")


class StragglerWatch(Observer):
    """Measures the own time of this rank in each step, and names slow ranks on rank 0.

    No step waits for another rank: the times of a window travel while the next steps run.

    Only CPUs are watched. On a GPU the host does not wait for collectives, so its clock does not
    know own times. Waits inside of compiled blocks are not seen: they count as own time, which
    makes all ranks of tp look equal.

    Collective over all ranks, unless nothing is watched: one gather of 72 bytes in every window.

    Args:
        table: the recipe's ``[reliability]``.
        mesh: the mesh of the job.
        groups: from ``peer_groups``. Without two ranks in a group, nothing is watched.
        tell: takes, on rank 0, the number of steps done and what was found.
    """

    def __init__(
        self,
        table: ReliabilityTable,
        mesh: Mesh,
        groups: list[list[int]],
        tell: Callable[[int, Report], None],
    ) -> None:
        self.is_on = (
            table.straggler_factor > 0
            and mesh.device.type == "cpu"
            and any(len(group) > 1 for group in groups)
        )
        self._window = table.straggler_window
        self._own_s: list[float] = []
        self._blocked_s = 0.0
        self._step = 0
        self._tell = tell
        self._gathering: Gathering | None = None
        self._judge = StragglerJudge(groups, table.straggler_factor)
        self._sizes = mesh.sizes
        self._host = socket.gethostname().encode()

    def watching(self) -> AbstractContextManager[None]:
        """Return the context within which the waits of this thread are measured."""
        return watch_waits(self._add_wait) if self.is_on else nullcontext()

    @contextmanager
    def training(self) -> Iterator[None]:
        with self.watching():
            yield
        if self._gathering is not None:
            self._receive()

    def _add_wait(self, seconds: float) -> None:
        self._blocked_s += seconds

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        self._blocked_s = 0.0
        begun_s = time.perf_counter()
        yield
        self._own_s.append(time.perf_counter() - begun_s - self._blocked_s)

    def end_step(self, result: StepResult) -> None:
        self._step = result.step
        if not self.is_on:
            return
        is_end_of_window = len(self._own_s) == self._window
        # A window before has arrived long ago, so this does not wait.
        if self._gathering is not None and (is_end_of_window or self._gathering.has_arrived()):
            self._receive()
        if is_end_of_window:
            self._gathering = Gathering(_MESSAGE.pack(time_of_window(self._own_s), self._host))
            self._own_s.clear()

    def _receive(self) -> None:
        """Judge the window that has been sent. Rank 0 waits for it, and tells what it finds."""
        assert self._gathering is not None
        messages = self._gathering.await_contents()
        self._gathering = None
        report = None if messages is None else self._judge_window(messages)
        if report is not None:
            self._tell(self._step, report)

    def _judge_window(self, messages: list[bytes]) -> Report | None:
        own_s, hosts = zip(*map(_MESSAGE.unpack, messages), strict=True)
        stragglers, recovered = self._judge.judge(own_s)

        def name(rank: int) -> str:
            host = hosts[rank].rstrip(b"\0").decode(errors="replace")
            return f"{describe_rank(rank, self._sizes)} on {host}"

        lines = [
            f"straggler: {name(found.rank)} takes {found.factor:.2f} times as long as its "
            f"peers: {1000 * found.own_s:.1f} ms of its own in a step, they "
            f"{1000 * found.peers_s:.1f} ms"
            for found in stragglers
        ]
        lines += [f"no straggler any more: {name(rank)}" for rank in recovered]
        if not lines:
            return None
        slowest = self._judge.slowest
        rank, factor = (slowest.rank, slowest.factor) if slowest else (math.nan, math.nan)
        values = {"straggler_rank": rank, "straggler_factor": factor}
        return Report(lines, values)
