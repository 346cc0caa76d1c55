"""Collectives of numbers that say which rank sent them, to check the groups of a mesh.

A group can have the wrong ranks, or the right ones in a wrong order. A link or a library can lose,
repeat or exchange messages. Nothing of this raises an error: a training would go on with wrong
gradients. So each rank sends numbers made from its own rank, and compares what arrives with what
the sizes of the mesh say.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.facts.errors import ExchangeError
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import (
    broadcast_object,
    describe_ranks,
    gather_objects,
    max_over_ranks,
)
from composer3d.runtime.ranks import describe_rank, group_ranks

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]

# An error lists at most this many findings.
_MOST_LINES = 16

# A number that a rank sends is (rank + 1) times this, plus the number of its axis.
_AXES = 16


class AxisGroup(NamedTuple):
    """This rank's group of one axis.

    Attributes:
        axis: the name of the axis: a key of ``Mesh.groups``, or "world".
        ranks: the ranks that the group must have, in order.
        group: the process group.
    """

    axis: str
    ranks: list[int]
    group: dist.ProcessGroup


def groups_of(mesh: Mesh, *, has_experts: bool) -> list[AxisGroup]:
    """Return this rank's group of each axis with several ranks, and that of all ranks.

    Collective at its first use: it forms groups.

    Args:
        mesh: the mesh of the job.
        has_experts: whether the model has experts, which have axes of their own.
    """
    groups = {**mesh.groups(has_experts=has_experts), "world": dist.group.WORLD}
    return [
        AxisGroup(axis, group_ranks(axis, mesh.rank, mesh.sizes), group)
        for axis, group in groups.items()
        if group is not None and (axis != "world" or mesh.world_size > 1)
    ]


def collectives_of_training(axis: str, parallel: ParallelTable) -> tuple[Collective, ...]:
    """Return the collectives that a training calls over an axis."""
    if axis == "cp":
        methods: dict[str, Collective] = {
            "ring": "send_recv",
            "allgather": "all_gather",
            "ulysses": "all_to_all",
        }
        return (methods[parallel.cp_method],)
    if axis == "tp" and not parallel.sequence_parallel:
        return ("all_reduce",)
    of_axis: dict[str, tuple[Collective, ...]] = {
        "pp": ("send_recv",),
        "dp_replicate": ("all_reduce",),
        "fsdp": ("all_gather", "reduce_scatter") if parallel.zero else ("all_reduce",),
        "tp": ("all_gather", "reduce_scatter", "all_reduce"),
        "efsdp": ("all_gather", "reduce_scatter"),
        "ep": ("all_to_all",),
        "world": ("all_reduce",),
    }
    return of_axis[axis]


def all_collectives(axis: str, parallel: ParallelTable) -> tuple[Collective, ...]:
    """Return those of ``collectives_of_training``, after the three that every group should do."""
    common: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    used = collectives_of_training(axis, parallel)
    return *common, *(collective for collective in used if collective not in common)


def output_of(collective: Collective, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor into which ``call`` writes; for "all_reduce", a copy of ``x``.

    Args:
        collective: which one.
        x: as for ``call``, of shape (n).
        group: the ranks.

    Returns:
        A tensor like ``x``: of n x size elements for "all_gather", of n / size for
        "reduce_scatter", and else of n.
    """
    if collective == "all_reduce":
        return x.clone()
    if collective == "all_gather":
        return x.new_empty(group.size() * len(x))
    if collective == "reduce_scatter":
        return x.new_empty(len(x) // group.size())
    return torch.empty_like(x)


def call(collective: Collective, x: Tensor, out: Tensor, group: dist.ProcessGroup) -> None:
    """Run a collective. All ranks of ``group`` call it together.

    Args:
        collective: which one. With "send_recv", each rank sends to the next one, and the last one
            to the first.
        x: of shape (n). For "reduce_scatter" and "all_to_all", the size of the group divides n.
        out: from ``output_of``. "all_reduce" sums it in place, and does not read ``x``.
        group: the ranks.
    """
    if collective == "all_reduce":
        dist.all_reduce(out, group=group)
    elif collective == "all_gather":
        dist.all_gather_single(out, x, group=group)
    elif collective == "reduce_scatter":
        dist.reduce_scatter_single(out, x, group=group)
    elif collective == "all_to_all":
        dist.all_to_all_single(out, x, group=group)
    else:
        rank, size = group.rank(), group.size()
        operations = [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def check_exchanges(
    mesh: Mesh,
    groups: Sequence[AxisGroup],
    collectives: Callable[[str], Sequence[Collective]],
) -> None:
    """Check the ranks of all groups, and what their collectives return.

    Collective over all ranks: an all-reduce after the ranks of the groups are checked, and one
    after the values; and on each group, each of its collectives with a few int64.

    Args:
        mesh: the mesh of the job.
        groups: from ``groups_of``.
        collectives: returns the collectives to run over an axis.

    Raises:
        ExchangeError: on every rank, if a group has wrong ranks or a collective gave a wrong value.
            Each line names the rank, its host, the axis and the collective.
    """
    # A rank with the wrong group would wait for ranks that never come, so this is known first.
    _raise_everywhere([_membership(mesh, entry) for entry in groups])
    findings = []
    for number, entry in enumerate(groups):
        for collective in collectives(entry.axis):
            findings.append(_values(mesh, entry, collective, number))
    _raise_everywhere(findings)


def _raise_everywhere(findings: Sequence[str | None]) -> None:
    own_lines = [finding for finding in findings if finding is not None]
    (most,) = max_over_ranks([len(own_lines)])
    if most == 0:
        return
    of_ranks = gather_objects(own_lines)
    lines = None
    if of_ranks is not None:
        lines = [line for of_rank in of_ranks for line in of_rank]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more"]
    raise ExchangeError(broadcast_object(lines) or [])


def _membership(mesh: Mesh, entry: AxisGroup) -> str | None:
    """Describe wrong ranks of a group, or return None. No collective."""
    actual = dist.get_process_group_ranks(entry.group)
    if actual == entry.ranks:
        return None
    return (
        f"{_name(mesh)}: its group of {entry.axis} has {describe_ranks(actual)}; it must have "
        f"{describe_ranks(entry.ranks)}, in this order"
    )


def _values(mesh: Mesh, entry: AxisGroup, collective: Collective, number: int) -> str | None:
    """Run a collective, and describe a wrong value, or return None."""
    ranks = entry.ranks
    place = ranks.index(mesh.rank)
    codes = torch.tensor([(rank + 1) * _AXES + number for rank in ranks])
    own, previous = codes[place], codes[place - 1]
    # What this rank adds for the rank at each place differs by place too.
    factors = torch.arange(1, len(ranks) + 1)
    # By collective: what this rank sends, and what it must receive.
    values = {
        "all_reduce": (torch.stack((own, own**2)), torch.stack((codes.sum(), (codes**2).sum()))),
        "reduce_scatter": (own * factors, codes.sum()[None] * factors[place]),
        "all_gather": (own[None], codes),
        "all_to_all": (own * factors, codes * factors[place]),
        "send_recv": (own[None], previous[None]),
    }
    sent, expected = values[collective]
    x = sent.to(mesh.device)
    out = output_of(collective, x, entry.group)
    call(collective, x, out, entry.group)
    received = out.cpu()
    if torch.equal(received, expected):
        return None

    where = f"{_name(mesh)}: {collective} over {entry.axis} ({describe_ranks(ranks)}) gave"
    if collective in ("all_reduce", "reduce_scatter"):
        return f"{where} the sum {received[0].item()}, which must be {expected[0].item()}"
    senders = [ranks[place - 1]] if collective == "send_recv" else ranks
    first = int((received != expected).nonzero()[0])
    value = int(received[first])
    factor = int(factors[place]) if collective == "all_to_all" else 1
    rank = (value // factor - number) // _AXES - 1
    is_of_rank = value == ((rank + 1) * _AXES + number) * factor
    shown = f"the value of rank {rank}" if is_of_rank and 0 <= rank < mesh.world_size else value
    sender = describe_rank(senders[first], mesh.sizes)
    return f"{where} {shown} in place of that of {sender}"


def _name(mesh: Mesh) -> str:
    return f"{mesh.identity} on {socket.gethostname()}"
