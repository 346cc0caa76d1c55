"""The memory of a pipeline rank, moment by moment, where the order is known. No torch here.

``memory`` adds the largest parts of all kinds, which is right if nothing is known of their order.
Here the order is that of ``parallel.compose``: FSDP gathers the unit that runs and the next one,
reduces a unit as soon as its gradients are there (with a pipeline: once, at the end), and backward
frees a block before it begins the next. So the logits, the last block's backward and the reduction
of its gradients never are in memory together, and the peak is that of the largest moment.

All numbers are bytes of one rank. Symbols: e is the width of a value in computation, p that of a
parameter. The stream has micro_batch x tokens x dim values.
"""

from typing import NamedTuple

from composer3d.planner.setup import Setup
from composer3d.planner.states import states_of_ranks
from composer3d.planner.time import rank_of
from composer3d.spec.schedules import SCHEDULES

_STATISTICS = 4.0  # bytes of a logsumexp


class Moment(NamedTuple):
    """What a rank holds at one time, besides its shards of parameters and optimizer state.

    Attributes:
        gradients: of parameters, whole and sharded.
        gathered: parameters that FSDP has gathered.
        buffers: of reductions and of messages.
        activations: what backward needs, and the temporaries of the block that runs.
        logits: logits and their copies in the loss.
    """

    gradients: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class Shards(NamedTuple):
    """What a rank holds all the time: parameters with their optimizer state, in bytes."""

    weights: float
    optimizer: float


class _Unit(NamedTuple):
    """A unit of FSDP: its elements on one rank if gathered, and its share of them."""

    elements: float
    shard: float


class _Block(NamedTuple):
    """The activations of one block and micro-batch.

    Attributes:
        kept: from forward to backward.
        again: what backward computes again, in addition.
        extra: the most temporaries of backward, with what it computes again already there.
        deferred: inputs and gradients of linear layers, from one half of backward to the other.
        unit: its parameters.
        linear: the elements of its linear layers.
    """

    kept: float
    again: float
    extra: float
    deferred: float
    unit: _Unit
    linear: float


class _Stage(NamedTuple):
    """A stage: its blocks, and what it has besides.

    Attributes:
        blocks: in order.
        first, last: the units of embedding and head; None: the stage has none.
        output: the stream that it sends on, which stays until its gradient arrives.
        buffers: in which messages arrive, one for each micro-batch.
        input_is_buffer: the first block's input is the message.
    """

    blocks: tuple[_Block, ...]
    first: _Unit | None
    last: _Unit | None
    output: float
    buffers: float
    input_is_buffer: bool

    @property
    def units(self) -> list[_Unit]:
        ends = [unit for unit in (self.first, self.last) if unit is not None]
        return [block.unit for block in self.blocks] + ends

    @property
    def elements(self) -> float:
        return sum(unit.elements for unit in self.units)

    @property
    def shard(self) -> float:
        return sum(unit.shard for unit in self.units)


def peak_moment(setup: Setup, rank: int) -> tuple[Shards, Moment]:
    """Return what pipeline rank ``rank`` always holds, and the rest at its largest moment."""
    return _Rank(setup, rank).peak()


