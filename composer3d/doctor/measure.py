"""Measure collectives, matrix products, memory and clocks. All ranks measure at the same time."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from composer3d.doctor.facts import Speed
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.exchanges import (
    AxisGroup,
    Collective,
    all_collectives,
    call,
    output_of,
)
from composer3d.runtime.process_group import form_group, max_over_ranks

_LATENCY_BYTES = 1 << 10  # of a message whose time is latency alone

# The sizes of messages, by the type of the device.
_SIZES = {
    "cpu": (_LATENCY_BYTES, 1 << 20, 1 << 24),
    "cuda": (_LATENCY_BYTES, 1 << 20, 1 << 24, 1 << 28),
}
_SECONDS = 0.1  # for each size of a collective, if one call takes less
_MOST_CALLS = 20
_LONGEST_S = 5.0  # a size that should take longer for a call is left out

# The largest dim of a square matrix product, and the bytes of a copy.
_MATRIX = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_ROUNDS = 7  # of which the fastest counts

_CLOCK_ROUNDS = 5


def measure_collectives(
    groups: Sequence[AxisGroup], parallel: ParallelTable, device: torch.device
) -> list[Speed]:
    """Time each collective of each axis. Collective over all ranks.

    All groups of an axis work at the same time, as in a training. Messages are of zeros in float32.

    Args:
        groups: from ``exchanges.groups_of`` and ``node_groups``.
        parallel: the recipe's ``[parallel]``.
        device: the device of this rank.
    """
    speeds = []
    for entry in groups:
        for collective in _collectives_of(entry.axis, parallel):
            for n_bytes in _SIZES[device.type]:
                seconds, longest_s = _time_collective(entry, collective, n_bytes, device)
                speeds.append(Speed(entry.axis, collective, n_bytes, seconds))
                # The next size is 16 times as large, or more.
                if 16 * longest_s > _LONGEST_S and n_bytes > _LATENCY_BYTES:
                    break
    return speeds


def _collectives_of(axis: str, parallel: ParallelTable) -> Sequence[Collective]:
    if axis in ("node", "between nodes"):
        return "all_reduce", "all_gather", "reduce_scatter", "send_recv"
    return all_collectives(axis, parallel)


def _time_collective(
    entry: AxisGroup, collective: Collective, n_bytes: int, device: torch.device
) -> tuple[float, float]:
    """Return the seconds of a call on this rank, and those of the slowest rank of all."""
    size = len(entry.ranks)
    elements = -(-n_bytes // (4 * size)) * size
    own_elements = elements // size if collective == "all_gather" else elements
    x = torch.zeros(own_elements, device=device)
    out = output_of(collective, x, entry.group)

    def run() -> None:
        call(collective, x, out, entry.group)

    run()  # connects the ranks
    max_over_ranks([0.0])  # all begin together
    (longest_s,) = max_over_ranks([_seconds_of(run, 1, device)])
    # The same on all ranks.
    calls = max(1, min(_MOST_CALLS, int(_SECONDS / max(longest_s, 1e-9))))
    seconds = _seconds_of(run, calls, device)
    (longest_s,) = max_over_ranks([seconds])
    return seconds, longest_s


def _seconds_of(function: Callable[[], object], calls: int, device: torch.device) -> float:
    _wait_for(device)
    begin_s = time.perf_counter()
    for _ in range(calls):
        function()
    _wait_for(device)
    return (time.perf_counter() - begin_s) / calls


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def node_groups(rank: int, nodes: Sequence[int]) -> list[AxisGroup]:
    """Form the groups that show the links: the ranks of a node, and ranks across nodes.

    Those across nodes have the first rank of each node, or the second of each, and so on. Where
    nodes have different numbers of ranks, those without a partner on every node are in none.
    Collective over all ranks.

    Args:
        rank: the rank of this process.
        nodes: the number of each rank's node, by rank.

    Returns:
        The groups "node" and "between nodes" of this rank. Those of one rank are left out.
    """
    ranks_of: dict[int, list[int]] = {}
    for peer, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(peer)
    least = min(map(len, ranks_of.values()))
    across = [[ranks[place] for ranks in ranks_of.values()] for place in range(least)]
    found = []
    for axis, all_ranks in (("node", list(ranks_of.values())), ("between nodes", across)):
        # All ranks measure the same things: a single rank would leave its peers waiting.
        if min(map(len, all_ranks)) == 1 or sum(map(len, all_ranks)) < len(nodes):
            continue
        for ranks in all_ranks:
            group = form_group(ranks)
            if rank in ranks:
                found.append(AxisGroup(axis, ranks, group))
    return found


def measure_matrix(dtypes: Sequence[str], device: torch.device) -> dict[str, float]:
    """Return the FLOP/s of a large matrix product on this device, by dtype.

    It is the fastest of several rounds: what disturbs a device for a moment does not count.
    """
    dim = _MATRIX[device.type]
    calls = 1 if device.type == "cpu" else 10
    rates = {}
    for dtype in dtypes:
        a = torch.randn(dim, dim, device=device, dtype=getattr(torch, dtype))
        out = a @ a
        seconds = min(
            _seconds_of(
                lambda a=a, out=out: torch.mm(a, a, out=out),  # type: ignore[misc]
                calls,
                device,
            )
            for _ in range(_ROUNDS)
        )
        rates[dtype] = 2 * dim**3 / seconds
    return rates


def measure_memory(device: torch.device) -> float:
    """Return the bytes per second that a large copy reads and writes, the best of some rounds."""
    source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the first use of its pages
    seconds = min(_seconds_of(lambda: target.copy_(source), 1, device) for _ in range(_ROUNDS))
    return 2 * source.nbytes / seconds


class Clock(NamedTuple):
    """The clock of a host.

    Attributes:
        ahead_s: how far it is ahead of rank 0's.
        error_s: the largest error of ``ahead_s``: half of a round trip.
    """

    ahead_s: float
    error_s: float


def measure_clock(
    store: dist.Store, rank: int, leaders: Sequence[int], now: Callable[[], float] = time.time
) -> Clock | None:
    """Compare the clock of this rank's host with rank 0's, through the store.

    A rank asks, and rank 0 answers with its time. The answer was given between the request and
    its arrival. The shortest of several round trips counts. Rank 0 and ``leaders`` must call it.

    Args:
        store: the store of the job.
        rank: the rank of this process.
        leaders: one rank of each other node; rank 0 answers them one after the other.
        now: the clock.

    Returns:
        The clock on ``leaders``, and None on rank 0.
    """
    if rank == 0:
        for leader in leaders:
            for number in range(_CLOCK_ROUNDS):
                key = f"composer3d/clock/{leader}/{number}"
                store.get(key)  # waits for the request
                store.set(f"{key}/answer", repr(now()))
        return None
    trips = []
    for number in range(_CLOCK_ROUNDS):
        key = f"composer3d/clock/{rank}/{number}"
        begin_s = now()
        store.set(key, "")
        answer_s = float(store.get(f"{key}/answer"))
        end_s = now()
        trips.append(Clock((begin_s + end_s) / 2 - answer_s, (end_s - begin_s) / 2))
    return min(trips, key=lambda trip: trip.error_s)
