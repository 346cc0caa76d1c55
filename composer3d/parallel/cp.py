"""Context parallelism: attention of one sequence that lies over several ranks, in one of three ways.

- ring: key-values travel round a ring, the next ones while a block is computed. Liu et al. 2023 (Ring Attention,
  arXiv 2310.01889).
- allgather: every rank gets all key-values at once. Llama 3 (arXiv 2407.21783, section 3.3.2).
- ulysses: queries, keys and values change from a part of the sequence of all heads to the whole sequence of a part of
  the heads, and the output changes back. Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509).

Which parts of a sequence a rank holds, and so the balance of causal work: ``tiles``. What is hidden is
computed within small masks alone, and no mask of a whole block is built.

Shapes: T is the whole sequence and n = T / cp the local one; queries (B, H, n, D), key-values (B, K, n, D), rotated by
their positions in the whole and not yet repeated for grouped queries. Bytes are what one rank sends; Q is what its own
queries take, KV its keys and values, dKV the same in float32 (float64 for float64).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from composer3d.errors import PlanError
from composer3d.models.layers import Attend, Seq, sdpa
from composer3d.parallel import kernels
from composer3d.parallel.plan import Plan
from composer3d.parallel.tiles import Tile, spans, starts_of, tiles
from composer3d.recipe.schema import ParallelTable

METHODS = ("ring", "allgather", "ulysses")


def shard_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup, *, balanced: bool = True, fill: float | None = None
) -> Tensor:
    """This rank's part of ``x``, which all ranks hold whole. No collective.

    Where ``dim`` does not divide, ``fill`` is appended to it: no causal query before that sees it, others do unless
    it is a document of its own. Raises ValueError where there is none.
    """
    chunks = group.size() * (2 if balanced and group.size() > 1 else 1)
    if spare := -x.shape[dim] % chunks:
        if fill is None:
            raise ValueError(f"{x.shape[dim]} tokens do not divide into {chunks} chunks; give what to fill up with")
        x = torch.cat((x, torch.full_like(x.narrow(dim, 0, 1), fill).repeat_interleave(spare, dim)), dim)
    return _part(x, dim, group.rank(), group.size(), balanced)


def unshard_sequence(
    x: Tensor, dim: int, group: dist.ProcessGroup, *, balanced: bool = True, length: int | None = None
) -> Tensor:
    """The whole of which every rank holds a part: undoes ``shard_sequence``; ``length``: without what was appended.

    No gradient. Collectives: one all-gather; (cp-1) times the bytes of ``x``. Raises ValueError where ``x`` is no part.
    """
    if balanced and group.size() > 1 and x.shape[dim] % 2:
        raise ValueError(f"{x.shape[dim]} tokens a rank are no two chunks, as shard_sequence cuts them")
    return _join(_gather(x.detach(), group), dim, balanced).narrow(dim, 0, length or x.shape[dim] * group.size())


def _part(x: Tensor, dim: int, rank: int, size: int, balanced: bool) -> Tensor:
    held = spans(rank, size, x.shape[dim] // size, balanced)
    return torch.cat([x.narrow(dim, first, count) for _, first, count in held], dim)


def cut(x: Tensor, dim: int, size: int, balanced: bool) -> Tensor:
    """(size, ...): the parts of all ranks."""
    return torch.stack([_part(x, dim, rank, size, balanced) for rank in range(size)])


def _join(parts: Tensor, dim: int, balanced: bool) -> Tensor:
    """The whole from the parts of all ranks: undoes ``cut``."""
    chunks = [chunk for part in parts for chunk in (part.chunk(2, dim) if balanced else (part,))]
    return torch.cat((*chunks[::2], *chunks[::-2]) if balanced else chunks, dim)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts


def apply(stage: nn.Module, plan: Plan, group: dist.ProcessGroup | None, parallel: ParallelTable) -> None:
    """Put attention over ``group``, or of packed documents on one rank, into the seam of every module that attends."""
    if plan.attend is None and group is not None:
        raise PlanError("the plan names no module that attends, which context parallelism needs; use mesh.cp = 1")
    for name, module in stage.named_modules():
        if plan.attends(name):
            module.attend = attend_over(group, parallel.cp_method, balanced=parallel.cp_balance == "zigzag")


def attend_over(group: dist.ProcessGroup | None, method: str = "ring", *, balanced: bool = True) -> Attend:
    """The ``attend`` seam of a block over ``group``; None: of one rank that holds whole sequences."""

    def attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, seq: Seq, window: int) -> Tensor:
        how: dict[str, Any] = {"window": window, "method": method, "balanced": balanced}
        return ring_attention(q_BHTD, k_BKTD, v_BKTD, group=group, document_ids=seq.documents_BT, **how)

    return attend


def ring_attention(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    group: dist.ProcessGroup | None,
    causal: bool = True,
    document_ids: Tensor | None = None,
    window: int = 0,
    method: str = "ring",
    balanced: bool = True,
) -> Tensor:
    """Attention of the whole sequence of which every rank of ``group`` holds its part; this rank's part (B, H, n, D).

    Args:
        q_BHTD, k_BKTD, v_BKTD: (B, H, n, D), (B, K, n, D) and the same: what ``shard_sequence(..., 2, group)`` gives of
            the whole; of one dtype; head h reads key-value head h // (H / K).
        group: None is one rank with whole sequences.
        causal: a query sees the keys up to its own; else all.
        document_ids: integers (B, T), of the whole sequence, the same on all ranks, best on the CPU; a document is a
            run of one number, and a query sees the keys of its own alone.
        window: a causal query sees its own key and ``window`` - 1 before it; 0: all before it.
        method: "ring", "allgather" or "ulysses"; all compute the same.
        balanced: whether parts are in zigzag order.

    Collectives and bytes sent. ring: forward (cp-1) KV, backward (cp-1) KV and (cp-1) dKV, to the next rank while
    blocks are computed. allgather: forward (cp-1) KV, backward (cp-1) KV and (cp-1) dKV. ulysses: (cp-1)/cp (2 Q + KV)
    each way.

    The first two are the operator ``composer3d::ring_attention``, which selective checkpointing can save; kept for
    backward are q, k, v, the output and its logsumexp (B, H, n). Raises ValueError where shapes do not fit together, or
    heads or tokens do not divide.
    """
    q, k, v, size = q_BHTD, k_BKTD, v_BKTD, 1 if group is None else group.size()
    _check(q, k, v, document_ids, size, method, balanced)
    if window < 0 or (window and not causal):
        raise ValueError(f"window = {window} with causal = {causal} must be 0, or the keys that a causal query sees")
    q = q if q.stride(-1) == 1 else q.contiguous()  # kernels read rows
    window = -1 if not causal else window if window < q.shape[2] * size else 0
    if size == 1 and document_ids is None and window <= 0:
        return sdpa(q, k, v, is_causal=causal)
    if group is None or size == 1 or method != "ulysses":
        kind = f"{method} {'zigzag' if balanced else 'contiguous'}"
        name = "" if group is None or size == 1 else group.group_name
        return _forward(q, k, v, document_ids, window, kind, name)[0]
    parts = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
    whole = _join(_exchange(torch.cat(parts, 2), group.group_name), 2, balanced)
    q, k, v = whole.split([x.shape[1] // size for x in (q, k, v)], 1)
    out = ring_attention(q, k, v, group=None, causal=causal, document_ids=document_ids, window=max(window, 0))
    return _exchange(cut(out, 2, size, balanced), group.group_name).movedim(0, 1).flatten(1, 2)


def _check(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, size: int, method: str, balanced: bool) -> None:
    """Raises ValueError: kernels would read what is not there, or leave out what is."""
    (rows, heads, tokens, _), kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape != (rows, kv_heads, *q.shape[2:]) or heads % kv_heads:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k and v are {shapes}, must be (B, H, n, D) and twice (B, K, n, D) with H a multiple of K")
    if method not in METHODS:
        raise ValueError(f'method is "ring", "allgather" or "ulysses", not "{method}"')
    if balanced and size > 1 and tokens % 2:
        raise ValueError(f"{tokens} tokens a rank are no two chunks; cut the whole with shard_sequence")
    if documents is not None and documents.shape != (rows, tokens * size):
        raise ValueError(f"document_ids are {tuple(documents.shape)}, must be {(rows, tokens * size)}")
    if method == "ulysses" and (heads % size or kv_heads % size):
        raise ValueError(f"ulysses cuts {heads} query and {kv_heads} key-value heads over {size} ranks")


@torch.library.custom_op("composer3d::all_to_all", mutates_args=())
def _exchange(x: Tensor, group_name: str) -> Tensor:
    """(size, ...): part r of this rank becomes part ``rank`` of rank r."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=_resolve_process_group(GroupName(group_name)))
    return out


