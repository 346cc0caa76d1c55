"""The ranks of each axis, and the links between them. No torch here.

Ranks 0 to n-1 of the first node come first, then those of the second one, as launchers number them.
A link is inside a node (NVLink, or shared memory on CPUs) or between nodes (a NIC for each rank).
"""

from collections import Counter
from typing import NamedTuple

from composer3d.planner.setup import Layout
from composer3d.planner.traffic import Axis, Flow, Operation
from composer3d.recipe.schema import MeshTable


class Group(NamedTuple):
    """The ranks of one axis that include ``first``: ``first + stride * i``.

    Attributes:
        first: the lowest rank.
        stride: the distance between two neighbours.
        size: the number of ranks.
    """

    first: int
    stride: int
    size: int

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in ascending order."""
        return [self.first + self.stride * index for index in range(self.size)]


def group_of(axis: Axis, mesh: MeshTable, pp_rank: int = 0) -> Group:
    """Return the group of an axis that has the first rank of pipeline rank ``pp_rank``."""
    layout = Layout(
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        dp_shard=mesh.dp_shard,
        dp_replicate=mesh.dp_replicate,
        pp=mesh.pp,
    )
    size, stride = layout.ranks_of(axis)
    first = 0 if axis in ("pp", "world") else pp_rank * layout.ranks_of("pp").stride
    return Group(first, stride, size)


def groups_of(axis: Axis, mesh: MeshTable, pp_rank: int = 0) -> list[Group]:
    """Return all groups of an axis that have ranks of pipeline rank ``pp_rank``, but not of pp."""
    group = group_of(axis, mesh, pp_rank)
    if axis == "world":
        return [group]
    stage = group_of("stage", mesh, pp_rank)
    return [
        Group(first, group.stride, group.size)
        for block in range(stage.first, stage.first + stage.size, group.stride * group.size)
        for first in range(block, block + group.stride)
    ]


def nic_share(flow: Flow, mesh: MeshTable, pp_rank: int, gpus_per_node: int) -> float:
    """Return the share of what pipeline rank ``pp_rank`` sends in a flow that leaves its node.

    It is the mean over all ranks of the pipeline rank: one group may be on one node, and the next
    one on two.
    """
    if flow.receiver is None:
        groups = groups_of(flow.axis, mesh, pp_rank)
        shares = [nic_share_in_group(flow.operation, group, gpus_per_node) for group in groups]
        return sum(shares) / len(shares)
    stage = group_of("stage", mesh, pp_rank)
    distance = (flow.receiver - pp_rank) * stage.size
    crossing = [rank // gpus_per_node != (rank + distance) // gpus_per_node for rank in stage.ranks]
    return sum(crossing) / stage.size


def nic_share_in_group(operation: Operation, group: Group, gpus_per_node: int) -> float:
    """Return the share of the bytes sent within a group that leave their node.

    It is the mean over the group's ranks. Gathers and reductions go round a ring in the order of
    ranks, and so do the messages of cp. In an all-to-all, each rank sends as much to every other.
    """
    nodes = [rank // gpus_per_node for rank in group.ranks]
    size = len(nodes)
    if size < 2:
        return 0.0
    if operation == "all_to_all":
        same = sum(count * (count - 1) for count in Counter(nodes).values())
        return 1 - same / (size * (size - 1))
    hops = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    return sum(a != b for a, b in hops) / size
