"""The activations and parameters of a block, of the head and of a stage, in bytes. No torch here.

They follow the operators of ``models.layers`` and what each keeps for backward. Symbols: e is the
width of a value in computation. The stream has micro_batch x tokens x dim values.
"""

from typing import NamedTuple

from composer3d.planner.setup import Latents, Setup
from composer3d.planner.trained import Share

_WIDE = 4.0  # bytes of a float32
_LOSS_COPIES = 3 * _WIDE  # of a logit that no tp rank shares, at the loss's peak


class Unit(NamedTuple):
    """A unit of FSDP.

    Attributes:
        elements: on one rank, if gathered.
        shard: the share of them that a rank holds all the time.
        ahead: those that are gathered while the unit before it runs. A group of one rank copies its
            parameters only when they are needed.
        trained, trained_shard: those of ``elements`` and of ``shard`` that have gradients.
        turned: those that FSDP cuts along another dim than the first. It copies what it has
            gathered once more, to put their parts in order.
    """

    elements: float
    shard: float
    ahead: float
    trained: float
    trained_shard: float
    turned: float


class Temporaries(NamedTuple):
    """What the backward of a block holds at one time, besides what forward has kept for it.

    Attributes:
        bytes: less what backward has freed by then. All that it computes again is there.
        being_written: the elements of a gradient of parameters that is being written.
        written: the elements of those that backward has written before.
    """

    bytes: float
    being_written: float = 0.0
    written: float = 0.0


class BlockBytes(NamedTuple):
    """The activations of one block and micro-batch.

    Attributes:
        kept: from forward to backward.
        again: what backward computes again, in addition.
        backward: the temporaries of backward, at the times at which they may be the most.
        deferred: inputs and gradients of linear layers, between the two halves of a backward.
        unit: its parameters.
        linear: the elements of its linear layers.
        last: those of its last parameter.
    """

    kept: float
    again: float
    backward: tuple[Temporaries, ...]
    deferred: float
    unit: Unit
    linear: float
    last: float

    def extra(self, narrow: float, written: float) -> float:
        """Return the most temporaries of backward, in bytes.

        Args:
            narrow: bytes of an element of a gradient that a product writes.
            written: bytes of one that is written already, until the block's backward ends; 0: it is
                added to a sum at once.
        """
        return max(
            moment.bytes + narrow * moment.being_written + written * moment.written
            for moment in self.backward
        )


class HeadBytes(NamedTuple):
    """The head and the loss of one micro-batch.

    Attributes:
        kept: activations from forward to backward, without logits.
        loss: logits and their copies, at the most.
        gradient: the gradient of the logits, when the products of backward run.
        saved: what of ``loss`` stays from forward to backward.
        input_gradient: the gradient of the head's input.
        waiting: what of ``loss`` and of ``gradient`` belongs to the losses before the last one, and
            waits for the backward of the depths of multi-token prediction.
    """

    kept: float
    loss: float
    gradient: float
    saved: float
    input_gradient: float
    waiting: float


class Stream(NamedTuple):
    """The residual stream of a micro-batch on one rank.

    Attributes:
        whole: of all tokens of a tp group.
        own: this rank's part; under sequence parallelism it is a shard.
        inner: the input of products, which is gathered under sequence parallelism, and kept.
    """

    whole: float
    own: float
    inner: float


def stream_of(setup: Setup) -> Stream:
    """Return the bytes of the residual stream."""
    layout = setup.layout
    whole = setup.tokens * setup.sizes.dim * setup.precision.gathered
    if layout.tp > 1 and layout.sequence_parallel:
        return Stream(whole, whole / layout.tp, whole)
    return Stream(whole, whole, whole)


