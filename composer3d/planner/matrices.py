"""Which rank orthogonalises which matrix, and what travels for it. No torch here.

FSDP, tp and ep cut the matrices of a stage in any combination: each rank holds a box of a matrix,
and replicas hold the same box. Each matrix is computed once, on its owner. ``parallel.matrices``
moves the parts by these units; ``traffic`` and ``time`` price them.

A parameter of experts (E, F, C) is E matrices. Those that travel between the same ranks are
computed together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from composer3d.facts.box import Box
from composer3d.facts.limits import JOB

# The most elements of matrices that a rank owns in one round, and that it sends or receives in one
# message, unless one matrix has more.
ELEMENTS_PER_ROUND = JOB.elements_per_round


@contextmanager
def limited_rounds(elements: int) -> Iterator[None]:
    """Let rounds and messages have at most so many elements, as proofs of small models do."""
    global ELEMENTS_PER_ROUND
    before, ELEMENTS_PER_ROUND = ELEMENTS_PER_ROUND, elements
    try:
        yield
    finally:
        ELEMENTS_PER_ROUND = before


def owned_in_round(owned: float, largest: float) -> float:
    """Return the most elements of matrices that a rank owns in one round: the largest come first.

    Args:
        owned: the elements of all matrices that it owns.
        largest: those of the largest one.
    """
    whole = max(1, int(ELEMENTS_PER_ROUND // largest)) * largest
    return max(min(owned, whole), largest)


def elements_of_products(owned: float, largest: float) -> float:
    """Return the most elements that a rank has in buffers until its matrices are computed.

    Args:
        owned: the elements of the matrices that it owns in the round.
        largest: those of the largest one.
    """
    # The matrices, and what is sent, in parts and joined, or joined and received. Newton-Schulz has
    # up to four more of the size of one matrix: two iterates and two products.
    return max(3 * owned, owned + 4 * largest)


def elements_of_results(owned: float, replicas: int) -> float:
    """Return the most elements that a rank has in buffers while results travel.

    They are the results, and what is sent and received in one message.

    Args:
        owned: as in ``elements_of_products``.
        replicas: the ranks that hold each part of a matrix.
    """
    return owned + 2 * min(replicas * owned, max(owned, ELEMENTS_PER_ROUND))


class CutParameter(NamedTuple):
    """A parameter of matrices, and how the ranks of a stage hold it.

    Attributes:
        shape: (F, C), or (E, F, C) of experts.
        boxes: the box of each rank. Those of equal parameters may be one sequence.
    """

    shape: tuple[int, ...]
    boxes: Sequence[Box]


@dataclass(frozen=True, eq=False)
class MatrixUnit:
    """A matrix, or the matrices of several experts, which one rank computes together.

    Attributes:
        parameter: the index of its parameter.
        box: the whole matrix (F, C), or those of some experts (E, F, C), in its parameter.
        owner: the rank that computes it, numbered within the stage.
        holders: all ranks that hold a part of it, and their parts.
    """

    parameter: int
    box: Box
    owner: int
    holders: tuple[tuple[int, Box], ...]

    def senders(self) -> Iterator[tuple[int, Box]]:
        """Yield the ranks that send their parts to the owner, one for each part.

        Of the replicas of a part it is the owner, if it has that part. If not, replicas take turns.
        """
        replicas: dict[Box, list[int]] = {}
        for rank, box in self.holders:
            replicas.setdefault(box, []).append(rank)
        for box, ranks in replicas.items():
            yield (self.owner if self.owner in ranks else ranks[self.owner % len(ranks)]), box


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Return the floating-point operations of one step of Newton-Schulz on (F, C) or (E, F, C).

    X (m, n) with m <= n: X X^T, the square of that, and its product with X.
    """
    *experts, rows, columns = shape
    short, long = min(rows, columns), max(rows, columns)
    return prod(experts) * 2.0 * short * short * (2 * long + short)


def rounds_of_units(
    parameters: Sequence[CutParameter], n_ranks: int
) -> list[tuple[MatrixUnit, ...]]:
    """Return all units with their owners, in the rounds in which they travel.

    Args:
        parameters: those of a stage, in the order in which all its ranks have them.
        n_ranks: the ranks of the stage.
    """
    return list(_cut_into_rounds(_assign(parameters, n_ranks), n_ranks))


class Delivery(NamedTuple):
    """A part of a unit's result, and the rank that holds this part."""

    unit: MatrixUnit
    rank: int
    box: Box


