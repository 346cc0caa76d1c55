"""The length of a pipeline's step, many times for the same schedule. No torch here.

``simulate`` says when each action runs. The planner only needs the end of the last one, for
thousands of layouts with few different schedules. So a schedule is compiled once to a list of
nodes in an order that respects all dependencies, and a length is one pass over that list.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from composer3d.facts.schedules import Cell, StageMessage, in_order_of_messages
from composer3d.planner.schedule import cells_of
from composer3d.planner.simulate import KINDS, StageTimes, waits_for_ever


class Compiled(NamedTuple):
    """A schedule as nodes: cells, and further messages that a cell waits for.

    Each node comes after those that it waits for. The arrays have one item for each node.

    Attributes:
        previous: the node that the same rank runs before; -1: none.
        sender: the node whose message it needs; -1: none.
        boundary: the boundary that the message crosses; -1: it stays on its rank.
        duration: the index of its duration.
        durations: for each duration, the (stage, index in FBIW) whose times are added.
        spans: the first and the last node of each rank, if ranks start the next step as soon as
            they end this one. The step then lasts as long as the longest span. Empty: all ranks
            wait for the last one.
    """

    previous: array
    sender: array
    boundary: array
    duration: array
    durations: list[tuple[tuple[int, int], ...]]
    spans: tuple[tuple[int, int], ...] = ()


class Path(NamedTuple):
    """The longest chain of actions and messages, which determines the length.

    What comes before the first action of a span counts as -1.

    Attributes:
        actions: how often each (stage, index in FBIW) is on it.
        messages: how often a message over each boundary is on it.
    """

    actions: dict[tuple[int, int], int]
    messages: dict[int, int]

    def length_s(self, times: Sequence[StageTimes], send_s: Sequence[float]) -> float:
        """Return the seconds of this chain, which is a lower bound of the length."""
        seconds = sum(count * times[stage][kind] for (stage, kind), count in self.actions.items())
        return seconds + sum(count * send_s[index] for index, count in self.messages.items())


def length_s(schedule: Compiled, times: Sequence[StageTimes], send_s: Sequence[float]) -> float:
    """Return the seconds from the start of the first action to the end of the last.

    Args:
        schedule: the schedule.
        times: the times of each stage for one micro-batch.
        send_s: for each boundary between stages, the seconds of a message.
    """
    ends = _ends_s(schedule, times, send_s)
    if not schedule.spans:
        return max(ends)
    return max(ends[last] - start for start, (_, last) in _span_starts_s(schedule, times, ends))


def _span_starts_s(
    schedule: Compiled, times: Sequence[StageTimes], ends: Sequence[float]
) -> list[tuple[float, tuple[int, int]]]:
    """Return the time at which each span starts, and the span."""
    found = []
    for first, last in schedule.spans:
        parts = schedule.durations[schedule.duration[first]]
        duration = sum(times[stage][kind] for stage, kind in parts)
        found.append((ends[first] - duration, (first, last)))
    return found


def _ends_s(
    schedule: Compiled, times: Sequence[StageTimes], send_s: Sequence[float]
) -> list[float]:
    """Return the end of each node, and a last item that is 0."""
    durations = [sum(times[stage][kind] for stage, kind in parts) for parts in schedule.durations]
    sends = [*send_s, 0.0]  # the last one is for messages that stay on their rank
    ends = [0.0] * (len(schedule.previous) + 1)  # the last one is for nodes without predecessor
    nodes = zip(*schedule[:4], strict=True)
    for index, (previous, sender, boundary, duration) in enumerate(nodes):
        start = ends[previous]
        if sender >= 0:
            arrival = ends[sender] + sends[boundary]
            if arrival > start:
                start = arrival
        ends[index] = start + durations[duration]
    return ends


def critical_path(schedule: Compiled, times: Sequence[StageTimes], send_s: Sequence[float]) -> Path:
    """Return the longest chain. Where times change little, its length changes as the step's."""
    ends = _ends_s(schedule, times, send_s)
    path = Path({}, {})
    if not schedule.spans:
        _follow(schedule, ends, send_s, max(range(len(ends) - 1), key=ends.__getitem__), path, 1)
        return path
    first, last = max(
        _span_starts_s(schedule, times, ends), key=lambda span: ends[span[1][1]] - span[0]
    )[1]
    _follow(schedule, ends, send_s, last, path, 1)
    _follow(schedule, ends, send_s, first, path, -1)
    for part in schedule.durations[schedule.duration[first]]:
        path.actions[part] = path.actions.get(part, 0) + 1
    return path


