"""Computes which ranks form the group of an axis from coordinates, without a mesh. No torch here.

The real code asks torch's meshes. This module shares nothing with them: a rank is a number whose
digits are its coordinates, and a group is the ranks that differ only in certain digits.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from composer3d.recipe.schema import MeshTable

# The digits that differ within a group. For experts, the ranks of a stage have two digits of their
# own: efsdp, and ep, whose ranks are adjacent.
_DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SPARSE = ("pp", "dp_replicate", "efsdp", "ep")
_VARYING = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "fsdp": ("dp_shard", "cp"),
    "replicas": ("dp_replicate", "dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "sequence": ("cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
    "world": _DENSE,
}
_VARYING_OF_EXPERTS = {
    "ep": ("ep",),
    "efsdp": ("efsdp",),
    "expert_replicas": ("dp_replicate", "efsdp"),
}
GROUPS = (*_VARYING, *_VARYING_OF_EXPERTS)


def members(group: str, rank: int, sizes: MeshTable) -> tuple[int, ...]:
    """Return the ranks of the group of ``rank``, in ascending order.

    Args:
        group: one of ``GROUPS``.
        rank: a global rank.
        sizes: sizes of the mesh's axes; ep divides dp_shard x cp x tp.
    """
    is_dense = group in _VARYING
    digits = _DENSE if is_dense else _SPARSE
    varying = _VARYING[group] if is_dense else _VARYING_OF_EXPERTS[group]
    weight, first, steps = 1, rank, []
    for digit in reversed(digits):
        size = _size(digit, sizes)
        if digit in varying:
            first -= rank // weight % size * weight
            steps.append(range(0, size * weight, weight))
        weight *= size
    return tuple(sorted(first + sum(offsets) for offsets in product(*steps)))


def rank_at(sizes: MeshTable, **coordinates: int) -> int:
    """Return the rank with these coordinates by axis; a missing one is 0."""
    rank = 0
    for digit in _DENSE:
        rank = rank * _size(digit, sizes) + coordinates.get(digit, 0)
    return rank


class Place(NamedTuple):
    """Where a rank is on the mesh.

    Attributes:
        coordinates: by axis.
        batch_rank: which samples it takes: how many ranks with other samples come before it.
    """

    coordinates: dict[str, int]
    batch_rank: int


def of_all_ranks(sizes: MeshTable) -> Iterator[Place]:
    """Yield the places of all ranks, by counting: no coordinate is computed from another number."""
    before = Counter[tuple[int, ...]]()
    for pp, dp_replicate, dp_shard, cp, tp in product(
        *(range(_size(one, sizes)) for one in _DENSE)
    ):
        values = (pp, dp_replicate, dp_shard, cp, tp)
        yield Place(dict(zip(_DENSE, values, strict=True)), before[pp, cp, tp])
        before[pp, cp, tp] += 1


def arrangement(sizes: MeshTable, *, of_experts: bool) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates of all ranks, in the order and axes of the code's meshes.

    The axes are (pp, dp_replicate, dp_shard x cp, tp), or (pp, dp_replicate, efsdp, ep).
    """
    fsdp = sizes.dp_shard * sizes.cp
    inner = (sizes.efsdp, sizes.ep) if of_experts else (fsdp, sizes.tp)
    shape = (sizes.pp, sizes.dp_replicate, *inner)
    for rank in range(sizes.world_size):
        yield tuple(rank // prod(shape[place + 1 :]) % shape[place] for place in range(4))


def some_ranks(sizes: MeshTable, most: int) -> list[int]:
    """Return at most ``most`` ranks, in ascending order: all of them if there are no more.

    Otherwise these are the first, second, middle and last rank of each axis, alone and on all axes
    at once, and others at equal distances.
    """
    world = sizes.world_size
    if world <= most:
        return list(range(world))
    chosen = []
    for number in (1, -1, 2):
        places = {axis: _coordinate(_size(axis, sizes), number) for axis in _DENSE}
        chosen.append(rank_at(sizes, **places))
        chosen += [rank_at(sizes, **{axis: place}) for axis, place in places.items()]
    spread = [index * (world - 1) // (most - 1) for index in range(most)]
    return sorted([*dict.fromkeys((0, *chosen, *spread))][:most])


def corner(sizes: MeshTable, pp_rank: int, number: int) -> int:
    """Return the first (0), middle (2) or last (-1) rank of a pipeline rank on all other axes.

    The middle one is the first of tp, so that its shards are as large as those of the first rank.
    """
    places = {axis: _coordinate(_size(axis, sizes), number) for axis in _DENSE if axis != "pp"}
    if number == 2:
        places["tp"] = 0
    return rank_at(sizes, pp=pp_rank, **places)


def name_of(sizes: MeshTable, rank: int, ranks: tuple[int, ...]) -> str:
    """Name the group of ``rank`` that has these ranks, by its axis, for messages."""
    for group in GROUPS:
        if members(group, rank, sizes) == ranks:
            return f"{group} ({len(ranks):,} ranks)"
    return f"ranks {some(ranks)}"


def some(ranks: Sequence[int]) -> str:
    """Name the first few of some ranks, for messages."""
    return f"{', '.join(map(str, ranks[:6]))}{', ...' if len(ranks) > 6 else ''}"


class Digit(NamedTuple):
    """A digit of a rank's number: an axis, or a part of one.

    Attributes:
        axis: the axis that the digit belongs to.
        size: how many values it has.
        weight: the distance between ranks that differ by 1 in this digit.
    """

    axis: str
    size: int
    weight: int


# The type of a tensor: the digits over which its values vary between ranks.
Varying = frozenset[Digit]
SAME: Varying = frozenset()


def names(digits: Varying) -> str:
    """Name the axes of digits, for messages."""
    return ", ".join(sorted({digit.axis for digit in digits})) or "no axis"


def digits(sizes: MeshTable) -> tuple[Digit, ...]:
    """Return the digits that every group of ``GROUPS`` is made of; digits of size 1 are left out.

    An axis that ep cuts in two has two digits. If ep does not divide evenly into axes, as ep = 2
    with tp = 3, there are no digits at all.
    """
    ends = {"tp": sizes.tp, "cp": sizes.tp * sizes.cp}
    ends["dp_shard"] = ends["cp"] * sizes.dp_shard
    ends["dp_replicate"] = ends["dp_shard"] * sizes.dp_replicate
    ends["pp"] = sizes.world_size
    found = []
    for weight, end in pairwise(sorted({1, sizes.ep, *ends.values()})):
        if end % weight:
            return ()
        axis = next(name for name, last in ends.items() if end <= last)
        found.append(Digit(axis, end // weight, weight))
    return tuple(found)


def digits_of(ranks: Sequence[int], of_number: Sequence[Digit]) -> Varying:
    """Return the digits in which ranks differ; none if the ranks are not a group of digits."""
    first, held = min(ranks), {*ranks}
    found = frozenset(digit for digit in of_number if first + digit.weight in held)
    return found if prod(digit.size for digit in found) == len(held) else frozenset()


def _coordinate(size: int, number: int) -> int:
    """Return the first place of an axis (0), its second (1), its middle (2) or its last (-1)."""
    return {0: 0, 1: min(1, size - 1), 2: size // 2, -1: size - 1}[number]


def _size(digit: str, sizes: MeshTable) -> int:
    size: int = getattr(sizes, digit)
    return size
