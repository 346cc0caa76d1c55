"""Predicts a pipeline rank's memory moment by moment, where the order is known. No torch here.

``memory`` adds the largest parts of all kinds, which is right if their order is unknown. Our own
runs are composed by ``parallel.compose``, so their order is known. FSDP gathers the unit that runs
and the next one. It reduces a unit as soon as its gradients are computed, or with a pipeline once,
at the end. Backward frees a block before it begins the next one. So the logits, the last block's
backward and the reduction of its unit's gradients are never in memory together, and the peak is the
largest moment.

All sizes are bytes on one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from composer3d.facts.schedules import SCHEDULES
from composer3d.facts.units import units_of_blocks
from composer3d.planner.activations import (
    BlockBytes,
    Unit,
    block_bytes,
    head_bytes,
    stream_of,
    unit_of,
)
from composer3d.planner.matrices import (
    elements_of_products,
    elements_of_results,
    owned_in_round,
)
from composer3d.planner.setup import BlockKind, BlockMatrices, Matrices, Setup
from composer3d.planner.states import Counts, State, states_of_ranks
from composer3d.planner.time import matrices_of_ranks, saved_by_matrices
from composer3d.planner.trained import Share


class Always(NamedTuple):
    """The bytes that a rank always holds: its shards of parameters, and their optimizer state."""

    weights: float
    optimizer: float


class Moment(NamedTuple):
    """The bytes that a rank holds at one time, besides ``Always``.

    Attributes:
        gradients: gradients of parameters, whole and sharded.
        gathered: parameters that FSDP has gathered.
        buffers: buffers of reductions and messages.
        activations: what backward needs, and the temporaries of the block that runs.
        logits: logits and their copies in the loss.
    """

    gradients: float
    gathered: float
    buffers: float
    activations: float
    logits: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all kinds, in bytes."""
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """The sizes of a stage: those of its blocks, ends and messages.

    Each action of a schedule reads the sums over its units, so these are cached.

    Attributes:
        blocks: its blocks, in order.
        groups: the same blocks by FSDP unit, in order.
        first, last: the units of embedding and head; None: the stage has none. If both share a
            parameter, ``first`` is None and ``last`` is the unit of both.
        output: the activations that it sends to another rank, kept until their gradient arrives.
        messages: the buffers that messages are received in.
        input_is_message: whether the first block's input is such a buffer.
    """

    blocks: tuple[BlockBytes, ...]
    groups: tuple[tuple[BlockBytes, ...], ...]
    first: Unit | None
    last: Unit | None
    output: float
    messages: float
    input_is_message: bool

    @cached_property
    def units_of_groups(self) -> list[Unit]:
        return list(map(_unit_of, self.groups))

    @cached_property
    def units(self) -> list[Unit]:
        ends = [unit for unit in (self.first, self.last) if unit is not None]
        return self.units_of_groups + ends

    @cached_property
    def elements(self) -> float:
        return sum(unit.elements for unit in self.units)

    @cached_property
    def shard(self) -> float:
        return sum(unit.shard for unit in self.units)

    @cached_property
    def trained(self) -> float:
        return sum(unit.trained for unit in self.units)

    @cached_property
    def trained_shard(self) -> float:
        return sum(unit.trained_shard for unit in self.units)


_NOTHING = Unit(*[0.0] * len(Unit._fields))


def _unit_of(blocks: tuple[BlockBytes, ...]) -> Unit:
    """Return the unit of FSDP that holds ``blocks``."""
    if len(blocks) == 1:
        return blocks[0].unit
    return Unit(*map(sum, zip(*(block.unit for block in blocks), strict=True)))


def peak_moments(setup: Setup) -> Iterator[tuple[Always, Moment]]:
    """Yield what each pipeline rank always holds, and what else at its largest moment.

    Raises:
        PlanError: the schedule cannot run with these numbers.
    """
    blocks = _Blocks(setup)
    for number, matrices in enumerate(matrices_of_ranks(setup)):
        rank = _Rank(setup, number, blocks, matrices)
        moments = _step_moments(rank) if setup.layout.pp == 1 else _pipeline_moments(rank)
        if setup.matrices is not None:
            moments += _orthogonalising(rank, setup.matrices)
        yield rank.always(), max(moments, key=lambda moment: moment.total)