class _Rank:
    """The moments of one pipeline rank."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self.setup, self.rank = setup, rank
        layout, precision, sizes = setup.layout, setup.precision, setup.sizes
        self.e, self.p = precision.gathered, precision.gradients
        # Bytes of a gradient when backward writes it.
        self.g = self.p if setup.software.widens_gradients else self.e
        self.m = setup.batch.micro_batches
        whole = setup.tokens * sizes.dim * self.e
        cuts_stream = layout.tp > 1 and layout.sequence_parallel
        self.whole_stream = whole
        self.stream = whole / layout.tp if cuts_stream else whole
        # The input of products: gathered over tp, and kept like that.
        self.gathers_stream = cuts_stream
        self.shards = 1 if layout.zero == 0 else layout.dp_shard * layout.cp
        self.has_fsdp = (
            layout.batch_ranks * layout.cp > 1
            or self.e != self.p
            or setup.software.offloads
            or (sizes.expert_blocks > 0 and layout.tp > 1)
        )
        self.splits = layout.pp > 1 and SCHEDULES[layout.schedule].splits_backward
        kinds = {
            has_experts: self._block(has_experts)
            for has_experts in (False, True)
            if not has_experts or sizes.expert_blocks
        }
        dense = sizes.layers - sizes.expert_blocks
        blocks = [kinds[layer >= dense] for layer in range(sizes.layers)]
        self.stages: dict[int, _Stage] = {}
        begin = 0
        for stage, count in enumerate(layout.stage_blocks):
            if rank_of(layout.pp, stage, layout.schedule) == rank:
                self.stages[stage] = self._stage(stage, tuple(blocks[begin : begin + count]))
            begin += count

    # --- sizes ---

    def _unit(self, dense: float, experts: float = 0.0) -> _Unit:
        layout = self.setup.layout
        expert_shards = max(1, layout.dp_shard * layout.cp * layout.tp // layout.ep)
        if layout.zero == 0:
            expert_shards = 1
        return _Unit(dense + experts, dense / self.shards + experts / expert_shards)

    def _stage(self, stage: int, blocks: tuple[_Block, ...]) -> _Stage:
        layout, sizes = self.setup.layout, self.setup.sizes
        is_first, is_last = stage == 0, stage == layout.stages - 1
        embedding = self._unit(sizes.embedding_parameters / layout.tp)
        head = self._unit(sizes.head_parameters / layout.tp)
        if sizes.tied and is_first and is_last:
            embedding = _Unit(0.0, 0.0)
        messages = (not is_first) + (not is_last)
        return _Stage(
            blocks,
            embedding if is_first else None,
            head if is_last else None,
            0.0 if is_last else self.stream,
            messages * self.m * self.stream,
            not is_first,
        )

    def _block(self, has_experts: bool) -> _Block:
        """Return the sizes of a block, after its operators (``models.layers``).

        Without checkpointing it keeps the inputs of both norms and their outputs (under sequence
        parallelism those are gathered), queries, keys and values after the rotation, the output of
        attention, and four tensors of the feed-forward layer's width.
        """
        setup, sizes, layout, e = self.setup, self.setup.sizes, self.setup.layout, self.e
        tp = layout.tp
        local = setup.tokens / tp
        query = local * sizes.query_width * e
        divides = sizes.kv_heads % tp == 0
        kv = setup.tokens * (sizes.kv_width / tp if divides else sizes.head_width) * e
        attended = query + _STATISTICS * local * sizes.heads
        stream = self.stream
        inner = self.whole_stream if self.gathers_stream else stream
        norm_inputs = 2 * stream
        if not setup.software.fuses_norms:  # two copies in float32, besides the stream itself
            norm_inputs += 2 * stream * (2 * 4.0 / e if e < 4 else 1.0)
        width = local * (sizes.shared_width if has_experts else sizes.ffn) * e
        dense_parameters = (
            2.0 * sizes.dim * sizes.query_width / tp
            + 2.0 * sizes.dim * sizes.kv_width / (tp if divides else 1)
        )
        if has_experts:
            dense_parameters += sizes.shared_parameters / tp
        else:
            dense_parameters += sizes.dense_parameters / tp
        linear = dense_parameters
        experts = sizes.expert_parameters / layout.ep if has_experts else 0.0
        moe = _Experts(self, has_experts)

        full = norm_inputs + 2 * inner + query + 2 * kv + attended + 4 * width + moe.kept
        if has_experts and not sizes.shared_width:
            full += stream - inner  # the router reads the stream
        row_inputs = inner if tp > 1 else 0.0
        matrix = linear / (7 if sizes.gated else 6) * e  # about one product's weight
        extra = stream + max(
            row_inputs + width + matrix, 2 * width + matrix, 3 * matrix + 3 * inner - 2 * width, 0.0
        )
        extra = max(extra, stream + moe.extra)
        if self.splits:  # gradients of outputs stay, and no weight has one
            extra = stream + row_inputs + 3 * width + moe.extra
        extra = max(extra, self._attention_extra(query, kv) - 4 * width - inner + 3 * matrix)
        exchanged = query if layout.cp > 1 and layout.cp_method == "ulysses" else 0.0
        full += exchanged  # the output of attention, as each rank gets it back
        mode = setup.recompute
        if mode == "none":
            kept, again = full, 0.0
        elif mode == "full":
            kept, again = stream, full - stream
        else:
            products = query + 2 * kv + 2 * width + inner + (inner if width else 0.0)
            if exchanged:  # what arrives is saved, before and after attention
                products += 2 * query + 2 * kv
                full += query + 2 * kv
            kept = stream + products + attended + moe.selected
            again = full - stream - attended - kv - 2 * width - moe.selected
            again -= inner + (2 * query + 2 * kv if exchanged else 0.0)
        deferred = 2 * inner + query + width + query + 2 * kv + inner + 2 * width + inner
        return _Block(kept, again, extra, deferred, self._unit(dense_parameters, experts), linear)

    def _attention_extra(self, query: float, kv: float) -> float:
        """Return the temporaries of attention's backward (``parallel.context.ring``).

        Args:
            query: the queries of this rank.
            kv: its keys; its values take as much.
        """
        layout = self.setup.layout
        grads = self.stream + query + query + 2 * kv
        if layout.cp == 1 or layout.cp_method == "ulysses":
            return grads
        wide = 4.0 / self.e if self.e < 4 else 1.0
        if layout.cp_method == "ring":  # the block that is computed, and the two that travel
            return grads + wide * query + (3 + 3 * wide) * 2 * kv
        # All keys and values, and their gradients before and after they are sorted by rank.
        return grads + wide * query + 2 * kv + layout.cp * (1 + 2 * wide) * 2 * kv

    # --- moments ---

    def peak(self) -> tuple[Shards, Moment]:
        setup = self.setup
        shard = sum(stage.shard for stage in self.stages.values())
        weights = self.p * shard
        optimizer = (setup.precision.optimizer - self.p) * shard
        if setup.sizes.tied and setup.layout.pp > 1 and setup.layout.stages - 1 in self.stages:
            # The last stage's head is a copy, which the optimizer does not update.
            last = self.stages[setup.layout.stages - 1].last
            assert last is not None
            optimizer -= (setup.precision.optimizer - self.p) * last.shard
        moments = self._of_one_stage() if setup.layout.pp == 1 else self._of_a_pipeline()
        largest = max(moments, key=lambda moment: moment.total)
        if setup.software.offloads:
            weights = optimizer = 0.0
        return Shards(weights, optimizer), largest

    def _sharded(self, elements: float) -> float:
        """Return the bytes of gradients of this rank's shards."""
        return 0.0 if self.setup.software.offloads else self.p * elements

    def _of_one_stage(self) -> list[Moment]:
        """Return the moments of a later micro-batch without a pipeline."""
        setup, e, p = self.setup, self.e, self.p
        (stage,) = self.stages.values()
        assert stage.first is not None
        assert stage.last is not None
        zero, repeats = setup.layout.zero, self.m > 1
        last, first = stage.last, stage.first
        block = stage.blocks[-1]
        unit = block.unit
        is_tied = first.elements == 0.0
        held = sum(each.kept for each in stage.blocks)

        whole = e * stage.elements if self.has_fsdp else 0.0
        moments = []
        sums_whole = zero <= 1 or not self.has_fsdp
        for is_final in (False, True) if repeats else (True,):
            sums = 0.0  # gradients that earlier micro-batches have left
            if repeats and sums_whole:
                sums = p * stage.elements
            elif repeats:
                sums = self._sharded(stage.shard)
            reduces = self.has_fsdp and (zero >= 2 or is_final)
            old_buffer = p * (last if is_tied else first).elements
            if not repeats or sums_whole:
                old_buffer = 0.0
            tied_gradient = self.g * last.elements if is_tied else 0.0

            def gathered(blocks: float, ends: float, whole: float = whole) -> float:
                if zero < 3 or not self.has_fsdp:
                    return whole
                return e * (blocks * unit.elements + (last.elements if is_tied else ends))

            head = self._head()
            moments.append(
                Moment(sums, gathered(1, last.elements), old_buffer, held + head.kept, head.loss)
            )
            moments.append(
                Moment(
                    sums + self.g * last.elements,
                    gathered(1, last.elements),
                    old_buffer,
                    held + head.kept + head.back,
                    head.gradient,
                )
            )
            buffer = p * last.elements if reduces and not is_tied else 0.0
            kept_sums = sums - (p * last.elements if sums_whole and reduces and repeats else 0.0)
            if reduces:
                kept_sums += self._sharded(last.shard)
            if not is_tied:
                moments.append(
                    Moment(
                        kept_sums + (0.0 if p == self.g and sums_whole else self.g * last.elements),
                        gathered(1, 0.0),
                        buffer,
                        held + self.stream,
                    )
                )
            moments.append(
                Moment(
                    kept_sums + tied_gradient,
                    gathered(2, 0.0),
                    buffer or old_buffer,
                    held + block.again + block.extra,
                )
            )
            of_block = (self.g + (p if reduces else 0.0)) * unit.elements
            moments.append(
                Moment(
                    kept_sums + tied_gradient + self._sharded(unit.shard),
                    gathered(1, 0.0),
                    of_block,
                    held - block.kept + self.stream,
                )
            )
            if len(stage.blocks) > 1:
                before = stage.blocks[-2]
                moments.append(
                    Moment(
                        kept_sums + tied_gradient,
                        gathered(2, 0.0),
                        p * unit.elements if reduces else 0.0,
                        held - block.kept + before.again + before.extra,
                    )
                )
            end = last if is_tied else first
            moments.append(
                Moment(
                    kept_sums + self.g * end.elements,
                    gathered(0, end.elements),
                    p * end.elements if reduces else 0.0,
                    self.stream,
                )
            )
        return moments

    def _of_a_pipeline(self) -> list[Moment]:
        layout, e, p = self.setup.layout, self.e, self.p
        buffers = sum(stage.buffers for stage in self.stages.values())
        count = self.m
        if layout.schedule not in ("csv", "GPipe", "LoopedBFS") and self.m % layout.pp == 0:
            count = min(self.m, 3 * layout.pp)
        states = states_of_ranks(
            layout.schedule,
            layout.pp,
            layout.stages_per_rank,
            count,
            layout.zero == 3,
            layout.in_flight,
            layout.schedule_csv,
        )[self.rank]
        per_micro_batch = {number: self._held(stage) for number, stage in self.stages.items()}
        later = {
            number: sum(block.deferred for block in stage.blocks)
            for number, stage in self.stages.items()
        }
        moments = []
        for state in states:
            number = state.stage
            stage = self.stages[number]
            held = sum(n * per_micro_batch[of] for of, n in state.held)
            held += sum(n * later[of] for of, n in state.deferred)
            gathered = 0.0
            if self.has_fsdp:
                gathered = e * sum(self.stages[of].elements for of in state.gathered)
            sums = p * sum(self.stages[of].elements for of in state.summed)
            sums += self._sharded(sum(self.stages[of].shard for of in state.reduced))
            block = stage.blocks[-1]
            others = gathered
            if number in state.gathered:
                others -= e * stage.elements if self.has_fsdp else 0.0
            last = 0.0 if stage.last is None else stage.last.elements
            is_whole = number in state.gathered or not self.has_fsdp
            at_loss = begin = gathered
            if not is_whole:
                at_loss += e * (last + block.unit.elements)
                begin += e * min(2 * block.unit.elements + last, stage.elements)
            end = others + (e * stage.elements if self.has_fsdp else 0.0)
            summed = sums if number in state.summed else sums + p * stage.elements
            narrow = 0.0 if p == self.g else self.g
            if state.kind in "BI":
                if stage.last is not None:
                    head = self._head()
                    moments.append(Moment(sums, at_loss, buffers, held, head.loss - head.saved))
                    moments.append(
                        Moment(
                            sums + self.g * last,
                            at_loss,
                            buffers,
                            held + head.back,
                            head.gradient - head.saved,
                        )
                    )
                moments.append(Moment(sums, begin, buffers, held + block.again + block.extra))
                of_first = stage.blocks[0]
                rest = held - per_micro_batch[number] + stage.output
                if self.splits:
                    rest += later[number] - of_first.deferred
                in_block = of_first.kept + of_first.again + of_first.extra
                moments.append(Moment(summed, end, buffers, rest + in_block))
                moments.append(
                    Moment(
                        summed + narrow * of_first.unit.elements, end, buffers, rest + self.stream
                    )
                )
            if state.kind in "BW" and self.splits:
                linear = sum(each.linear for each in stage.blocks)
                rest = held
                if state.kind == "B":
                    rest += later[number] - per_micro_batch[number]
                moments.append(Moment(summed + narrow * linear, end, buffers, rest))
            if state.kind == "R" and self.has_fsdp:
                largest = max(stage.units, key=lambda unit: unit.elements)
                moments.append(Moment(sums, end, buffers + p * largest.elements, held))
        return moments

    def _held(self, stage: _Stage) -> float:
        kept = sum(block.kept for block in stage.blocks) + stage.output
        if stage.input_is_buffer:
            kept -= self.stream
        if stage.last is not None:
            head = self._head()
            kept += head.kept + head.saved
        return kept

    def _head(self) -> "_Head":
        """Return what the head and the loss hold."""
        setup, e = self.setup, self.e
        sizes, layout = setup.sizes, setup.layout
        rows = setup.tokens / setup.loss_chunks
        inner = self.whole_stream if self.gathers_stream else self.stream
        is_cut = layout.tp > 1 and layout.loss_parallel
        columns = sizes.vocab / layout.tp if is_cut else float(sizes.vocab)
        narrow = e * rows * columns
        if is_cut:  # the logits, a copy in float32, and the softmax
            loss = (8.0 + (e if e < 4 else 0.0)) * rows * columns
            saved, gradient = narrow, max(narrow, 4.0 * rows * columns)
        else:
            loss = setup.software.loss_copies * rows * columns
            saved = 4.0 * rows * columns
            gradient = narrow
            if layout.tp > 1:
                gradient += narrow / layout.tp
        # The input of the last norm, its output, and its gathered output.
        kept = self.stream + inner
        if not setup.software.fuses_norms:
            kept += self.stream * (2 * 4.0 / e if e < 4 else 1.0)
        back = inner
        if setup.loss_chunks > 1:
            head = sizes.head_parameters / layout.tp
            back += inner
            # The sum over parts in float32, and the gradient of the stream.
            wide = 4.0 * head
            return _Head(kept, loss + wide + inner, gradient + wide, 0.0, back)
        return _Head(kept, loss, gradient, saved, back)


class _Head(NamedTuple):
    """The head and the loss of one micro-batch.

    Attributes:
        kept: activations from forward to backward, without logits.
        loss: logits and their copies, at the most.
        gradient: the gradient of the logits, when the products of backward run.
        saved: what of ``loss`` stays from forward to backward.
        back: the gradient of the input.
    """

    kept: float
    loss: float
    gradient: float
    saved: float
    back: float


class _Experts:
    """The activations of a layer of experts, with rows spread evenly over the experts."""

    def __init__(self, rank: _Rank, has_experts: bool) -> None:
        self.kept = self.extra = self.selected = 0.0
        if not has_experts:
            return
        setup, e = rank.setup, rank.e
        sizes, layout = setup.sizes, setup.layout
        rows = setup.tokens / layout.tp * sizes.experts_per_token
        row = rows * sizes.dim * e
        width = rows * sizes.expert_width * e
        # Rows as they are sent (if they are), as they arrive, the outputs, and four of the width.
        self.kept = row + 4 * width + row * 2
        self.extra = 2 * width + row
        self.selected = 2 * row if layout.ep > 1 else 0.0
