"""Attention over a ring of ranks, as one custom operator of torch.

In each round, this rank has the keys and values ("key-values") of one rank. With "allgather" there
is one round, with those of all ranks. A round attends to the visible tiles (``tiles``), and merges
the result with that of earlier rounds.

Shapes: T is the length of the whole sequence, and n = T / size that of a rank's part. Queries are
(B, H, n, D), keys and values (B, K, n, D), stacked (2, B, K, n, D). "wide" is float32, or float64
for float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.parallel.context import kernels
from composer3d.parallel.context.ownership import (
    gather_parts,
    join_parts,
    owned_ranges,
    parts_of_all_ranks,
)
from composer3d.parallel.context.tiles import Tile, starts_of, tiles
from composer3d.runtime.torch_private import group_by_name


class _Round(NamedTuple):
    """The key-values that this rank has in one round, and the tiles to compute with them.

    ``source`` is the rank that owns the key-values. It is None if they are those of all ranks, in
    the order of the sequence.
    """

    source: int | None
    kv: Tensor
    tiles: tuple[Tile, ...]


@torch.library.custom_op("composer3d::ring_attention", mutates_args=())
def attend_over_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of this rank's queries to all keys of the sequence.

    Args:
        q, k, v: this rank's parts. The last dim of q is contiguous.
        documents: integers (B, T), of the whole sequence, or None.
        window: as in ``tiles``.
        method: "ring" or "allgather".
        balanced: whether parts are in balanced order.
        group_name: name of a group of at least two ranks; "" if this rank holds whole sequences.

    Returns:
        ``out``, (B, H, n, D) in the dtype of q, and ``lse``, the logsumexp of each query's scores,
        (B, H, n) in the wide dtype. Only ``out`` has a gradient.

    Collectives:
        ring: (size - 1) sends of keys and values to the next rank. The next ones are sent while a
            block is computed.
        allgather: one all-gather, of as many bytes.
    """
    wide = kernels.wide(q.dtype)
    out = torch.zeros_like(q, dtype=wide)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    kv = torch.stack((k, v))
    for round_ in _kv_rounds(
        q, kv, documents, window, method, balanced, group_name, own_last=False
    ):
        for tile in round_.tiles:
            rows, queries, keys = tile.rows, tile.queries, tile.keys
            block_out, block_lse = kernels.attend_block(
                q[rows, :, queries],
                round_.kv[0][rows, :, keys],
                round_.kv[1][rows, :, keys],
                causal=tile.causal,
                mask=tile.mask,
            )
            _merge(out[rows, :, queries], lse[rows, :, queries], block_out, block_lse)
            # Free this block's output before the next one is allocated.
            del block_out, block_lse
    return _copy_as_BTHD(out, q.dtype), lse


@torch.library.custom_op("composer3d::ring_attention_backward", mutates_args=())
def _attend_over_ring_backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v. ``saved`` is q, k, v, out and lse.

    Key-values travel round the ring again. The sum of their gradients travels one step behind them,
    and the last send brings it to the rank that owns them.
    """
    q, k, v, out, lse = saved
    group = group_by_name(group_name) if group_name else None
    if grad.stride(-1) != 1:
        grad = _copy_as_BTHD(grad, q.dtype)
    wide = kernels.wide(q.dtype)
    dq = torch.zeros_like(q, dtype=wide)
    kv = torch.stack((k, v))
    receive_dkv: Callable[[], Tensor] | None = None
    dkv = torch.empty(0)

    # This rank's own block comes last: it hides the last send of the gradients, the larger message.
    for round_ in _kv_rounds(q, kv, documents, window, method, balanced, group_name, own_last=True):
        dkv = torch.zeros_like(round_.kv, dtype=wide)
        for tile in round_.tiles:
            rows, queries, keys = tile.rows, tile.queries, tile.keys
            block_grads = kernels.attend_block_backward(
                grad[rows, :, queries],
                q[rows, :, queries],
                round_.kv[0][rows, :, keys],
                round_.kv[1][rows, :, keys],
                out[rows, :, queries],
                lse[rows, :, queries],
                causal=tile.causal,
                mask=tile.mask,
            )
            _add((dq[rows, :, queries], *dkv[:, rows, :, keys]), block_grads)
            del block_grads
        if receive_dkv is not None:
            dkv += receive_dkv()
            receive_dkv = None
        if group is None:
            continue
        if round_.source is None:
            # ``dkv`` is for the key-values of all ranks. Each rank gets the sum of its own part.
            parts = parts_of_all_ranks(dkv, 3, group.size(), balanced)
            dkv = torch.empty_like(parts[0])
            dist.reduce_scatter_single(dkv, parts.flatten(0, 1), group=group)
        elif round_.source != group.rank():
            receive_dkv = _send_to_next(dkv, group)
    return (
        _copy_as_BTHD(dq, q.dtype),
        _copy_as_BTHD(dkv[0], k.dtype),
        _copy_as_BTHD(dkv[1], v.dtype),
    )


def _kv_rounds(
    q: Tensor,
    own_kv: Tensor,
    documents: Tensor | None,
    window: int,
    method: str,
    balanced: bool,
    group_name: str,
    *,
    own_last: bool,
) -> Iterator[_Round]:
    """Yield the key-values of each rank as they arrive. The next ones are received meanwhile.

    This rank's own key-values come first, or last with ``own_last``.
    """
    group = group_by_name(group_name) if group_name else None
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    tokens = q.shape[2]
    owned = owned_ranges(rank, size, tokens, balanced=balanced)
    starts = starts_of(documents)
    banded = kernels.kernel_of(q) is kernels.Kernel.REFERENCE

    if method == "allgather" and group is not None:
        kv = join_parts(gather_parts(own_kv, group), 3, balanced)
        all_tokens = owned_ranges(0, 1, tokens * size, balanced=balanced)
        yield _Round(None, kv, tiles(owned, all_tokens, starts, window, q.device, banded))
        return

    receive = None if group is None else _send_to_next(own_kv, group)
    steps = [*range(1, size), 0] if own_last else range(size)
    for step in steps:
        kv = own_kv
        if step > 0 and receive is not None:
            kv = receive()
        if group is not None and 0 < step < size - 1:
            receive = _send_to_next(kv, group)
        source = (rank - step) % size
        source_owned = owned_ranges(source, size, tokens, balanced=balanced)
        yield _Round(source, kv, tiles(owned, source_owned, starts, window, q.device, banded))


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

    Before the first block, ``lse`` is minus infinity, so the block's output replaces ``out``. Every
    query must see a key in its first block: the difference of two infinities would be NaN.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, block_lse))


def _add(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part


def _copy_as_BTHD(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy x_BHTD into memory in the order B, T, H, D, so that projections need no further copy."""
    x_BTHD = x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x_BTHD.transpose(1, 2)


@attend_over_ring.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _copy_as_BTHD(q, q.dtype), q.new_empty(q.shape[:3], dtype=kernels.wide(q.dtype))


@_attend_over_ring_backward.register_fake
def _(grad: Tensor, saved: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(_copy_as_BTHD(x, x.dtype) for x in saved[:3])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    dq, dk, dv = _attend_over_ring_backward(grad, saved, documents, *ctx.settings)
    return dq, dk, dv, None, None, None, None, None


attend_over_ring.register_autograd(_differentiate, setup_context=_save_for_backward)