class _Blocks:
    """The blocks of a setup. Blocks of the same kind and trained share are computed once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        layout = setup.layout
        self.splits_backward = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        self._bytes: dict[tuple[BlockKind, Share], BlockBytes] = {}

    def of(self, stage: int, place: int, layer: int) -> BlockBytes:
        """Return the bytes of block ``layer`` of the model, at ``place`` in a stage."""
        kind = self._setup.kind_of(layer, place, stage)
        share = self._setup.trained.of_block(layer)
        if (kind, share) not in self._bytes:
            self._bytes[kind, share] = block_bytes(
                replace(self._setup, recompute=kind.recompute),
                has_experts=kind.has_experts,
                splits_backward=self.splits_backward,
                share=share,
                predicts=kind.predicts,
            )
        return self._bytes[kind, share]


class _Rank:
    """The sizes of one pipeline rank.

    Args:
        setup: the whole setup.
        number: the pipeline rank.
        blocks: the blocks of the model.
        matrices: the matrices of a matrix optimizer (Muon), on all ranks of this rank's stages.

    Attributes:
        setup, number, matrices: as given.
        stages: the rank's stages, by number.
        narrow, wide: bytes per element of a gathered parameter, and of a sharded one or a summed
            gradient.
        adds_at_once: whether a gradient is added to a sum as soon as it is written. Otherwise the
            gradients of a unit stay narrow until its backward ends.
        exchanged: bytes per element of the copies of a gradient that are sent and received, if it
            is sent narrower than it is summed.
        has_fsdp: whether FSDP gathers and reduces; else every rank holds its parameters whole.
        splits_backward: whether weight gradients are computed in actions of their own.
    """

    def __init__(self, setup: Setup, number: int, blocks: _Blocks, matrices: BlockMatrices) -> None:
        self.setup, self.number, self.matrices = setup, number, matrices
        layout, sizes, precision = setup.layout, setup.sizes, setup.precision
        self.narrow, self.wide = precision.gathered, precision.gradients
        self.adds_at_once = setup.software.since_torch_2_15 or self.narrow == self.wide
        self.exchanged = 2 * precision.exchanged
        self.stream = stream_of(setup).own
        self.head = head_bytes(setup)
        self.has_fsdp = (
            layout.batch_ranks * layout.cp > 1
            or self.narrow != self.wide
            or setup.software.offloads
            or (sizes.expert_blocks > 0 and layout.tp > 1)
        )
        self.splits_backward = blocks.splits_backward

        self.stages: dict[int, _Stage] = {}
        begin = 0
        for stage, count in enumerate(layout.stage_blocks):
            if layout.rank_of(stage) == number:
                of_stage = [blocks.of(stage, place, begin + place) for place in range(count)]
                self.stages[stage] = self._stage(stage, tuple(of_stage))
            begin += count

    def _stage(self, number: int, blocks: tuple[BlockBytes, ...]) -> _Stage:
        setup, layout, sizes = self.setup, self.setup.layout, self.setup.sizes
        is_first, is_last = number == 0, number == layout.stages - 1
        is_one_unit = sizes.shares_embedding and is_first and is_last
        trained = setup.trained
        embedding = self._embedding()
        head = unit_of(setup, sizes.head_parameters / layout.tp, 0.0, Share(trained.last))
        if sizes.last_embedding_parameters:
            head = Unit(*map(sum, zip(head, embedding, strict=True)))
        # What a rank sends to itself is the message: no copy is made.
        sends_to_itself = not is_last and self.number == layout.rank_of(number + 1)
        neighbours = (not is_first) + (not is_last)
        # Since torch 2.15, each message gets a new buffer, which the stage then owns.
        keeps_buffers = not setup.software.since_torch_2_15
        buffers = setup.batch.micro_batches if keeps_buffers else 1
        return _Stage(
            blocks=blocks,
            groups=tuple(
                units_of_blocks(
                    blocks, layout.fsdp_blocks, alone=sizes.mtp_layers if is_last else 0
                )
            ),
            first=embedding if is_first and not is_one_unit else None,
            last=head if is_last else None,
            output=0.0 if is_last or sends_to_itself else self.stream,
            messages=neighbours * buffers * self.stream,
            input_is_message=keeps_buffers and not is_first,
        )

    def _embedding(self) -> Unit:
        """Return the unit of the embedding, of which the last stage may have a copy."""
        setup = self.setup
        elements = setup.sizes.embedding_parameters / setup.layout.tp
        return unit_of(setup, elements, 0.0, Share(setup.trained.first))

    def always(self) -> Always:
        """Return the shards and their state. A tied embedding's copy has no state."""
        if self.setup.software.offloads:
            return Always(0.0, 0.0)
        shard = sum(stage.shard for stage in self.stages.values())
        updated = sum(stage.trained_shard for stage in self.stages.values())
        has_last = any(stage.last is not None for stage in self.stages.values())
        if self.setup.sizes.shares_embedding and self.setup.layout.stages > 1 and has_last:
            updated -= self._embedding().trained_shard
        # The optimizer's width includes that of the parameters.
        state = (self.setup.precision.optimizer - self.wide) * updated
        state -= saved_by_matrices(self.setup, self.matrices)
        return Always(self.wide * shard, state)

    def waiting_losses(self, nth: int) -> float:
        """Return what losses keep during the backward of the ``nth`` block from the end, from 0.

        Depth n of multi-token prediction has n losses before it.
        """
        depths = self.setup.sizes.mtp_layers
        return self.head.waiting * max(0, depths - nth) / max(1, depths)

    def written_width(self, *, has_sum: bool, begins_sum: bool = False) -> float:
        """Return the bytes per element of a newly written gradient, until its unit's end.

        Args:
            has_sum: whether earlier micro-batches have left a sum, which is counted elsewhere.
            begins_sum: whether it is the first of such a sum, and not reduced now.
        """
        if not self.adds_at_once:
            return self.narrow
        if has_sum:
            return 0.0
        return self.wide if begins_sum else self.narrow

    def sharded_gradients(self, elements: float) -> float:
        """Return the bytes of this rank's sharded gradients on the device."""
        return 0.0 if self.setup.software.offloads else self.wide * elements


