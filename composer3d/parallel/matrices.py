"""Brings each matrix that ranks hold in parts to one of them, whole, and takes results back.

An optimizer that works on whole matrices (Muon) computes each of them once, on its owner.
``planner.matrices`` says which rank that is, and ``MatrixExchange`` moves the parts.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer3d.facts.box import Box
from composer3d.parallel.init import local_part
from composer3d.planner.matrices import (
    CutParameter,
    Delivery,
    MatrixUnit,
    messages_of_results,
    rounds_of_units,
)
from composer3d.runtime.torch_private import box_on_rank

# What an exchange is run with; see ``MatrixExchange.run``.
Read = Callable[[int, tuple[slice, ...]], Tensor]
Write = Callable[[int, tuple[slice, ...], Tensor], None]


class _Transfer(NamedTuple):
    """One part of a unit that one rank sends to another, or to itself."""

    unit: MatrixUnit
    box: Box
    source: int
    target: int


class _OwnTransfers(NamedTuple):
    """This rank's part in one all-to-all.

    Between two ranks, both know which parts travel in which order, so nothing is labelled.

    Attributes:
        outgoing, incoming: what it sends and receives, in the order of the other ranks.
        outgoing_sizes, incoming_sizes: the number of elements for, and from, each rank.
    """

    outgoing: tuple[_Transfer, ...]
    incoming: tuple[_Transfer, ...]
    outgoing_sizes: list[int]
    incoming_sizes: list[int]

    @classmethod
    def of(cls, transfers: Sequence[_Transfer], own_rank: int, n_ranks: int) -> "_OwnTransfers":
        """Choose this rank's transfers. ``sorted`` keeps their order among equal ranks."""
        outgoing = [transfer for transfer in transfers if transfer.source == own_rank]
        incoming = [transfer for transfer in transfers if transfer.target == own_rank]
        outgoing_sizes, incoming_sizes = [0] * n_ranks, [0] * n_ranks
        for transfer in outgoing:
            outgoing_sizes[transfer.target] += prod(transfer.box.shape)
        for transfer in incoming:
            incoming_sizes[transfer.source] += prod(transfer.box.shape)
        return cls(
            tuple(sorted(outgoing, key=lambda transfer: transfer.target)),
            tuple(sorted(incoming, key=lambda transfer: transfer.source)),
            outgoing_sizes,
            incoming_sizes,
        )


class _OwnRound(NamedTuple):
    """The units that this rank owns in a round, the message to all owners, and those back."""

    owned: tuple[MatrixUnit, ...]
    to_owners: _OwnTransfers
    to_holders: tuple[_OwnTransfers, ...]