def messages_of_results(units: Sequence[MatrixUnit], n_ranks: int) -> list[list[Delivery]]:
    """Return the messages that bring the results of a round to all that hold parts of them.

    Every replica of a part gets it, so an owner may send its matrix many times. In one message, no
    rank sends or receives more than ``ELEMENTS_PER_ROUND`` elements, unless one part has more.

    Args:
        units: of one round.
        n_ranks: the ranks of the stage.
    """
    messages: list[list[Delivery]] = []
    sent: list[list[int]] = []
    received: list[list[int]] = []
    # The first message in which each owner may have room: it fills them in order.
    begins = [0] * n_ranks
    for unit in units:
        for rank, box in unit.holders:
            size = prod(box.shape)
            most = max(size, ELEMENTS_PER_ROUND)
            place = begins[unit.owner]
            while place < len(messages) and (
                sent[place][unit.owner] + size > most or received[place][rank] + size > most
            ):
                place += 1
            if place == len(messages):
                messages.append([])
                sent.append([0] * n_ranks)
                received.append([0] * n_ranks)
            messages[place].append(Delivery(unit, rank, box))
            sent[place][unit.owner] += size
            received[place][rank] += size
            while (
                begins[unit.owner] < len(messages)
                and sent[begins[unit.owner]][unit.owner] >= ELEMENTS_PER_ROUND
            ):
                begins[unit.owner] += 1
    return messages


class _Unowned(NamedTuple):
    """A unit before it has an owner; the fields are those of ``MatrixUnit``."""

    parameter: int
    box: Box
    holders: tuple[tuple[int, Box], ...]


def _assign(parameters: Sequence[CutParameter], n_ranks: int) -> list[MatrixUnit]:
    """Give each unit to a rank, so that all have about as much to compute.

    The largest are given first, each to the rank with the least so far. A unit that some ranks hold
    whole goes to one of these: its parts need not travel there.
    """
    loads = [0.0] * n_ranks
    units = []
    unowned = sorted(
        _cut_into_units(parameters),
        key=lambda unit: newton_schulz_flops(unit.box.shape),
        reverse=True,
    )
    for parameter, box, holders in unowned:
        whole = [rank for rank, part in holders if part == box]
        owner = min(whole or [rank for rank, _ in holders], key=lambda rank: loads[rank])
        loads[owner] += newton_schulz_flops(box.shape)
        units.append(MatrixUnit(parameter, box, owner, holders))
    return units


def _cut_into_units(parameters: Sequence[CutParameter]) -> Iterator[_Unowned]:
    for index, (shape, boxes) in enumerate(parameters):
        whole = Box((0,) * len(shape), shape)
        if len(shape) == 2:
            yield _Unowned(index, whole, _holders(boxes))
        else:
            for box, holders in _cut_experts(whole, boxes):
                yield _Unowned(index, box, holders)


def _cut_experts(
    whole: Box, boxes: Sequence[Box]
) -> Iterator[tuple[Box, tuple[tuple[int, Box], ...]]]:
    """Cut a parameter of experts (E, F, C) into units; yield the box and the holders of each.

    Args:
        whole: the box of all experts.
        boxes: the box of each rank.
    """
    edges = {0, whole.shape[0]}
    for box in boxes:
        if prod(box.shape):
            edges |= {box.offset[0], box.offset[0] + box.shape[0]}
    # The same ranks hold all experts between two neighbouring edges.
    for first, end in pairwise(sorted(edges)):
        count = end - first
        holders = _holders([box.rows(first, count) for box in boxes])
        # They share the work: no rank has more than one expert more than another. A unit must also
        # fit a round.
        most = max(1, ELEMENTS_PER_ROUND // prod(whole.shape[1:]))
        shares = min(count, max(-(-count // most), len(holders)))
        for share in range(shares):
            begin = first + share * count // shares
            size = first + (share + 1) * count // shares - begin
            parts = tuple((rank, box.rows(begin, size)) for rank, box in holders)
            yield whole.rows(begin, size), parts


def _holders(boxes: Sequence[Box]) -> tuple[tuple[int, Box], ...]:
    """Return the ranks whose boxes are not empty, and the boxes."""
    return tuple((rank, box) for rank, box in enumerate(boxes) if prod(box.shape))


def _cut_into_rounds(units: Sequence[MatrixUnit], n_ranks: int) -> Iterator[tuple[MatrixUnit, ...]]:
    """Cut the units into rounds in which no rank owns more than ``ELEMENTS_PER_ROUND``."""
    current: list[MatrixUnit] = []
    owned = [0] * n_ranks
    for unit in units:
        size = prod(unit.box.shape)
        if owned[unit.owner] and owned[unit.owner] + size > ELEMENTS_PER_ROUND:
            yield tuple(current)
            current, owned = [], [0] * n_ranks
        current.append(unit)
        owned[unit.owner] += size
    if current:
        yield tuple(current)
