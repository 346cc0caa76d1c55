"""A process group for each two pipeline ranks that exchange activations and gradients.

NCCL runs the operations of one communicator in order, and a receive takes its turn before its
message exists. Over one group of the whole pipeline it would hold up every later send of its rank,
also those to another neighbour: a rank with several stages would wait for most of its messages.
Over a group of two ranks, a message waits for those between the same two alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import form_disjoint_groups


def rounds_of_neighbours(stages: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Return the pairs of pipeline ranks with adjacent stages, in rounds.

    A rank is in one pair of a round at most: the groups of a round are formed by one call. Ranks on
    a line need two rounds, and so does a ring of an even number of ranks.

    Args:
        stages: the stage numbers of each pipeline rank.
    """
    rank_of = {stage: rank for rank, held in enumerate(stages) for stage in held}
    adjacent = {
        (min(rank, rank_of[stage + 1]), max(rank, rank_of[stage + 1]))
        for stage, rank in rank_of.items()
        if rank_of.get(stage + 1, rank) != rank
    }
    rounds: list[list[tuple[int, int]]] = []
    for pair in sorted(adjacent):
        for pairs in rounds:
            if not any(set(pair) & set(other) for other in pairs):
                pairs.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


class Route(NamedTuple):
    """The way of a message, by global ranks."""

    sender: int
    receiver: int


def form_routes(stages: Sequence[Sequence[int]], mesh: Mesh) -> dict[Route, dist.ProcessGroup]:
    """Form the groups of this rank and its neighbours. Collective over all ranks.

    Two neighbours have one group for both ways, because 1F1B sends and receives in one operation.
    Two ranks that are the whole pipeline have a group already. With several stages on each, every
    message goes between the same two, so each way has a group of its own.

    Args:
        stages: the stage numbers of each pipeline rank.
        mesh: the mesh of the job.

    Returns:
        The group of each route that begins or ends on this rank.
    """
    # Pipeline ranks are outermost: those of one pipeline are as far apart as a stage has ranks.
    place, distance = mesh.rank % mesh.stage_ranks, mesh.stage_ranks

    def form(pairs: Sequence[tuple[int, int]]) -> dist.ProcessGroup | None:
        return form_disjoint_groups(
            [
                (first * distance + each, second * distance + each)
                for first, second in pairs
                for each in range(distance)
            ]
        )

    if len(stages) == 2:
        first, second = place, distance + place
        way_back = form([(0, 1)]) if len(stages[0]) > 1 else None
        return {
            Route(first, second): mesh.pp_group,
            Route(second, first): way_back or mesh.pp_group,
        }
    routes = {}
    own = mesh.coords["pp"]
    for pairs in rounds_of_neighbours(stages):
        group = form(pairs)
        for pair in pairs:
            if group is not None and own in pair:
                one, other = (rank * distance + place for rank in pair)
                routes[Route(one, other)] = routes[Route(other, one)] = group
    return routes


class StageOfPairs(PipelineStage):
    """A stage that exchanges with each neighbour over a group of these two ranks.

    torch names one group for all messages of a stage. The messages, their peers and their order
    are torch's.

    Args:
        rank: this process.
        routes: from ``form_routes``.
        arguments, keywords: those of ``PipelineStage``.
    """

    def __init__(
        self,
        *arguments: Any,
        rank: int,
        routes: Mapping[Route, dist.ProcessGroup],
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._rank, self._routes = rank, routes

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return torch's receives of a micro-batch, over the groups of their routes."""
        return self._routed(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """As ``get_fwd_recv_ops``, for what its forward sends."""
        return self._routed(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As ``get_fwd_recv_ops``, for what its backward receives."""
        return self._routed(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """As ``get_fwd_recv_ops``, for what its backward sends."""
        return self._routed(super().get_bwd_send_ops(bwd_chunk_id))

    def _routed(self, operations: Sequence[dist.P2POp]) -> list[dist.P2POp]:
        routed = []
        for one in operations:
            ends = (self._rank, one.peer) if one.op is dist.isend else (one.peer, self._rank)
            routed.append(dist.P2POp(one.op, one.tensor, one.peer, self._routes[Route(*ends)]))
        return routed