def _orthogonalising(rank: _Rank, matrices: Matrices) -> list[Moment]:
    """Return the moments of a round of an optimizer of matrices: its products, and its results."""
    layout = rank.setup.layout
    stages = rank.stages.values()
    elements = sum(s.trained_shard if layout.zero >= 2 else s.trained for s in stages)
    # Without a pipeline, FSDP drops the gathered parameters after the last backward.
    keeps_gathered = layout.pp > 1 and layout.zero < 3
    gathered = rank.narrow * sum(stage.elements for stage in stages) if keeps_gathered else 0.0
    owned = rank.matrices.elements / layout.ranks_of("stage").size
    largest = matrices.largest.elements
    of_round = owned_in_round(owned, largest)
    # The new values of a part, and the choice between them and the old ones.
    part = largest * layout.replicas / layout.ranks_of("stage").size
    updated = 2 * rank.wide * part
    in_products = elements_of_products(of_round, largest)
    in_results = elements_of_results(of_round, layout.replicas)
    return [
        Moment(rank.sharded_gradients(elements), gathered, buffers, activations=0.0)
        for buffers in (
            matrices.element_bytes * in_products,
            matrices.element_bytes * in_results + updated,
        )
    ]


# --- without a pipeline ---


def _step_moments(rank: _Rank) -> list[Moment]:
    """Return the moments of the last micro-batch and of one before it, without a pipeline."""
    micro_batches = rank.setup.batch.micro_batches
    moments = _MicroBatch(rank, repeats=micro_batches > 1, is_last=True).moments()
    if micro_batches > 1:
        moments += _MicroBatch(rank, repeats=micro_batches > 2, is_last=False).moments()
    return moments


