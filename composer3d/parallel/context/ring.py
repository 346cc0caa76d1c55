"""Attention over a ring of ranks, as one custom operator of torch.

In each round, this rank has the keys and values ("key-values") of one rank. With "allgather" there
is one round, with those of all ranks. A round attends to the visible tiles (``tiles``), and merges
the result with that of earlier rounds. Where a kernel of variable length can be used, documents and
windows take a few calls for all tiles of a round (``packed`` says how many).

Shapes: T is the length of the whole sequence, and n = T / size that of a rank's part. Queries are
(B, H, n, D), keys and values (B, K, n, D), stacked (2, B, K, n, D). "wide" is float32, or float64
for float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.parallel.context import kernels
from composer3d.parallel.context.messages import (
    KeysAndValues,
    Messages,
    copied_in_memory_BTHD,
    in_memory_BTHD,
    messages_of,
)
from composer3d.parallel.context.ownership import (
    gather_parts,
    join_parts,
    owned_ranges,
    parts_of_all_ranks,
)
from composer3d.parallel.context.packed import CallPlan, KernelCall, plan_calls
from composer3d.parallel.context.segment_kernel import VARIABLE_LENGTH
from composer3d.parallel.context.tiles import Tile, starts_of, tiles
from composer3d.runtime.torch_private import fake_mode_of, group_by_name


class _Computer(Protocol):
    """Computes one block of a round: a tile, or a call that covers several tiles."""

    def attend(self, block: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, T, D) and the logsumexp (B, H, T) of the block."""

    def differentiate(
        self,
        block: Any,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the block adds to the gradients of q, k and v."""


class _ByTiles:
    """Computes tiles, one kernel call each."""

    @staticmethod
    def attend(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.attend_block(q, k, v, causal=tile.causal, mask=tile.mask)

    @staticmethod
    def differentiate(
        tile: Tile, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, mask = tile.causal, tile.mask
        return kernels.attend_block_backward(grad, q, k, v, out, lse, causal=causal, mask=mask)


class _Round(NamedTuple):
    """The key-values that this rank has in one round, and what to compute with them.

    Attributes:
        source: the rank that owns the key-values. None: they are those of the whole sequence, in
            its order, and there are no other rounds.
        message: what was sent of them (``messages``), or ``kv`` itself.
        kv: keys and values: two tensors, or one that has both.
        blocks: the tiles, or the calls that cover them.
        computer: computes one of these blocks.
    """

    source: int | None
    message: Tensor | tuple[Tensor, Tensor]
    kv: Tensor | tuple[Tensor, Tensor]
    blocks: tuple[Tile, ...] | tuple[KernelCall, ...]
    computer: _Computer

    @property
    def is_one_block(self) -> bool:
        """Whether one block has all queries of this rank, and all keys that they see."""
        return self.source is None and len(self.blocks) == 1

    def attend(self, block: Tile | KernelCall, q: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``(out, lse)`` of a block."""
        k, v = self._keys_and_values(block)
        return self.computer.attend(block, q[block.rows, :, block.queries], k, v)

    def differentiate(
        self, block: Tile | KernelCall, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the contributions of a block to dq, dk and dv."""
        grad, q, out, lse = (x[block.rows, :, block.queries] for x in (grad, q, out, lse))
        k, v = self._keys_and_values(block)
        return self.computer.differentiate(block, grad, q, k, v, out, lse)

    def _keys_and_values(self, block: Tile | KernelCall) -> tuple[Tensor, Tensor]:
        """Cut out the keys and the values of a block."""
        return self.kv[0][block.rows, :, block.keys], self.kv[1][block.rows, :, block.keys]


@torch.library.custom_op("composer3d::ring_attention", mutates_args=())
def attend_in_rounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of this rank's queries to all keys of the sequence.

    Args:
        q, k, v: this rank's parts. The last dim of q is contiguous. In place of k and v, latents
            and their weight (``messages.LatentMessages``), with a group and without a window.
        sinks_H: a score of each query head that has no value, or None.
        documents: integers (B, T), of the whole sequence, or None.
        window: as in ``tiles``.
        method: "ring" or "allgather"; not read if this rank holds whole sequences.
        balanced: whether parts are in balanced order.
        group_name: name of a group of at least two ranks; "" if this rank holds whole sequences.

    Returns:
        ``out``, (B, H, n, D) in the dtype of q, and ``lse``, the logsumexp of each query's scores,
        with its sink, (B, H, n) in the wide dtype. Only ``out`` has a gradient.

    Collectives:
        ring: (size - 1) sends of keys and values, or latents, to the next rank. The next ones are
            sent while a block is computed.
        allgather: one all-gather, of as many bytes.
    """
    wide = kernels.wide(q.dtype)
    out: Tensor | None = None
    lse = torch.empty(0)
    messages = messages_of(q, k, v)
    for round_ in _kv_rounds(
        q, messages, documents, window, method, balanced, group_name, own_last=False
    ):
        for block in round_.blocks:
            block_out, block_lse = round_.attend(block, q)
            if out is None and block.all_see and block_out.shape == q.shape:
                out, lse = block_out, block_lse
                continue
            if out is None:
                out = torch.zeros_like(q, dtype=wide)
                lse = q.new_full(q.shape[:3], kernels.least(wide), dtype=wide)
            out = out.to(wide)
            rows, queries = block.rows, block.queries
            if isinstance(block, Tile) and block.causal:
                # Nothing is there to merge with: own keys come in the first round, and ``tiles``
                # puts the causal tile of a query before its others.
                out[rows, :, queries] = block_out
                lse[rows, :, queries] = block_lse
            else:
                _merge(out[rows, :, queries], lse[rows, :, queries], block_out, block_lse)
            # Free this block's output before the next one is allocated.
            del block_out, block_lse
    assert out is not None, "a query sees its own key"
    if sinks_H is not None:
        out, lse = kernels.add_sinks(out, lse, sinks_H)
    return in_memory_BTHD(out, q.dtype), lse.contiguous()


@torch.library.custom_op("composer3d::ring_attention_backward", mutates_args=())
def _attend_in_rounds_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v (or of latents and weight), of their shapes and dtypes.

    ``saved`` is q, k, v, out and lse. With all-gather, messages are gathered again, and one
    reduce-scatter sums their gradients, which are wide. In a ring, messages travel round again. The
    sum of their gradients travels one step behind, and the last send brings it to their owner.
    """
    q, k, v, out, lse = saved
    group = group_by_name(group_name) if group_name else None
    if grad.stride(-1) != 1:
        grad = copied_in_memory_BTHD(grad, q.dtype)
    wide = kernels.wide(q.dtype)
    dq = dmessage = torch.empty(0)
    receive: Callable[[], Tensor] | None = None

    # The round with this rank's own keys comes last. While it computes, the last gradients travel:
    # they are wide, and so a larger message than keys and values.
    messages = messages_of(q, k, v)
    order = documents, window, method, balanced, group_name
    rounds = _kv_rounds(q, messages, *order, own_last=True)
    for number, round_ in enumerate(rounds):
        if round_.is_one_block and group is None:
            # The block's gradients are the whole ones, so there are no wide sums to allocate.
            dq, dk, dv = round_.differentiate(round_.blocks[0], grad, q, out, lse)
            return (
                in_memory_BTHD(dq, q.dtype),
                in_memory_BTHD(dk, k.dtype),
                in_memory_BTHD(dv, v.dtype),
            )
        if number == 0:
            dq = torch.zeros_like(q, dtype=wide)
        dkv = q.new_zeros((2, *round_.kv[0].shape), dtype=wide)  # of keys, and of values
        for block in round_.blocks:
            rows, queries, keys = block.rows, block.queries, block.keys
            block_grads = round_.differentiate(block, grad, q, out, lse)
            _add((dq[rows, :, queries], dkv[0, rows, :, keys], dkv[1, rows, :, keys]), block_grads)
            del block_grads
        dmessage = messages.message_gradient(round_.message, dkv)
        del dkv
        if receive is not None:
            dmessage += receive()
            receive = None
        if group is None:
            continue
        if round_.source is None:
            # ``dmessage`` is for the tokens of all ranks. Each rank gets the sum of its own part.
            parts = parts_of_all_ranks(dmessage, messages.dim, group.size(), balanced)
            dmessage = torch.empty_like(parts[0])
            dist.reduce_scatter_single(dmessage, parts.flatten(0, 1), group=group)
        elif round_.source != group.rank():
            receive = _send_to_next(dmessage, group)
    return in_memory_BTHD(dq, q.dtype), *messages.input_gradients(dmessage)


def _kv_rounds(
    q: Tensor,
    messages: Messages,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
    *,
    own_last: bool,
) -> Iterator[_Round]:
    """Yield the rounds. With all-gather, or whole sequences, there is one, with all key-values.

    In a ring: the key-values of each rank as they arrive, while the next message is received. This
    rank's own come first, or last with ``own_last``.
    """
    group = group_by_name(group_name) if group_name else None
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    rows, tokens = q.shape[0], q.shape[2]
    owned = owned_ranges(rank, size, tokens, balanced=balanced)
    starts = starts_of(documents)
    kernel = kernels.kernel_of(q)
    plan: CallPlan | None = None
    if kernel in VARIABLE_LENGTH and (starts is not None or window > 0):
        plan = plan_calls(rank, size, rows, tokens, starts, window, method, balanced)
    banded = kernel is kernels.Kernel.REFERENCE

    def round_with(source: int | None, message: Tensor | tuple[Tensor, Tensor]) -> _Round:
        kv = messages.key_values(message)
        if plan is not None:
            # ``plan.rounds`` has an entry for each source; with whole sequences, only entry 0.
            return _Round(source, message, kv, plan.rounds[source or 0], plan)
        held = owned_ranges(0, 1, tokens * size, balanced=balanced)
        if source is not None:
            held = owned_ranges(source, size, tokens, balanced=balanced)
        cut = tiles(owned, held, starts, window, q.device, banded, fake_mode_of(q))
        return _Round(source, message, kv, cut, _ByTiles)

    if isinstance(messages, KeysAndValues) and group is None and plan is not None:
        yield round_with(None, (messages.k, messages.v))
        return
    # The kernels of tiles need contiguous keys and values, and messages need both in one tensor.
    own = messages.own()
    if group is None:
        yield round_with(None, own)
        return
    if method == "allgather":
        yield round_with(None, join_parts(gather_parts(own, group), messages.dim, balanced))
        return

    receive = _send_to_next(own, group)
    steps = [*range(1, size), 0] if own_last else range(size)
    for step in steps:
        message = own
        if step > 0:
            message = receive()
        if 0 < step < size - 1:
            receive = _send_to_next(message, group)
        source = (rank - step) % size
        yield round_with(source, message)


def _send_to_next(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Start to send ``message`` to the next rank of the ring, and to receive that of the previous.

    The returned function waits for both and returns the received message. It must be called exactly
    once.
    """
    rank, size = group.rank(), group.size()
    incoming = torch.empty_like(message)
    ops = [
        dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
    ]
    # One batch: if posted separately, two NCCL ranks could each wait in a send for the other.
    pending = [(dist.batch_isend_irecv(ops), incoming)]

    def receive() -> Tensor:
        assert pending, "a message of the ring is received twice"
        works, received = pending.pop()
        for work in works:
            work.wait()
        return received

    return receive


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge one more block of keys into ``out`` and ``lse``, in place. No exponential overflows.

    Before the first block, ``lse`` is ``kernels.least``, so the block's output replaces ``out``.
    """
    # The weight of the block is exp(block_lse) / (exp(lse) + exp(block_lse)).
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, block_lse))


def _add(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part


@attend_in_rounds.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return copied_in_memory_BTHD(q, q.dtype), q.new_empty(q.shape[:3], dtype=kernels.wide(q.dtype))


@_attend_in_rounds_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    q, k, v = saved[:3]
    return copied_in_memory_BTHD(q, q.dtype), *messages_of(q, k, v).empty_gradients()


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks_H, documents, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, sinks_H, documents)
    ctx.mark_non_differentiable(output[1])
    # Autograd would fill zeros for a gradient of ``lse``, which backward ignores.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *saved, sinks_H, documents = ctx.saved_tensors
    *_, out, lse = saved
    if grad is None:
        # Other ranks may have a gradient: this one must send and receive as they do.
        grad = torch.zeros_like(out)
    dq, dk, dv = _attend_in_rounds_backward(grad, saved, documents, *ctx.settings)
    dsinks_H = None if sinks_H is None else kernels.sinks_gradient(grad, out, lse, sinks_H)
    return dq, dk, dv, dsinks_H, None, None, None, None, None


attend_in_rounds.register_autograd(_differentiate, setup_context=_save_for_backward)