_exchange.register_fake(lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format))
_exchange.register_autograd(
    lambda ctx, grad: (_exchange(grad, ctx.group_name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group_name", inputs[1]),
)


def _hop(message: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send ``message`` to the next rank. What is returned waits, once, until it has left, and gives what came."""
    rank, size, incoming = group.rank(), group.size(), torch.empty_like(message)
    ops = [
        dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
    ]
    # One batch: were they posted apart, two ranks of NCCL could each wait in a send for the other's receive.
    on_the_way = [(dist.batch_isend_irecv(ops), incoming)]

    def arrived() -> Tensor:
        assert on_the_way, "a hop is waited for once"
        works, message = on_the_way.pop()
        for work in works:
            work.wait()
        return message

    return arrived


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Take one more block of keys into ``out`` and ``lse``, in place; no exponential here can overflow.

    At first ``lse`` is minus infinity: the block is then all there is.
    """
    out.lerp_(block_out.to(out.dtype), torch.sigmoid(block_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, block_lse))


def _add(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    """In a function of its own, as the merge is: a block's results are then freed before the next block's are made."""
    for total, part in zip(totals, parts, strict=True):
        total += part


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in memory of its own, in the order B, T, H, D: the projections on either side then take views of it."""
    return x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


def _visits(
    q: Tensor, own: Tensor, documents: Tensor | None, window: int, kind: str, group_name: str, *, own_last: bool
) -> Iterator[tuple[int | None, Tensor, tuple[Tile, ...]]]:
    """Key-values (2, B, K, S, D) as they come to this rank, and what its queries see of them; the next are on the way.

    First whose they are: a rank, or None for those of all ranks at once, as they follow each other in the sequence.
    """
    group = _resolve_process_group(GroupName(group_name)) if group_name else None
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    method, _, order = kind.partition(" ")
    n, balanced = q.shape[2], order == "zigzag"
    mine, banded = spans(rank, size, n, balanced), kernels.kernel_of(q) == "plain scores"
    of_all = (starts_of(documents), window, q.device, banded)
    if method == "allgather" and group is not None:
        kv, whole = _join(_gather(own, group), 3, balanced), spans(0, 1, n * size, balanced)
        yield None, kv, tiles(mine, whole, *of_all)
        return
    coming = None if group is None else _hop(own, group)
    for step in (*range(1, size), 0) if own_last else range(size):
        kv = own if coming is None or step == 0 else coming()
        if group is not None and 0 < step < size - 1:
            coming = _hop(kv, group)
        source = (rank - step) % size
        yield source, kv, tiles(mine, spans(source, size, n, balanced), *of_all)


@torch.library.custom_op("composer3d::ring_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int, kind: str, group_name: str
) -> tuple[Tensor, Tensor]:
    """``group_name``: of two ranks or more; empty: this rank holds whole sequences."""
    wide = kernels.wide(q.dtype)
    out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for _, kv, found in _visits(q, torch.stack((k, v)), documents, window, kind, group_name, own_last=False):
        for rows, queries, keys, causal, seen in found:
            block = (q[rows, :, queries], *kv[:, rows, :, keys])
            so_far = (out[rows, :, queries], lse[rows, :, queries])
            _merge(*so_far, *kernels.attend_block(*block, causal=causal, seen=seen))
    return _copy(out, q.dtype), lse


@torch.library.custom_op("composer3d::ring_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, kept: Sequence[Tensor], documents: Tensor | None, window: int, kind: str, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Key-values travel again, and behind them the sum of their gradients, which the last hop brings home.

    ``kept``: q, k, v, and of the whole rows the output and logsumexp.
    """
    q, k, v, out, lse = kept
    group = _resolve_process_group(GroupName(group_name)) if group_name else None
    grad, wide = grad if grad.stride(-1) == 1 else _copy(grad, q.dtype), kernels.wide(q.dtype)
    dq = torch.zeros_like(q, dtype=wide)
    homing: Callable[[], Tensor] | None = None
    # The own block comes last: it hides the last hop of the gradients, the larger message.
    for source, kv, found in _visits(q, torch.stack((k, v)), documents, window, kind, group_name, own_last=True):
        dkv = torch.zeros_like(kv, dtype=wide)
        for rows, queries, keys, causal, seen in found:
            block_grad, block_q, *whole = (x[rows, :, queries] for x in (grad, q, out, lse))
            block = (block_grad, block_q, *kv[:, rows, :, keys], *whole)
            so_far = (dq[rows, :, queries], *dkv[:, rows, :, keys])
            _add(so_far, kernels.attend_block_backward(*block, causal=causal, seen=seen))
        if homing is not None:
            dkv += homing()
        if group is not None and source is None:
            every = cut(dkv, 3, group.size(), kind.endswith("zigzag"))
            dkv = torch.empty_like(every[0])
            dist.reduce_scatter_single(dkv, every.flatten(0, 1), group=group)
        homing = None if group is None or source in (None, group.rank()) else _hop(dkv, group)
    return _copy(dq, q.dtype), _copy(dkv[0], k.dtype), _copy(dkv[1], v.dtype)


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _copy(q, q.dtype), q.new_empty(q.shape[:3], dtype=kernels.wide(q.dtype))


@_backward.register_fake
def _(grad: Tensor, kept: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(_copy(x, x.dtype) for x in kept[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.kind = inputs[4:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *kept, documents = ctx.saved_tensors
    return *_backward(grad, kept, documents, *ctx.kind), *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_save)