class _MicroBatch:
    """A micro-batch without a pipeline.

    Args:
        rank: the rank's sizes.
        repeats: whether there are micro-batches before it.
        is_last: whether it is the last one of the step.
    """

    def __init__(self, rank: _Rank, *, repeats: bool, is_last: bool) -> None:
        self.rank = rank
        (self.stage,) = rank.stages.values()
        assert self.stage.last is not None
        self.last = self.stage.last
        self.is_tied = self.stage.first is None
        self.end = self.last if self.stage.first is None else self.stage.first
        zero = rank.setup.layout.zero
        self.drops = rank.has_fsdp and zero == 3
        self.sums_whole = zero <= 1 or not rank.has_fsdp
        self.reduces = rank.has_fsdp and (zero >= 2 or is_last)
        self.repeats = repeats
        # The elements that the last micro-batch has dropped, if only the last one drops them.
        self.dropped = 0.0
        self.drops_at_end = rank.has_fsdp and zero < 3 and is_last

    def moments(self) -> list[Moment]:
        """Return the moments: loss, head, and the backward of blocks and embedding."""
        rank, stage, last, head = self.rank, self.stage, self.last, self.rank.head
        wide, narrow = rank.wide, rank.narrow
        groups = stage.groups[::-1]
        units = stage.units_of_groups[::-1]
        held = sum(each.kept for each in stage.blocks)

        sums = self._earlier_sums()
        # The buffer of the unit that the previous micro-batch reduced last.
        buffer = wide * self.end.trained if self.repeats and not self.sums_whole else 0.0
        # The last block's are on their way.
        at_head = self._gathered([_NOTHING, *units[:1]], last.elements)
        if rank.setup.loss_chunks > 1 and not rank.setup.repeats_loss and not self.is_tied:
            # Forward computes the gradients. It ends with the head, and keeps the buffer of its
            # all-gather.
            at_head = self._gathered([], last.elements + last.ahead)
        moments = [
            Moment(sums, at_head, buffer, held + head.kept, head.loss),
            Moment(
                sums + narrow * last.trained,
                at_head,
                buffer,
                held + head.kept + head.input_gradient,
                head.gradient,
            ),
        ]

        # A gradient that is reduced before it is added stays narrow.
        kept_width = rank.written_width(has_sum=self.sums_whole and self.repeats)
        # The head's gradient is reduced now, or together with that of the embedding it is tied to.
        head_gradient = kept_width * last.trained
        # A tied unit keeps its sum until it is reduced, with the embedding.
        if self.reduces and self.sums_whole and self.repeats and not self.is_tied:
            sums -= wide * last.trained
        before = sums
        # What is reduced is added to the sum of earlier micro-batches, if that is sharded.
        if self.reduces and (self.sums_whole or not self.repeats):
            sums += rank.sharded_gradients(last.trained_shard)
        if self.is_tied:
            sums += head_gradient
        else:
            buffer = wide * last.trained if self.reduces else 0.0
            self._drop(last)
            gathered = self._gathered([_NOTHING, *units[:1]])
            moments.append(Moment(sums + head_gradient, gathered, buffer, held + rank.stream))
            moments += self._exchange(before, gathered, last, held + rank.stream, last.elements)
            if not self.reduces and not self.repeats:
                sums += self._left_by(last)

        for nth, (group, unit) in enumerate(zip(groups, units, strict=True)):
            # The last unit may be smaller than the two before it. In between, memory grows or falls
            # linearly, so no moment is the largest.
            if nth < 3 or nth >= len(groups) - 2:
                moments += self._backward_of_unit(
                    group,
                    unit,
                    units[nth + 1 : nth + 2],
                    sums=sums,
                    buffer=buffer,
                    held=held + rank.waiting_losses(nth),
                    kept_width=kept_width,
                )
            held -= sum(block.kept for block in group)
            self._drop(unit)
            if not self.repeats:
                sums += self._left_by(unit)
            if self.reduces:
                buffer = wide * unit.trained
        end_buffer = wide * self.end.trained if self.reduces else 0.0
        end_sums = sums if self.is_tied else sums + narrow * self.end.trained
        end_gathered = self._gathered([], self.end.elements)
        moments.append(Moment(end_sums, end_gathered, end_buffer, rank.stream))
        # FSDP drops what it has gathered before it reduces.
        moments += self._exchange(
            sums, self._gathered([]), self.end, rank.stream, self.end.elements
        )
        return moments

    def _backward_of_unit(
        self,
        group: Sequence[BlockBytes],
        unit: Unit,
        after: Sequence[Unit],
        *,
        sums: float,
        buffer: float,
        held: float,
        kept_width: float,
    ) -> list[Moment]:
        """Return the moments of the backward of a unit of blocks.

        Args:
            group: the blocks of the unit, in the order of forward.
            unit: their parameters.
            after: the unit that backward reaches next, which is gathered ahead; may be empty.
            sums, buffer: the bytes of gradients, and of the buffer of the previous reduction.
            held: the bytes that blocks which backward has not reached keep.
            kept_width: the bytes per element of a gradient that is not reduced yet.
        """
        rank = self.rank
        # The buffer of the all-gather, and the parameters copied from it.
        copied = self._gathered([unit, unit])
        if self.drops:
            copied += rank.narrow * unit.turned
        moments = [Moment(sums, copied, buffer, held)]
        gathered = self._gathered([unit, *after])
        whole = 0.0
        for block in reversed(group):
            running = held + block.again + block.extra(rank.narrow, kept_width)
            moments.append(Moment(sums + whole, gathered, buffer, running))
            whole += kept_width * block.unit.trained
            held -= block.kept
        moments.append(Moment(sums + whole, gathered, buffer, held + rank.stream))
        if self.reduces:
            # The gradients are added to the sum, or copied to the buffer and freed.
            shard = rank.sharded_gradients(unit.trained_shard)
            copied = sums if self.sums_whole and self.repeats else sums + max(whole, shard)
            gathered = self._gathered(after)
            buffer = rank.wide * unit.trained
            moments.append(Moment(copied, gathered, buffer, held + rank.stream))
            moments += self._exchange(sums, gathered, unit, held + rank.stream, group[-1].last)
        return moments

    def _exchange(
        self, sums: float, gathered: float, unit: Unit, activations: float, late: float
    ) -> list[Moment]:
        """Return the moment at which the gradients of a unit are sent narrow, if they are.

        FSDP's buffer has them, and the copies that leave and arrive. The gradients themselves are
        gone, but for the last one of a unit.

        Args:
            sums: the gradients, without what this reduction returns.
            gathered, activations: what else there is.
            unit: the unit.
            late: the elements of its last parameter. Of the embedding and of the head, it is almost
                all.
        """
        rank = self.rank
        if not self.reduces or not rank.exchanged:
            return []
        buffers = (rank.wide + rank.exchanged) * unit.trained
        buffers += rank.narrow * min(late, unit.trained)
        sums += rank.sharded_gradients(unit.trained_shard)
        return [Moment(sums, gathered, buffers, activations)]

    def _drop(self, unit: Unit) -> None:
        """Note that backward is done with a unit."""
        if self.drops_at_end:
            self.dropped += unit.elements

    def _left_by(self, unit: Unit) -> float:
        """Return the bytes of a unit's gradients that the first micro-batch leaves."""
        if self.reduces:
            return self.rank.sharded_gradients(unit.trained_shard)
        return self.rank.wide * unit.trained

    def _earlier_sums(self) -> float:
        """Return the bytes of gradients that earlier micro-batches have left."""
        if not self.repeats:
            return 0.0
        if self.sums_whole:
            return self.rank.wide * self.stage.trained
        return self.rank.sharded_gradients(self.stage.trained_shard)

    def _gathered(self, units: Sequence[Unit], ends: float = 0.0) -> float:
        """Return the gathered bytes with ``units``, and ``ends`` elements of first and last.

        The second of the units is gathered ahead. Only zero = 3 drops parameters. A tied unit stays
        gathered.
        """
        if not self.rank.has_fsdp:
            return 0.0
        if not self.drops:
            return self.rank.narrow * (self.stage.elements - self.dropped)
        of_blocks = sum(unit.elements for unit in units[:1])
        of_blocks += sum(unit.ahead for unit in units[1:])
        ends = self.last.elements if self.is_tied else ends
        return self.rank.narrow * (of_blocks + ends)