class MatrixExchange:
    """Which rank computes which matrix, and how the parts travel.

    Args:
        parameters: this rank's parameters of two dims (F, C) or three (E, F, C): DTensors over all
            ranks of the group, or plain tensors, which every rank of the group holds whole.
        group: the ranks that hold parts of these parameters. All have the same parameters in the
            same order. None: this rank is alone.

    Attributes:
        rounds: all units, in the rounds in which they travel. All ranks have the same.
    """

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self._group = group
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
        ranks = ranks if group is None else dist.get_process_group_ranks(group)
        self._own_rank = 0 if group is None else dist.get_rank(group)
        self._origins = [local_part(parameter)[1] for parameter in parameters]
        self.rounds = rounds_of_units(_cut(parameters, ranks), len(ranks))
        # A large job has many transfers, and this rank has few of them: they are found once.
        self._own_rounds = [
            _OwnRound(
                tuple(unit for unit in units if unit.owner == self._own_rank),
                _OwnTransfers.of(_to_owners(units), self._own_rank, len(ranks)),
                tuple(
                    _OwnTransfers.of(_back(message), self._own_rank, len(ranks))
                    for message in messages_of_results(units, len(ranks))
                ),
            )
            for units in self.rounds
        ]

    def run(
        self,
        read: Read,
        compute: Callable[[Tensor], Tensor],
        write: Write,
        *,
        like: Tensor,
    ) -> None:
        """Compute each matrix on its owner, and bring the result to all that hold parts of it.

        Args:
            read: returns this rank's values of a part of a parameter, given the index of the
                parameter and the slices of this rank's shard.
            compute: returns the result of a unit, (F, C) or (E, F, C), with its shape and dtype.
            write: takes the result of a part, in the same place as ``read``.
            like: a tensor on the group's device, in the dtype in which all travels.

        Collectives: for each round, an all-to-all over the group, and then one or more (see
        ``messages_of_results``).
        """
        for own in self._own_rounds:
            self._run_round(own, read, compute, write, like)

    def _run_round(
        self,
        own: _OwnRound,
        read: Read,
        compute: Callable[[Tensor], Tensor],
        write: Write,
        like: Tensor,
    ) -> None:
        # A round frees its buffers before the next one begins, and each matrix once it is computed.
        wholes = self._gather(own, read, like)
        results = {unit: compute(wholes.pop(unit)) for unit in own.owned}
        self._scatter(own, results, write, like)

    def _gather(self, own: _OwnRound, read: Read, like: Tensor) -> dict[MatrixUnit, Tensor]:
        """Return the values of the units that this rank owns. Collective over the group."""
        wholes = {unit: like.new_empty(unit.box.shape) for unit in own.owned}

        def send(transfer: _Transfer) -> Tensor:
            return read(transfer.unit.parameter, self._place(transfer)).to(like)

        def receive(transfer: _Transfer, part: Tensor) -> None:
            unit = transfer.unit
            wholes[unit][transfer.box.seen_from(unit.box.offset)] = part

        self._deliver(own.to_owners, send, receive, like)
        return wholes

    def _scatter(
        self, own: _OwnRound, results: Mapping[MatrixUnit, Tensor], write: Write, like: Tensor
    ) -> None:
        """Bring the results of the units' owners to all holders. Collective over the group."""

        def send(transfer: _Transfer) -> Tensor:
            unit = transfer.unit
            return results[unit][transfer.box.seen_from(unit.box.offset)]

        def receive(transfer: _Transfer, part: Tensor) -> None:
            write(transfer.unit.parameter, self._place(transfer), part)

        for message in own.to_holders:
            self._deliver(message, send, receive, like)

    def _place(self, transfer: _Transfer) -> tuple[slice, ...]:
        """Return where the part of a transfer lies in this rank's shard of its parameter."""
        return transfer.box.seen_from(self._origins[transfer.unit.parameter])

    def _deliver(
        self,
        message: _OwnTransfers,
        read: Callable[[_Transfer], Tensor],
        write: Callable[[_Transfer, Tensor], None],
        like: Tensor,
    ) -> None:
        """Make the transfers of a message: one all-to-all over the group."""
        if self._group is None:
            for transfer in message.outgoing:
                write(transfer, read(transfer))
            return
        parts = [read(transfer).reshape(-1) for transfer in message.outgoing]
        sent = torch.cat(parts) if parts else like.new_empty(0)
        del parts
        received = like.new_empty(sum(message.incoming_sizes))
        dist.all_to_all_single(
            received, sent, message.incoming_sizes, message.outgoing_sizes, group=self._group
        )
        lengths = [prod(transfer.box.shape) for transfer in message.incoming]
        for transfer, part in zip(message.incoming, received.split(lengths), strict=True):
            write(transfer, part.view(transfer.box.shape))


def _to_owners(units: Sequence[MatrixUnit]) -> list[_Transfer]:
    """Return the transfers that bring the parts of each unit to its owner."""
    return [
        _Transfer(unit, box, source=rank, target=unit.owner)
        for unit in units
        for rank, box in unit.senders()
    ]


def _back(message: Sequence[Delivery]) -> list[_Transfer]:
    """Return the transfers of one message with results."""
    return [
        _Transfer(delivery.unit, delivery.box, source=delivery.unit.owner, target=delivery.rank)
        for delivery in message
    ]


def _cut(parameters: Sequence[Tensor], ranks: Sequence[int]) -> list[CutParameter]:
    """Return how the ranks of the group hold each parameter."""
    known: dict[Hashable, list[Box]] = {}  # of one kind, a model has one parameter in each block
    cut = []
    for parameter in parameters:
        kind: Hashable = tuple(parameter.shape)
        if isinstance(parameter, DTensor):
            kind = (kind, parameter.device_mesh, parameter.placements)
        if kind not in known:
            known[kind] = _boxes(parameter, ranks)
        cut.append(CutParameter(tuple(parameter.shape), known[kind]))
    return cut


def _boxes(parameter: Tensor, ranks: Sequence[int]) -> list[Box]:
    """Return the box of ``parameter`` that each rank holds."""
    if not isinstance(parameter, DTensor):
        return [Box((0,) * parameter.dim(), tuple(parameter.shape))] * len(ranks)
    return [box_on_rank(parameter, rank) for rank in ranks]
