"""Decide which ranks are slower than their peers.

All ranks of a job end a step together, because the fast ones wait for the slow one. So the time of
a step says nothing about a rank. Its own time does: the time of the step without the time in which
the host was blocked in a collective, a send or a receive. A slow rank has more own time, and waits
less.

Own times are compared among peers, which are the ranks with the same work. One time for each window
of steps goes to rank 0, which names a rank if it was too slow in two windows in a row. So a rank
that turns slow is named after less than three windows.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from composer3d.recipe.schema import MeshTable, ParallelTable
from composer3d.runtime.ranks import coordinates

# A rank that loses less in a step is not slow, whatever the factor is: the steps of a very small
# model are as short as a time slice of the scheduler.
_LEAST_EXCESS_S = 0.002


def peer_groups(
    sizes: MeshTable, parallel: ParallelTable, *, has_documents: bool
) -> list[list[int]]:
    """Group all ranks by work: the ranks of one group compute as much as each other.

    Other stages have other layers. Ranks of ep have other experts, and so other numbers of tokens.
    Ranks of cp have other parts of a sequence: attention over them is equal work only in zigzag
    order without documents, and with Ulysses.

    Args:
        sizes: the sizes of the mesh; ``dp_shard`` is not -1.
        parallel: the recipe's ``[parallel]``.
        has_documents: whether rows are split into documents.
    """
    is_even_over_cp = parallel.cp_method == "ulysses" or (
        parallel.is_balanced and not has_documents
    )
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(sizes.world_size):
        coords = coordinates(rank, sizes)
        # ep is the innermost axis of the sparse view (``Mesh.sparse``).
        key = (coords["pp"], 0 if is_even_over_cp else coords["cp"], rank % sizes.ep)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def time_of_window(own_s: Sequence[float]) -> float:
    """Return the lower quartile of the own times of a window's steps.

    What disturbs a rank for a moment makes some of its steps longer, and none shorter. A slow rank
    is slow in nearly all steps. So this time is that of an undisturbed step.
    """
    return sorted(own_s)[(len(own_s) - 1) // 4]


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each value the median of all others.

    The median of all would hide a slow one of two: it is the mean of both.

    Args:
        values: two values or more.
    """
    in_order = sorted(range(len(values)), key=values.__getitem__)
    # The middle of the others: one of them or two, next to the middle of all.
    middle = {(len(values) - 2) // 2, (len(values) - 1) // 2}
    medians = [0.0] * len(values)
    for place, number in enumerate(in_order):
        medians[number] = fmean(values[in_order[at + (at >= place)]] for at in middle)
    return medians


class Straggler(NamedTuple):
    """A rank that is slower than its peers.

    Attributes:
        rank: the global rank.
        own_s, peers_s: its own time of a step (``time_of_window``), and the median of its peers'.
    """

    rank: int
    own_s: float
    peers_s: float

    @property
    def factor(self) -> float:
        """How many times as long as its peers the rank takes."""
        return self.own_s / max(self.peers_s, 1e-9)


class StragglerJudge:
    """Decides from the own times of all ranks which of them are slow.

    Args:
        groups: the ranks that are compared with each other (``peer_groups``).
        factor: the least factor of a slow rank.
    """

    def __init__(self, groups: Sequence[Sequence[int]], factor: float) -> None:
        self._groups, self._factor = groups, factor
        self._suspects: set[int] = set()
        # As of the newest window in which each of them was slow.
        self._named: dict[int, Straggler] = {}

    @property
    def slowest(self) -> Straggler | None:
        """The slowest of the ranks that are named and still slow; None if there is none."""
        return max(self._named.values(), key=lambda found: found.factor, default=None)

    def judge(self, own_s: Sequence[float]) -> tuple[list[Straggler], list[int]]:
        """Judge one window.

        Args:
            own_s: the own time of each rank, by rank (``time_of_window``).

        Returns:
            The ranks that were slow in this window and in the one before, and have not been named
            since they turned slow; and the named ranks that are slow no longer.
        """
        slow = {straggler.rank: straggler for straggler in self._slow(own_s)}
        stragglers = [
            straggler
            for rank, straggler in slow.items()
            if rank in self._suspects and rank not in self._named
        ]
        # As for naming, two windows must agree.
        recovered = sorted(self._named.keys() - slow.keys() - self._suspects)
        named = {**self._named, **{found.rank: found for found in stragglers}}
        self._named = {
            rank: slow.get(rank, found) for rank, found in named.items() if rank not in recovered
        }
        self._suspects = set(slow)
        return stragglers, recovered

    def _slow(self, own_s: Sequence[float]) -> Iterator[Straggler]:
        for group in self._groups:
            if len(group) == 1:
                continue
            times_s = [own_s[rank] for rank in group]
            peers_s = medians_of_others(times_s)
            for found in map(Straggler, group, times_s, peers_s):
                is_longer = found.own_s - found.peers_s >= _LEAST_EXCESS_S
                if is_longer and found.factor >= self._factor:
                    yield found