def _follow(
    schedule: Compiled,
    ends: Sequence[float],
    send_s: Sequence[float],
    node: int,
    path: Path,
    weight: int,
) -> None:
    """Add the chain that determines the end of ``node`` to ``path``, ``weight`` times."""
    while node >= 0:
        for part in schedule.durations[schedule.duration[node]]:
            path.actions[part] = path.actions.get(part, 0) + weight
        sender, boundary = schedule.sender[node], schedule.boundary[node]
        arrival = -1.0
        if sender >= 0:
            arrival = ends[sender] + (send_s[boundary] if boundary >= 0 else 0.0)
        if arrival > ends[schedule.previous[node]]:
            if boundary >= 0:
                path.messages[boundary] = path.messages.get(boundary, 0) + weight
            node = sender
        else:
            node = schedule.previous[node]


def compile_cells(ranks: Sequence[Sequence[Cell]], *, ranks_wait: bool = True) -> Compiled:
    """Compile the cells of each pipeline rank.

    Args:
        ranks: the cells of each rank.
        ranks_wait: whether ranks wait for the last one before they start the next step.

    Raises:
        PlanError: a rank would wait for ever.
    """
    rank_of = {
        action.stage: rank for rank, cells in enumerate(ranks) for cell in cells for action in cell
    }
    last_stage = max(rank_of)
    previous_of, sender_of, boundary_of, duration_of = (array("i") for _ in range(4))

    def add(rank: int, sender: int, boundary: int, duration: int) -> int:
        previous_of.append(previous[rank])
        sender_of.append(sender)
        boundary_of.append(boundary)
        duration_of.append(duration)
        if previous[rank] < 0:
            first[rank] = len(previous_of) - 1
        previous[rank] = len(previous_of) - 1
        return previous[rank]

    durations: dict[tuple[tuple[int, int], ...], int] = {(): 0}
    sent: dict[StageMessage, int] = {}  # the node of each
    done = [0] * len(ranks)
    previous = [-1] * len(ranks)
    first = [-1] * len(ranks)
    for rank, cell, needed, own_messages in in_order_of_messages(ranks, last_stage):
        done[rank] += 1
        arrivals = [
            (sent[message], -1 if rank_of[message.sender] == rank else message.boundary)
            for message in needed
        ]
        own = tuple((action.stage, KINDS.index(action.kind)) for action in cell)
        kind = durations.setdefault(own, len(durations))
        for arrival in arrivals[:-1]:
            add(rank, *arrival, 0)
        node = add(rank, *(arrivals[-1] if arrivals else (-1, -1)), kind)
        sent.update(dict.fromkeys(own_messages, node))
    for cells, index in zip(ranks, done, strict=True):
        if index < len(cells):
            raise waits_for_ever(cells[index])
    found = Compiled(previous_of, sender_of, boundary_of, duration_of, list(durations))
    if ranks_wait:
        return found
    return found._replace(spans=tuple(zip(first, previous, strict=True)))


@cache
def compiled(
    schedule: str,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    path: str | None = None,
) -> Compiled:
    """Compile the schedule that ``cells_of`` returns, once."""
    return compile_cells(cells_of(schedule, pp, stages_per_rank, micro_batches, path))
