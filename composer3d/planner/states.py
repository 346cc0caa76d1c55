"""What a pipeline rank holds before each action, in numbers of micro-batches. No torch here.

The numbers depend on the schedule only, so layouts that share a schedule share them.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from composer3d.facts.schedules import Action
from composer3d.planner.schedule import active_stages, cells_of

# (stage, micro-batches) of each stage that has some.
Counts = tuple[tuple[int, int], ...]


class State(NamedTuple):
    """A rank at the beginning of an action.

    Attributes:
        kind: that of the action: F, B, I or W; R is the reduction of a stage's gradients.
        stage: the stage of the action.
        held: micro-batches whose forward is done and whose backward is not.
        deferred: those of whose backward only the gradients of weights are still to be computed.
        gathered: the stages whose parameters are gathered.
        summed: the stages that have whole gradients.
        reduced: the stages whose gradients are reduced.
    """

    kind: str
    stage: int
    held: Counts
    deferred: Counts
    gathered: frozenset[int]
    summed: frozenset[int]
    reduced: frozenset[int]

    def exceeds(self, other: "State") -> bool:
        """Return whether this state of the same action holds as much of everything, or more."""
        return (
            self.gathered >= other.gathered
            and self.summed >= other.summed
            and self.summed | self.reduced >= other.reduced
            and _covers(self.held, other.held)
            and _covers(self.deferred, other.deferred)
        )


@cache
def states_of_ranks(
    schedule: str,
    pp: int,
    stages_per_rank: int,
    micro_batches: int,
    drops: bool,
    path: str | None = None,
) -> list[list[State]]:
    """Return the states of each rank, without those that another one exceeds.

    Args:
        schedule, pp, stages_per_rank, micro_batches, path: as in ``cells_of``.
        drops: whether parameters are dropped after a forward (zero = 3). After a backward they
            stay gathered, whatever ``zero`` is.
    """
    has_windows = schedule not in ("GPipe", "1F1B")
    ranks = cells_of(schedule, pp, stages_per_rank, micro_batches, path)
    return [
        _largest(_Walk(drops, has_windows).states([action for cell in cells for action in cell]))
        for cells in ranks
    ]


class _Walk:
    """Goes through the actions of a rank.

    Args:
        drops: as in ``states_of_ranks``.
        has_windows: whether only the stages that run next (``active_stages``) stay gathered.
    """

    def __init__(self, drops: bool, has_windows: bool) -> None:
        self._drops, self._has_windows = drops, has_windows
        self._held: Counter[int] = Counter()
        self._deferred: Counter[int] = Counter()
        self._gathered: set[int] = set()
        self._summed: set[int] = set()
        self._reduced: set[int] = set()

    def states(self, actions: Sequence[Action]) -> set[State]:
        left = Counter(action.stage for action in actions if action.kind in "BW")
        windows = active_stages([(action,) for action in actions])
        found: set[State] = set()
        for action, active in zip(actions, windows, strict=True):
            stage, kind = action.stage, action.kind
            if self._has_windows:
                self._gathered &= set(active)
            if kind == "F":
                found.add(self._state(kind, stage))
                self._held[stage] += 1
                if self._drops:
                    self._gathered.discard(stage)
                else:
                    self._gathered.add(stage)
                continue

            found.add(self._state(kind, stage))
            self._gathered.add(stage)
            self._summed.add(stage)
            if kind in "BI":
                self._held[stage] -= 1
            if kind == "I":
                self._deferred[stage] += 1
                continue
            if kind == "W":
                self._deferred[stage] -= 1
            left[stage] -= 1
            if left[stage] == 0:
                found.add(self._state("R", stage))
                self._summed.discard(stage)
                self._gathered.discard(stage)
                self._reduced.add(stage)
        return found

    def _state(self, kind: str, stage: int) -> State:
        return State(
            kind,
            stage,
            tuple(sorted((+self._held).items())),
            tuple(sorted((+self._deferred).items())),
            frozenset(self._gathered),
            frozenset(self._summed),
            frozenset(self._reduced),
        )


def _largest(states: set[State]) -> list[State]:
    kept: list[State] = []
    for state in sorted(states, key=_size, reverse=True):
        same = [other for other in kept if (other.kind, other.stage) == (state.kind, state.stage)]
        if not any(other.exceeds(state) for other in same):
            kept.append(state)
    return kept


def _covers(counts: Counts, others: Counts) -> bool:
    numbers = dict(counts)
    return all(numbers.get(stage, 0) >= number for stage, number in others)


def _size(state: State) -> int:
    held = sum(number for _, number in (*state.held, *state.deferred))
    return held + len(state.gathered) + len(state.summed)
