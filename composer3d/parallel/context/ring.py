"""Attention over a ring of ranks, as custom operators of torch.

In each round, this rank has the keys and values ("key-values") of one rank. With "allgather" there
is one round, with those of all ranks. A round attends to the visible tiles (``tiles``), and merges
the result with that of earlier rounds. Where a kernel of variable length can be used, documents and
windows take a call or two for all tiles (``packed``).

Ranks send their key-values (``attend_in_rounds``), or latents from which each rank makes them
(``attend_to_latents``). The rounds are the same.

Shapes: T is the length of the whole sequence, and n = T / size that of a rank's part. Queries are
(B, H, n, D), keys and values (B, K, n, D), stacked (2, B, K, n, D). Latents are (B, n, R). "wide"
is float32, or float64 for float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from composer3d.parallel.context import kernels
from composer3d.parallel.context.ownership import (
    gather_parts,
    join_parts,
    owned_ranges,
    parts_of_all_ranks,
)
from composer3d.parallel.context.packed import CallPlan, KernelCall, plan_calls
from composer3d.parallel.context.segment_kernel import VARIABLE_LENGTH
from composer3d.parallel.context.tiles import NO_WINDOW, Tile, starts_of, tiles
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


class _Sent(Protocol):
    """What ranks send each other, so that each has the key-values of all.

    Attributes:
        dim: the dim of a message along which its tokens lie.
    """

    dim: int

    def message(self) -> Tensor:
        """Return this rank's own message, contiguous."""

    def key_values(self, message: Any) -> Any:
        """Return the key-values of a message: stacked and contiguous, if it was sent."""

    def gradient(self, message: Tensor, dkv: Tensor) -> Tensor:
        """Return the wide gradient of a message, of the wide one of its key-values."""


class _KeysAndValues(NamedTuple):
    """Keys and values are sent as they are: the message is both, stacked."""

    k: Tensor
    v: Tensor
    dim = 3

    def message(self) -> Tensor:
        return torch.stack((self.k, self.v))

    def key_values(self, message: Any) -> Any:
        return message

    def gradient(self, message: Tensor, dkv: Tensor) -> Tensor:
        return dkv