# --- with a pipeline ---


def _pipeline_moments(rank: _Rank) -> list[Moment]:
    """Return the moments of all actions of a pipeline rank."""
    layout, micro_batches = rank.setup.layout, rank.setup.batch.micro_batches
    # The middle of a long step repeats itself, so a shorter step has the same largest moment.
    can_shorten = layout.schedule not in ("csv", "GPipe", "LoopedBFS")
    if can_shorten and micro_batches % layout.pp == 0:
        micro_batches = min(micro_batches, 3 * layout.pp)
    states = states_of_ranks(
        layout.schedule,
        layout.pp,
        layout.stages_per_rank,
        micro_batches,
        layout.zero == 3,
        layout.schedule_csv,
    )[rank.number]
    pipeline = _PipelineRank(rank)
    return [moment for state in states for moment in pipeline.moments(state)]


class _PipelineRank:
    """The moments of a pipeline rank."""

    def __init__(self, rank: _Rank) -> None:
        self.rank = rank
        self.messages = sum(stage.messages for stage in rank.stages.values())
        self.held = {number: self._held(stage) for number, stage in rank.stages.items()}
        self.deferred = {
            number: sum(block.deferred for block in stage.blocks)
            for number, stage in rank.stages.items()
        }

    def _held(self, stage: _Stage) -> float:
        """Return the bytes that a stage keeps of a micro-batch from forward to backward."""
        kept = sum(block.kept for block in stage.blocks) + stage.output
        if stage.input_is_message:
            kept -= self.rank.stream
        if stage.last is not None:
            kept += self.rank.head.kept + self.rank.head.saved
        return kept

    def moments(self, state: State) -> list[Moment]:
        """Return the moments of an action."""
        rank, stage = self.rank, self.rank.stages[state.stage]
        held = _sum(state.held, self.held) + _sum(state.deferred, self.deferred)
        sums = rank.wide * sum(rank.stages[of].trained for of in state.summed)
        sums += rank.sharded_gradients(sum(rank.stages[of].trained_shard for of in state.reduced))
        gathered = self._gathered(state.gathered)
        if state.kind == "R":
            return self._reduction(state, stage, sums, gathered, held)
        if state.kind == "F":
            return self._forward(state, stage, sums, gathered, held)

        # During the action, its stage is gathered and gets unsharded gradients.
        gathered_after = self._gathered(state.gathered | {state.stage})
        sums_after = sums
        if state.stage not in state.summed:
            sums_after += rank.wide * stage.trained
        moments = []
        if state.kind in "BI":
            has_sum = state.stage in state.summed
            written = rank.written_width(has_sum=has_sum, begins_sum=not has_sum)
            moments += self._backward_begins(state, stage, sums, held, written)
            moments += self._backward_ends(state, stage, sums_after, gathered_after, held, written)
        if state.kind in "BW" and rank.splits_backward:
            # All weight gradients are computed before they are added to the sums.
            linear = self._not_added(sum(block.linear for block in stage.blocks))
            if state.kind == "B":
                held += self.deferred[state.stage] - self.held[state.stage]
            # The embedding's gradient is computed separately.
            embedding = 0.0 if stage.first is None else rank.narrow * stage.first.trained
            written = max(linear, embedding)
            moments.append(Moment(sums_after + written, gathered_after, self.messages, held))
        return moments

    def _forward(
        self, state: State, stage: _Stage, sums: float, gathered: float, held: float
    ) -> list[Moment]:
        """Return the moments of a forward: the embedding, and the end of the last block.

        Until the forward of a unit ends, FSDP has the buffer of its all-gather as well as the
        parameters copied from it. With zero = 3, it has dropped the units before.
        """
        rank, drops = self.rank, self.rank.setup.layout.zero == 3
        unit, moments = stage.units_of_groups[-1], []
        at_end = self._gathered(state.gathered | {state.stage})
        if drops:
            at_end = self._gathered(state.gathered - {state.stage})
            at_end += rank.narrow * unit.elements if rank.has_fsdp else 0.0
        if rank.has_fsdp and state.stage not in state.gathered:
            at_end += rank.narrow * unit.ahead
        if rank.has_fsdp and drops and stage.first is not None:
            embedding = 2 * rank.narrow * stage.first.elements
            moments.append(Moment(sums, gathered + embedding, self.messages, held))
        kept = self.held[state.stage]
        if stage.last is not None:
            kept -= rank.head.kept + rank.head.saved
        # The last product, which is added to the stream.
        kept += stream_of(rank.setup).inner
        moments.append(Moment(sums, at_end, self.messages, held + kept))
        return moments

    def _reduction(
        self, state: State, stage: _Stage, sums: float, gathered: float, held: float
    ) -> list[Moment]:
        """Return the moments at which FSDP reduces the gradients of a stage, unit by unit."""
        rank = self.rank
        if not rank.has_fsdp:
            return []
        # Before the reduction of a unit, its parameters are dropped. Its gradients are freed once
        # the buffer holds them; before torch 2.15, the last one only after the reduction. For the
        # embedding and the head, that is almost all.
        moments = []
        units = [stage.first, *stage.units_of_groups, stage.last]
        frees_at_once = rank.setup.software.since_torch_2_15
        if frees_at_once:
            units.reverse()
        for unit in units:
            if unit is None:
                continue
            if unit is not stage.first or rank.setup.layout.zero < 3:
                gathered -= rank.narrow * unit.elements
            buffer = self.messages + rank.wide * unit.trained
            moments.append(Moment(sums, gathered, buffer, held))
            sums += rank.sharded_gradients(unit.trained_shard) - rank.wide * unit.trained
            buffer += rank.exchanged * unit.trained
            is_end = unit is stage.first or unit is stage.last
            late = rank.wide * unit.trained if is_end and not frees_at_once else 0.0
            moments.append(Moment(sums + late, gathered, buffer, held))
        return moments

    def _backward_begins(
        self, state: State, stage: _Stage, sums: float, held: float, written: float
    ) -> list[Moment]:
        """Return the moments of the loss, the head and the last block.

        ``written`` is the ``written_width`` of the backward.
        """
        rank, block = self.rank, stage.blocks[-1]
        moments = []
        at_loss = at_block = self._gathered(state.gathered)
        last = 0.0 if stage.last is None else stage.last.elements
        last_trained = 0.0 if stage.last is None else stage.last.trained
        at_end, sums_at_end = held, sums
        if stage.last is not None:
            # The last loss and its head have run. Those of other depths wait.
            depths = rank.setup.sizes.mtp_layers
            at_end += rank.head.waiting - rank.head.saved - rank.head.kept / (1 + depths)
            if state.stage not in state.summed:
                sums_at_end += rank.wide * last_trained
        if rank.has_fsdp and state.stage not in state.gathered:
            *earlier, unit = stage.units_of_groups
            ahead = earlier[-1].ahead if earlier else 0.0
            # The buffer of the all-gather, and the parameters copied from it.
            copied = at_block + rank.narrow * (last + unit.elements + unit.ahead + unit.turned)
            gradient = 0.0 if stage.last is None else rank.stream  # else it is a message
            moments.append(Moment(sums_at_end, copied, self.messages, at_end + gradient))
            at_loss += rank.narrow * (last + unit.ahead)
            at_block += rank.narrow * (last + unit.elements + ahead)
        running = at_end + block.again + block.extra(rank.narrow, written)
        moments.append(Moment(sums_at_end, at_block, self.messages, running))
        if stage.last is not None:
            head = rank.head
            moments += [
                Moment(sums, at_loss, self.messages, held, head.loss - head.saved),
                Moment(
                    sums + rank.narrow * last_trained,
                    at_loss,
                    self.messages,
                    held + head.input_gradient,
                    head.gradient - head.saved,
                ),
            ]
        return moments

    def _backward_ends(
        self,
        state: State,
        stage: _Stage,
        sums: float,
        gathered: float,
        held: float,
        written: float,
    ) -> list[Moment]:
        """Return the moments of the first block's backward, and after it.

        ``written`` is the ``written_width`` of the backward.
        """
        rank, block, unit = self.rank, stage.blocks[0], stage.units_of_groups[0]
        others = held - self.held[state.stage] + stage.output
        if rank.splits_backward:
            others += self.deferred[state.stage] - block.deferred
        running = others + block.kept + block.again + block.extra(rank.narrow, written)
        if stage.input_is_message:
            running -= rank.stream
        done = others + rank.stream
        not_added = self._not_added(unit.trained)
        if stage.first is not None and not rank.splits_backward:
            # The embedding's gradient is one tensor, however it is added.
            not_added = max(not_added, rank.narrow * stage.first.trained)
        # The first backward has not computed the gradients of the first units yet.
        made = sums
        if state.stage not in state.summed:
            embedding = 0.0 if stage.first is None else stage.first.trained
            # Gradients that are not added at once are added when their whole unit has them.
            added = block.unit if rank.adds_at_once else unit
            made -= rank.wide * (added.trained + embedding)
        made += self._not_added(unit.trained - block.unit.trained)
        return [
            Moment(made, gathered, self.messages, running),
            Moment(sums + not_added, gathered, self.messages, done),
        ]

    def _not_added(self, elements: float) -> float:
        """Return the bytes of gradients that are written and not yet added to a sum."""
        return 0.0 if self.rank.adds_at_once else self.rank.narrow * elements

    def _gathered(self, stages: frozenset[int]) -> float:
        """Return the gathered bytes of ``stages`` during a backward or a reduction.

        With zero = 3, forward drops the embedding, which backward does not read.
        """
        if not self.rank.has_fsdp:
            return 0.0
        held = [self.rank.stages[number] for number in stages]
        elements = sum(stage.elements for stage in held)
        if self.rank.setup.layout.zero == 3:
            elements -= sum(stage.first.elements for stage in held if stage.first is not None)
        return self.rank.narrow * elements


def _sum(counts: Counts, bytes_of: dict[int, float]) -> float:
    return sum(number * bytes_of[stage] for stage, number in counts)
