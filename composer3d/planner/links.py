"""The ranks of each axis, and the links between them. No torch here.

Ranks 0 to n-1 of the first node come first, then those of the second one, as launchers number them.
A link is inside a node (NVLink, or shared memory on CPUs) or between nodes (a NIC for each rank).
"""

from typing import NamedTuple

from composer3d.planner.traffic import Axis, Operation
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
        return [self.first + self.stride * index for index in range(self.size)]


def group_of(axis: Axis, mesh: MeshTable, pp_rank: int = 0) -> Group:
    """Return the group of an axis that has the first rank of pipeline rank ``pp_rank``."""
    stage_ranks = mesh.world_size // mesh.pp
    shards = mesh.dp_shard * mesh.cp
    stride, size = {
        "pp": (stage_ranks, mesh.pp),
        "dp_replicate": (shards * mesh.tp, mesh.dp_replicate),
        "fsdp": (mesh.tp, shards),
        "replicas": (mesh.tp, mesh.dp_replicate * shards),
        "efsdp": (mesh.ep, mesh.efsdp),
        "expert_replicas": (mesh.ep, mesh.dp_replicate * mesh.efsdp),
        "cp": (mesh.tp, mesh.cp),
        "tp": (1, mesh.tp),
        "ep": (1, mesh.ep),
        "sequence": (1, mesh.cp * mesh.tp),
        "world": (1, mesh.world_size),
    }[axis]
    first = 0 if axis in ("pp", "world") else pp_rank * stage_ranks
    return Group(first, stride, size)


def nic_share(axis: Axis, operation: Operation, group: Group, gpus_per_node: int) -> float:
    """Return the share of the bytes sent in a group that leave their node, the mean of its ranks.

    Gathers and reductions go round a ring in the order of ranks, and so do the messages of cp. In
    pp, rank i sends to i + 1 and i - 1. In an all-to-all, each rank sends as much to every other.
    """
    nodes = [rank // gpus_per_node for rank in group.ranks]
    size = len(nodes)
    if size < 2:
        return 0.0
    if operation == "all_to_all":
        same = sum(nodes.count(node) * (nodes.count(node) - 1) for node in set(nodes))
        return 1 - same / (size * (size - 1))
    # The hops of the ring; those of a pipeline do not include the one from its end to its start.
    hops = list(zip(nodes, nodes[1:] + ([] if axis == "pp" else nodes[:1]), strict=False))
    return sum(a != b for a, b in hops) / len(hops)