class _Latents:
    """Latents are sent, and projected up to key-values where they arrive.

    A latent is followed by the rotated part of the key, which all heads share.

    Args:
        latents: this rank's, (B, n, R).
        weight: the projection of a latent to the rest of the key, and to the value, of each head
            of this rank.
        heads: the number of these heads.
        width: the width D of a key. Values are padded with zeros to it.

    Attributes:
        dweight: the wide gradient of ``weight``: the sum of what ``gradient`` has seen so far.
    """

    dim = 1

    def __init__(self, latents: Tensor, weight: Tensor, heads: int, width: int) -> None:
        self.latents, self.weight, self.heads, self.width = latents, weight, heads, width
        self.widths = (weight.shape[1], latents.shape[-1] - weight.shape[1])
        self.plain = width - self.widths[1]
        self.value = weight.shape[0] // heads - self.plain
        self.dweight = torch.empty(0)

    def message(self) -> Tensor:
        return self.latents.contiguous()

    def key_values(self, message: Tensor) -> Tensor:
        latent_BSR, rotated_BSR = message.split(self.widths, -1)
        up_BHSD = F.linear(latent_BSR, self.weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = message.new_empty((2, *up_BHSD.shape[:3], self.width))
        kv[0, ..., : self.plain] = up_BHSD[..., : self.plain]
        kv[0, ..., self.plain :] = rotated_BSR[:, None]
        kv[1, ..., : self.value] = up_BHSD[..., self.plain :]
        kv[1, ..., self.value :] = 0
        return kv

    def gradient(self, message: Tensor, dkv: Tensor) -> Tensor:
        latent_BSR, _ = message.split(self.widths, -1)
        dk_BSHD, dv_BSHD = dkv.transpose(2, 3)
        drotated_BSR = dk_BSHD[..., self.plain :].sum(2)
        dup_BSHW = message.new_empty((*dk_BSHD.shape[:3], self.plain + self.value))
        dup_BSHW[..., : self.plain] = dk_BSHD[..., : self.plain]
        dup_BSHW[..., self.plain :] = dv_BSHD[..., : self.value]
        dup_BSU = dup_BSHW.flatten(2)
        dweight = (dup_BSU.flatten(0, 1).T @ latent_BSR.flatten(0, 1)).to(dkv.dtype)
        self.dweight = dweight if self.dweight.numel() == 0 else self.dweight + dweight
        return torch.cat(((dup_BSU @ self.weight).to(dkv.dtype), drotated_BSR), -1)


class _Round(NamedTuple):
    """The key-values that this rank has in one round, and what to compute with them.

    Attributes:
        source: the rank that owns the key-values. None: they are those of the whole sequence, in
            its order, and there are no other rounds.
        message: what was sent of them; on a single rank, perhaps the tuple of both.
        kv: keys and values: two tensors, or one that has both.
        blocks: the tiles, or the calls that cover them.
        computer: computes one of these blocks.
    """

    source: int | None
    message: Any
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
        q, k, v: this rank's parts. The last dim of q is contiguous.
        sinks_H: a score of each query head that has no value, or None.
        documents: integers (B, T), of the whole sequence, or None.
        window: as in ``tiles``.
        method: "ring" or "allgather".
        balanced: whether parts are in balanced order.
        group_name: name of a group of at least two ranks; "" if this rank holds whole sequences.

    Returns:
        ``out``, (B, H, n, D) in the dtype of q, and ``lse``, the logsumexp of each query's scores,
        with its sink, (B, H, n) in the wide dtype. Only ``out`` has a gradient.

    Collectives:
        ring: (size - 1) sends of keys and values to the next rank. The next ones are sent while a
            block is computed.
        allgather: one all-gather, of as many bytes.
    """
    sent = _KeysAndValues(k, v)
    return _attend(q, sent, sinks_H, documents, window, method, balanced, group_name)


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
    """Compute the gradients of q, k and v. ``saved`` is q, k, v, out and lse."""
    q, k, v, out, lse = saved
    rest = (documents, window, method, balanced, group_name)
    dq, dkv = _differentiate_rounds(grad, q, _KeysAndValues(k, v), out, lse, *rest)
    dk, dv = dkv
    if isinstance(dkv, Tensor):
        # Copies even if they are in order: outputs of an operator must not share memory.
        return dq, _copied_in_memory_BTHD(dk, k.dtype), _copied_in_memory_BTHD(dv, v.dtype)
    return dq, _in_memory_BTHD(dk, k.dtype), _in_memory_BTHD(dv, v.dtype)


@torch.library.custom_op("composer3d::latent_ring_attention", mutates_args=())
def attend_to_latents(
    q: Tensor,
    latents: Tensor,
    weight: Tensor,
    documents: Tensor | None,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Compute the same from latents: causal attention, without a window.

    No key-values are kept for backward, and backward projects the latents up once more.

    Args:
        q: this rank's part. The last dim is contiguous.
        latents: this rank's part, (B, n, R): latents, and after each the rotated part of its key.
        weight: the projection of a latent, (H (D - rotated + V), latent): for each head, the rest
            of the key, and the value of width V, at most D.
        documents, method, balanced, group_name: as in ``attend_in_rounds``.

    Returns:
        ``out`` and ``lse`` as ``attend_in_rounds`` does. Of ``out``, the numbers beyond V are 0.

    Collectives: those of ``attend_in_rounds``, with latents in place of keys and values. The
        gradient of ``weight`` is this rank's part of a sum over the group.
    """
    sent = _Latents(latents, weight, q.shape[1], q.shape[3])
    return _attend(q, sent, None, documents, NO_WINDOW, method, balanced, group_name)


@torch.library.custom_op("composer3d::latent_ring_attention_backward", mutates_args=())
def _attend_to_latents_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    documents: Tensor | None,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, latents and weight, which ``saved`` has with out and lse."""
    q, latents, weight, out, lse = saved
    sent = _Latents(latents, weight, q.shape[1], q.shape[3])
    rest = (documents, NO_WINDOW, method, balanced, group_name)
    dq, dlatents = _differentiate_rounds(grad, q, sent, out, lse, *rest)
    assert isinstance(dlatents, Tensor)
    return dq, dlatents.to(latents.dtype), sent.dweight.to(weight.dtype)


def _attend(
    q: Tensor,
    sent: _Sent,
    sinks_H: Tensor | None,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Compute what ``attend_in_rounds`` returns, of key-values that are sent in any form."""
    wide = kernels.wide(q.dtype)
    out: Tensor | None = None
    lse = torch.empty(0)
    for round_ in _kv_rounds(
        q, sent, documents, window, method, balanced, group_name, own_last=False
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
    return _in_memory_BTHD(out, q.dtype), lse.contiguous()


def _differentiate_rounds(
    grad: Tensor,
    q: Tensor,
    sent: _Sent,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """Compute the gradients of q, in its dtype, and of this rank's message.

    The latter is wide, or, if the message of a single rank is its keys and values, two gradients.

    Messages travel round the ring again. The sum of their gradients travels one step behind them,
    and the last send brings it to the rank that owns them.
    """
    group = group_by_name(group_name) if group_name else None
    if grad.stride(-1) != 1:
        grad = _copied_in_memory_BTHD(grad, q.dtype)
    wide = kernels.wide(q.dtype)
    dq = dsent = torch.empty(0)
    receive_dsent: Callable[[], Tensor] | None = None

    # The round with this rank's own keys comes last. While it computes, the last gradients travel:
    # they are wide, and so a larger message than keys and values.
    rounds = _kv_rounds(q, sent, documents, window, method, balanced, group_name, own_last=True)
    for number, round_ in enumerate(rounds):
        if round_.is_one_block and group is None:
            # The block's gradients are the whole ones, so there are no wide sums to allocate.
            dq, dk, dv = round_.differentiate(round_.blocks[0], grad, q, out, lse)
            return _in_memory_BTHD(dq, q.dtype), (dk, dv)
        if number == 0:
            dq = torch.zeros_like(q, dtype=wide)
        dkv = q.new_zeros((2, *round_.kv[0].shape), dtype=wide)
        for block in round_.blocks:
            rows, queries, keys = block.rows, block.queries, block.keys
            block_grads = round_.differentiate(block, grad, q, out, lse)
            _add((dq[rows, :, queries], *dkv[:, rows, :, keys]), block_grads)
            del block_grads
        dsent = sent.gradient(round_.message, dkv)
        del dkv
        if receive_dsent is not None:
            dsent += receive_dsent()
            receive_dsent = None
        if group is None:
            continue
        if round_.source is None:
            # ``dsent`` is for the tokens of all ranks. Each rank gets the sum of its own part.
            parts = parts_of_all_ranks(dsent, sent.dim, group.size(), balanced)
            dsent = torch.empty_like(parts[0])
            dist.reduce_scatter_single(dsent, parts.flatten(0, 1), group=group)
        elif round_.source != group.rank():
            receive_dsent = _send_to_next(dsent, group)
    return _in_memory_BTHD(dq, q.dtype), dsent


def _kv_rounds(
    q: Tensor,
    sent: _Sent,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
    *,
    own_last: bool,
) -> Iterator[_Round]:
    """Yield the key-values of each rank as they arrive. The next message is received meanwhile.

    This rank's own key-values come first, or last with ``own_last``.
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

    def round_with(source: int | None, message: Any) -> _Round:
        kv = sent.key_values(message)
        if plan is not None:
            # By rank; a round with the whole sequence is the only one.
            return _Round(source, message, kv, plan.rounds[source or 0], plan)
        held = owned_ranges(0, 1, tokens * size, balanced=balanced)
        if source is not None:
            held = owned_ranges(source, size, tokens, balanced=balanced)
        cut = tiles(owned, held, starts, window, q.device, banded, fake_mode_of(q))
        return _Round(source, message, kv, cut, _ByTiles)

    if group is None:
        # Only keys and values come here without a group. Calls take both as they are. The kernels
        # of tiles need them contiguous.
        yield round_with(None, sent.message() if plan is None else sent)
        return
    own = sent.message()
    if method == "allgather":
        yield round_with(None, join_parts(gather_parts(own, group), sent.dim, balanced))
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


def _copied_in_memory_BTHD(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``x`` (B, H, T, D) into memory in the order B, T, H, D; its shape stays as it is.

    So the projection that reads it needs no further copy.
    """
    x_BTHD = x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x_BTHD.transpose(1, 2)


def _in_memory_BTHD(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``_copied_in_memory_BTHD``, but return ``x`` itself if it has that order and dtype."""
    x_BTHD = x.transpose(1, 2)
    if x.dtype == dtype and x_BTHD.is_contiguous():
        return x
    return _copied_in_memory_BTHD(x, dtype)


@attend_in_rounds.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@_attend_in_rounds_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(_copied_in_memory_BTHD(x, x.dtype) for x in saved[:3])


@attend_to_latents.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


@_attend_to_latents_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    q, latents, weight, *_ = saved
    return (
        _copied_in_memory_BTHD(q, q.dtype),
        torch.empty_like(latents, memory_format=torch.contiguous_format),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
    )


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    return _copied_in_memory_BTHD(q, q.dtype), q.new_empty(q.shape[:3], dtype=kernels.wide(q.dtype))


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


def _save_latents_for_backward(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    q, latents, weight, documents, *ctx.settings = inputs
    ctx.save_for_backward(q, latents, weight, *output, documents)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # as in ``_save_for_backward``


def _differentiate_latents(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(saved[3])  # as in ``_differentiate``
    grads = _attend_to_latents_backward(grad, saved, documents, *ctx.settings)
    return *grads, None, None, None, None


attend_to_latents.register_autograd(
    _differentiate_latents, setup_context=_save_latents_for_backward
)