def unit_of(setup: Setup, dense: float, experts: float, share: Share) -> Unit:
    """Return the unit of parameters that a tp rank holds: ``dense`` ones, and those of experts.

    ``share`` says how many of both train.
    """
    layout = setup.layout
    trained, trained_experts = share.dense * dense, share.experts * experts
    if layout.zero == 0:
        whole = trained + trained_experts
        return Unit(dense + experts, dense + experts, 0.0, whole, whole, 0.0)
    ranks = layout.dp_shard * layout.cp
    expert_ranks = max(1, ranks * layout.tp // layout.ep)
    ahead = (dense if ranks > 1 else 0.0) + (experts if expert_ranks > 1 else 0.0)
    return Unit(
        dense + experts,
        dense / ranks + experts / expert_ranks,
        ahead,
        trained + trained_experts,
        trained / ranks + trained_experts / expert_ranks,
        experts if expert_ranks > 1 else 0.0,
    )


class _Sizes(NamedTuple):
    """Parts of a block; ``kv`` is that of the keys, and of the values. In bytes, but for the last.

    Attributes:
        width: one of the four tensors of the feed-forward layer's width.
        rows: the tokens that go to experts; 0 without experts.
        expert_width: a tensor of the experts' width.
        routed: the router's input, which it reads in float32, if nothing else keeps that; 0 without
            experts.
        ffn_input: the input of the feed-forward layer. Only its rows stay for experts.
        ffn_matrix: the elements of one weight of the feed-forward layer.
        experts: the elements of all experts' weights.
        output_matrix: the elements of attention's last projection.
    """

    query: float
    kv: float
    width: float
    rows: float
    expert_width: float
    routed: float
    ffn_input: float
    ffn_matrix: float
    experts: float
    output_matrix: float


class _LatentBytes(NamedTuple):
    """What latent attention keeps besides queries, keys, values and the output, in bytes.

    Attributes:
        stream: the inputs of projections from the stream.
        down: the outputs of the down-projections, of this rank's tokens.
        inputs: the latents, as the up-projections read them.
        up: the keys and values before the rotated part and the padding join them.
        out: the output of attention without padding, if that is a copy.
    """

    stream: float
    down: float
    inputs: float
    up: float
    out: float


def _latent_bytes(setup: Setup, latents: Latents) -> _LatentBytes:
    sizes, layout = setup.sizes, setup.layout
    stream = stream_of(setup)
    whole = setup.tokens * setup.precision.gathered
    cuts_tokens = layout.tp > 1 and layout.sequence_parallel
    own = whole / layout.tp if cuts_tokens else whole
    of_queries = 0.0
    if latents.query == 0:  # they come from the gathered stream
        of_queries = stream.inner if cuts_tokens else 0.0
    heads = whole * sizes.heads / layout.tp
    return _LatentBytes(
        stream=stream.own + of_queries,
        down=own * latents.down,
        inputs=whole * latents.down,
        up=heads * (latents.plain + latents.value),
        out=heads * latents.value if latents.value < sizes.head_width else 0.0,
    )


def block_bytes(
    setup: Setup,
    *,
    has_experts: bool,
    splits_backward: bool,
    share: Share,
    predicts: bool = False,
) -> BlockBytes:
    """Return the bytes of a block.

    Without checkpointing, a block keeps the inputs of its norms, those of its first products (as
    they are gathered), queries, keys and values after the rotation, the output of attention, and
    four tensors of the feed-forward layer's width.

    Args:
        setup: what runs.
        has_experts: whether the feed-forward layer has experts.
        splits_backward: whether the gradients of weights are computed later.
        share: how many of its parameters train. Its activations are those of training all.
        predicts: whether it is a depth of multi-token prediction.
    """
    sizes, layout = setup.sizes, setup.layout
    tp, e, local = layout.tp, setup.precision.gathered, setup.tokens / layout.tp
    stream = stream_of(setup)
    cuts_kv = sizes.kv_heads % tp == 0
    attention = 2.0 * sizes.dim * (sizes.query_width / tp + sizes.kv_width / (tp if cuts_kv else 1))
    latent = None
    if sizes.latents is not None:
        attention = sizes.attention_on_rank(tp)
        latent = _latent_bytes(setup, sizes.latents)
    ffn = (sizes.shared_parameters if has_experts else sizes.dense_parameters) / tp
    experts = sizes.expert_parameters / layout.ep if has_experts else 0.0
    output_width = sizes.query_width
    if sizes.latents is not None:
        output_width = sizes.heads * sizes.latents.value
    merge = sizes.merge_parameters if predicts else 0.0
    linear = attention + ffn + merge
    rows = local * sizes.experts_per_token * e if has_experts else 0.0
    reads_input = not has_experts or sizes.shared_width > 0
    copies_routed = has_experts and (e < _WIDE or tp > 1 or not reads_input)
    part = _Sizes(
        query=local * sizes.query_width * e,
        kv=setup.tokens * (sizes.kv_width / tp if cuts_kv else sizes.head_width) * e,
        width=local * (sizes.shared_width if has_experts else sizes.ffn) * e,
        rows=rows * sizes.dim,
        expert_width=rows * sizes.expert_width,
        routed=stream.own * max(1.0, _WIDE / e) if copies_routed else 0.0,
        ffn_input=stream.inner if reads_input else 0.0,
        ffn_matrix=ffn / sizes.ffn_matrices,
        experts=experts,
        output_matrix=sizes.dim * output_width / tp,
    )
    is_ulysses = layout.cp > 1 and layout.cp_method == "ulysses"
    # What an exchange over cp returns: queries, keys and values; and the output.
    exchanged_qkv = part.query + 2 * part.kv if is_ulysses else 0.0
    exchanged_out = part.query if is_ulysses else 0.0
    attended = part.query + _WIDE * local * sizes.heads  # the output, and a number for each row

    attention_input = stream.inner if latent is None else latent.stream
    of_norm = _kept_by_a_norm(setup)
    full = sizes.norms * stream.own * of_norm + attention_input + part.ffn_input
    # Where latents are sent, attention keeps them in place of keys and values.
    kept_kv = 0.0 if layout.sends_latents else 2 * part.kv
    full += part.query + kept_kv + attended + exchanged_out
    if latent is not None:
        full += latent.down + latent.inputs + latent.out
    full += 4 * part.width + _kept_by_experts(setup, part)
    if sizes.norms_over_heads and tp > 1:
        # ``tensor.forwards.norm_forward`` is no single kernel, on any device.
        full += (part.query + part.kv) * (1 + _copies_of_a_norm(e))
    elif sizes.norms_heads or sizes.norms_over_heads:
        full += (part.query + part.kv) * of_norm
    weighed = stream.inner if has_experts and sizes.shared_gate else 0.0
    if weighed:
        # What a gate weighs; and its input, which the shared expert reads as it is gathered.
        full += stream.own if tp == 1 else 2 * stream.own
    # A depth of multi-token prediction has two streams as inputs, which its norms keep, and keeps
    # what they return as one tensor. Then its block begins, as others do.
    merged = 2 * stream.own
    if predicts:
        full += 2 * stream.own * of_norm + merged

    match setup.recompute:
        case "none":
            kept, again = full, 0.0
        case "full":
            kept = 2 * stream.own if predicts else stream.own
            again = full - kept
        # The outputs of products, of attention and of exchanges. That of the second feed-forward
        # matrix is only added to the stream, if neither a gate nor a norm reads it.
        case _:
            attention_output = stream.inner
            from_exchanges = exchanged_qkv + exchanged_out
            rows_exchanged = 2 * part.rows if layout.ep > 1 else 0.0
            kept = stream.own + part.query + 2 * part.width + attended
            kept += 2 * part.kv if latent is None else latent.down
            kept += 0.0 if latent is None or layout.sends_latents else latent.up
            kept += attention_output + weighed + from_exchanges + rows_exchanged
            kept += stream.inner if sizes.norms_after else 0.0
            kept += 2 * part.expert_width + part.rows
            kept += 2 * stream.own if predicts else 0.0
            # Values, if they are no copies, and the gate's halves are not computed again, and the
            # output of attention's product is dropped when it has been added.
            again = full - stream.own - attended - 2 * part.width - rows_exchanged
            # Queries and keys are dropped when they have been rotated.
            again -= part.query + 2 * part.kv if latent is None else latent.down
            again -= attention_output + exchanged_out + 2 * part.expert_width + part.rows
    return BlockBytes(
        kept=kept,
        again=again,
        backward=_backward_temporaries(setup, part, splits_backward),
        deferred=2 * stream.inner
        + 2 * part.ffn_input
        + 2 * part.query
        + kept_kv
        + 3 * part.width
        + (merged + stream.own if predicts else 0.0),
        unit=unit_of(setup, linear, experts, share),
        linear=linear,
        last=part.experts / sizes.ffn_matrices if part.width == 0 else part.ffn_matrix,
    )


def _kept_by_experts(setup: Setup, part: _Sizes) -> float:
    """Return what a router and experts keep for backward, in bytes.

    Besides tensors of their width, they keep the rows that they read, and their outputs in the
    order of the tokens.
    """
    widths = 3 if setup.sizes.clamps_gates else 4
    return widths * part.expert_width + 2 * part.rows + part.routed


def _kept_by_a_norm(setup: Setup) -> float:
    """Return what a norm keeps for backward, as a multiple of its input."""
    e = setup.precision.gathered
    if not setup.software.fuses_norms:
        return 1 + _copies_of_a_norm(e)
    return max(1.0, _WIDE / e) if setup.sizes.wide_norms else 1.0


def _copies_of_a_norm(e: float) -> float:
    """Return what a norm of several kernels keeps in addition, as multiples of its input.

    It keeps its input in float32, and the same divided by its root mean square.
    """
    return 2 * _WIDE / e - 1


def _backward_temporaries(
    setup: Setup, part: _Sizes, splits_backward: bool
) -> tuple[Temporaries, ...]:
    """Return the temporaries of a block's backward, less what it has freed by then.

    They are those of the feed-forward layer, in the product of its second matrix, in the activation
    and in the products of the first matrices; those of experts; and those of attention.
    """
    stream, sizes = stream_of(setup), setup.sizes
    row_input = stream.inner if setup.layout.tp > 1 else 0.0
    # Between the halves of a backward, the inputs and the gradients of products stay.
    freed_by_ffn = (1 if splits_backward else 4) * part.width
    # The norm before the feed-forward layer, and those behind it and behind attention.
    norms = sizes.norms // 2 + sizes.norms_after
    freed = freed_by_ffn + _kept_by_experts(setup, part)
    freed += norms * stream.own * _kept_by_a_norm(setup)
    freed += 0.0 if splits_backward else part.ffn_input
    attention = _attention_extra(setup, part.query, part.kv) - freed
    of_experts = _backward_of_experts(setup, part, freed_by_ffn)
    if splits_backward:  # gradients of outputs stay, and only experts' weights have one yet
        return (
            Temporaries(stream.own + row_input + 3 * part.width),
            *of_experts,
            Temporaries(attention, written=part.experts),
        )
    matrix = part.ffn_matrix
    written = sizes.ffn_matrices * matrix + part.experts + part.output_matrix
    return (
        Temporaries(stream.own + row_input + part.width, being_written=matrix),
        Temporaries(stream.own + 2 * part.width, written=matrix),
        # Autograd comes to the up projection first, then to the gate.
        Temporaries(stream.own + stream.inner - part.width, being_written=matrix, written=matrix),
        Temporaries(
            stream.own + 2 * stream.inner - 3 * part.width, being_written=matrix, written=2 * matrix
        ),
        *of_experts,
        Temporaries(attention, written=written),
    )


def _backward_of_experts(
    setup: Setup, part: _Sizes, freed_by_shared: float
) -> tuple[Temporaries, ...]:
    """Return the temporaries of experts: in the sum of outputs, in their products, in their gate.

    With recomputation also those at its end. The backward of a shared expert has run, and its
    ``freed_by_shared`` bytes are gone.
    """
    if part.rows == 0:
        return ()
    stream, e = stream_of(setup), setup.precision.gathered
    others = stream.own - freed_by_shared
    others += stream.inner if setup.sizes.shared_width else 0.0  # the gradient of its input
    # The sum's gradient in float32, if it is another tensor, and its product with some outputs.
    wide = 2 * _WIDE / e if e < _WIDE else 1.0
    in_sum = Temporaries(others + part.rows + wide * stream.own)
    moments = (in_sum, *_gate_and_products(setup, part, others))
    if setup.recompute != "none":
        # All that is computed again up to the outputs: the rows that leave, and what is sent back
        # in the order of ranks. The shared expert's tensors are still to come.
        at_end = (3 if setup.layout.ep > 1 else 1) * part.rows
        at_end -= (4 if setup.recompute == "full" else 2) * part.width
        moments = (Temporaries(stream.own + at_end), *moments)
    return moments


def _gate_and_products(setup: Setup, part: _Sizes, others: float) -> tuple[Temporaries, ...]:
    """Return the temporaries of experts' products and of their gate, besides ``others``."""
    sizes, width, rows = setup.sizes, part.expert_width, part.rows
    second = part.experts / sizes.ffn_matrices
    in_product = Temporaries(others + width, being_written=second)
    if sizes.clamps_gates:
        # Gate and up projection and the two slopes, computed again, two products of them, which of
        # the values are clamped, and the gradients of all.
        in_gate = (8 + 1 / setup.precision.gathered) * width
        return (
            in_product,
            Temporaries(others + in_gate - rows, written=second),
            Temporaries(others - width, being_written=2 * second, written=second),
        )
    return (
        in_product,
        Temporaries(others + 2 * width - rows, written=second),
        Temporaries(others - width, being_written=second, written=second),
        Temporaries(others - 3 * width + rows, being_written=second, written=2 * second),
    )


def _attention_extra(setup: Setup, query: float, kv: float) -> float:
    """Return the temporaries of attention's backward (``parallel.context.ring``)."""
    layout, e = setup.layout, setup.precision.gathered
    grads = stream_of(setup).own + 2 * query + 2 * kv
    if layout.cp == 1 or layout.cp_method == "ulysses":
        return grads
    wide = _WIDE / e if e < _WIDE else 1.0
    if layout.sends_latents:
        # The keys and values of a round, their wide gradients, and those of a block.
        held = 2 * kv * (layout.cp if layout.cp_method == "allgather" else 1)
        return stream_of(setup).own + (2 + wide) * query + (2 + wide) * held
    if layout.cp_method == "ring":  # the block that is computed, and the two that travel
        return grads + wide * query + (3 + 3 * wide) * 2 * kv
    # Own keys and values, and all of them. Their gradients are copied to the order of the ranks, if
    # that is another one, and cut into parts; or there are the parts, and the sum of the own one.
    copies = 3 * layout.cp if layout.cp_balanced else 2 * layout.cp + 1
    grads = stream_of(setup).own + (1 + wide) * query
    return grads + (1 + layout.cp + copies * wide) * 2 * kv


def head_bytes(setup: Setup) -> HeadBytes:
    """Return the bytes of the last norm, the head and the loss.

    With several chunks, ``loss`` and ``gradient`` also hold the gradient of the head's weight,
    summed in float32, and ``loss`` that of the head's input. With multi-token prediction, the head
    runs again for each depth, and what it saves of the losses before stays.
    """
    sizes, layout, e = setup.sizes, setup.layout, setup.precision.gathered
    stream = stream_of(setup)
    is_cut = layout.tp > 1 and layout.loss_parallel
    logits = setup.tokens / setup.loss_chunks * sizes.vocab / (layout.tp if is_cut else 1)
    if is_cut:  # the logits; a copy in float32, if they are narrower; and their softmax
        loss = (2 * _WIDE + (e if e < _WIDE else 0.0)) * logits
        saved, gradient = e * logits, _WIDE * logits
    else:
        loss = _LOSS_COPIES * logits
        saved, gradient = _WIDE * logits, e * logits
        if layout.tp > 1:
            gradient += e * logits / layout.tp
    depths = sizes.mtp_layers
    kept = (1 + depths) * (stream.own * _kept_by_a_norm(setup) + stream.inner)
    input_gradient, waiting = stream.inner, depths * saved
    if setup.loss_chunks > 1:
        summed = _WIDE * sizes.head_parameters / layout.tp
        loss, gradient, saved = loss + summed + stream.inner, gradient + summed, 0.0
        input_gradient = 2 * stream.inner
        # Forward has computed the gradients of the losses before, unless backward does.
        waiting = 0.0 if setup.repeats_loss else depths * (summed + stream.inner)
    return HeadBytes(
        kept=kept,
        loss=waiting + loss,
        gradient=waiting + gradient,
        saved=(1 + depths) * saved,
        input_gradient=input_gradient,
        waiting=waiting,
    )
