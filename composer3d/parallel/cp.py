"""Context parallelism: causal attention of one sequence over several ranks, key-values travelling round a ring.

Liu et al. 2023 (Ring Attention, arXiv 2310.01889). A causal mask would leave the first ranks idle; the balanced order
is the zigzag of ring-flash-attention, after Brandon et al. 2023 (Striped Attention, arXiv 2311.09431): the sequence is
2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r, one after the other. Its own block is causal; of the key-values
of an earlier rank all its queries see the first chunk, and of a later rank its second chunk of queries sees all. So
each step costs every rank the same, and no block is computed that the mask hides.

Shapes: T is the whole sequence and n = T / cp the local one; queries (B, H, n, D), key-values (B, K, n, D), rotated by
their positions in the whole and not yet repeated for grouped queries. Bytes are what one rank sends; KV is what its
own keys and values take, dKV the same in float32 (float64 for float64).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from composer3d.errors import PlanError
from composer3d.models.layers import Attend, Seq
from composer3d.parallel import kernels
from composer3d.parallel.plan import Plan


def shard_sequence(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of ``x``, which all ranks hold whole: chunks r and 2 cp - 1 - r of ``dim``. No collective."""
    return _part(x, dim, group.rank(), group.size())


def _part(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    assert x.shape[dim] % (2 * size) == 0, f"{x.shape[dim]} tokens do not divide into {2 * size} chunks"
    parts = x.chunk(2 * size, dim)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim)


def unshard_sequence(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The whole of which every rank holds its zigzag part: the inverse of ``shard_sequence``. No gradient.

    Collectives: one all-gather; (cp-1) times the bytes of ``x``.
    """
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(parts.flatten(0, 1), x.contiguous(), group=group)
    first, second = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*first, *reversed(second)), dim)


def apply(stage: nn.Module, plan: Plan, group: dist.ProcessGroup) -> None:
    """Put ring attention into the seam of every module of ``stage`` that the plan says attends across tokens."""
    if plan.attend is None:
        raise PlanError("the plan names no module that attends, which context parallelism needs; use mesh.cp = 1")
    for name, module in stage.named_modules():
        if plan.attends(name):
            module.attend = ring_attend(group)


def ring_attend(group: dist.ProcessGroup) -> Attend:
    """The ``attend`` seam of a block over ``group``: ``ring_attention`` of sequences without a window."""

    def attend(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, seq: Seq, window: int) -> Tensor:
        tokens = q_BHTD.shape[2] * group.size()
        assert window == 0 or window >= tokens, f"a ring sees all {tokens} tokens, not a window of {window}"
        return ring_attention(q_BHTD, k_BKTD, v_BKTD, group=group, documents_BT=seq.documents_BT)

    return attend


def ring_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, group: dist.ProcessGroup, documents_BT: Tensor | None = None
) -> Tensor:
    """Causal attention of the whole sequence that lies over ``group`` in zigzag order; this rank's part (B, H, n, D).

    With ``documents_BT``, integers (B, T), the same on all ranks, a query sees the keys of its own document alone: each
    block is masked, with n x n booleans; all are computed and sent, seen or not, so that ranks stay in step.

    The three are of one dtype with a contiguous last dimension; n is even. Bytes sent to the next rank while blocks are
    computed: forward (cp-1) KV; backward (cp-1) KV and (cp-1) dKV. It is the operator ``composer3d::ring_attention``,
    which selective checkpointing can save; kept for backward are q, k, v, the output and its logsumexp (B, H, n).
    """
    return _ring_forward(q_BHTD, k_BKTD, v_BKTD, documents_BT, group.group_name)[0]


class _Hop:
    """A message on its way to the next rank, and one like it from the previous rank, until ``arrived``."""

    def __init__(self, message: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._incoming = torch.empty_like(message)
        ops = [
            dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, self._incoming, group=group, group_peer=(rank - 1) % size),
        ]
        # One batch: were they posted apart, two ranks of NCCL could each wait in a send for the other's receive.
        self._works: list[dist.Work] | None = dist.batch_isend_irecv(ops)

    def arrived(self) -> Tensor:
        """Wait, once, until the message has left and the other has come; the other."""
        assert self._works is not None, "a hop is waited for once"
        works, self._works = self._works, None
        for work in works:
            work.wait()
        return self._incoming


def _pair(rank: int, source: int, half: int) -> tuple[slice, slice]:
    """Which of the queries of ``rank`` see which of the key-values of ``source``; where they are one, causally."""
    if source == rank:
        return slice(None), slice(None)
    return (slice(None), slice(half)) if source < rank else (slice(half, None), slice(None))


def _seen(documents: Tensor | None, rank: int, source: int, size: int) -> Tensor | None:
    """(B, 1, queries, keys): which keys of ``source`` those queries of ``rank`` see, of the block that is ``_pair``."""
    if documents is None:
        return None
    queries, keys = _pair(rank, source, documents.shape[1] // size // 2)
    of_query, of_key = _part(documents, 1, rank, size)[:, queries], _part(documents, 1, source, size)[:, keys]
    same = of_query[:, None, :, None] == of_key[:, None, None, :]
    return same.tril() if source == rank else same


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Take one more block of keys into ``out`` and ``lse``, in place; no exponential here can overflow."""
    weight = torch.sigmoid(block_lse - lse)[..., None]
    out.sub_(weight * (out - block_out))
    lse.sub_(torch.nn.functional.logsigmoid(lse - block_lse))


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in memory of its own, in the order B, T, H, D: the projections on either side then take views of it."""
    return x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


@torch.library.custom_op("composer3d::ring_attention", mutates_args=())
def _ring_forward(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str) -> tuple[Tensor, Tensor]:
    group = _resolve_process_group(GroupName(group_name))
    rank, size, half = group.rank(), group.size(), q.shape[2] // 2
    kv = torch.stack((k, v))
    for step in range(size):
        hop = _Hop(kv, group) if step < size - 1 else None
        source = (rank - step) % size
        queries, keys = _pair(rank, source, half)
        seen = _seen(documents, rank, source, size)
        block = kernels.attend_block(q[:, :, queries], *kv[:, :, :, keys], causal=step == 0, seen=seen)
        if step == 0:  # a query sees itself here: its logsumexp is finite, and with it all that follow
            out, lse = block[0].to(kernels.wide(q.dtype)), block[1]
        else:
            _merge(out[:, :, queries], lse[:, :, queries], *block)
        if hop is not None:
            kv = hop.arrived()
    return _copy(out, q.dtype), lse.contiguous()


@torch.library.custom_op("composer3d::ring_attention_backward", mutates_args=())
def _ring_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, out: Tensor, lse: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Key-values travel again, and behind them the sum of their gradients, which the last hop brings home."""
    group = _resolve_process_group(GroupName(group_name))
    rank, size, half = group.rank(), group.size(), q.shape[2] // 2
    wide, grad = kernels.wide(q.dtype), _copy(grad, q.dtype)
    own = kv = torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=wide)
    coming = _Hop(kv, group) if size > 1 else None
    homing: _Hop | None = None
    # The own block comes last: it hides the last hop of the gradients, the larger message.
    for step in (*range(1, size), 0):
        kv = own if coming is None else coming.arrived()
        coming = _Hop(kv, group) if 0 < step < size - 1 else None
        source = (rank - step) % size
        queries, keys = _pair(rank, source, half)
        block_grad, block_q, *whole = (x[:, :, queries] for x in (grad, q, out, lse))
        seen = _seen(documents, rank, source, size)
        dq_part, *dkv_part = kernels.attend_block_backward(
            block_grad, block_q, *kv[:, :, :, keys], *whole, causal=step == 0, seen=seen
        )
        dq[:, :, queries] += dq_part
        dkv = torch.zeros_like(kv, dtype=wide) if homing is None else homing.arrived()
        for total, part in zip(dkv, dkv_part, strict=True):
            total[:, :, keys] += part
        homing = _Hop(dkv, group) if step > 0 else None
    return _copy(dq, q.dtype), _copy(dkv[0], k.dtype), _copy(dkv[1], v.dtype)


@_ring_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group_name: str) -> tuple[Tensor, Tensor]:
    return _copy(q, q.dtype), q.new_empty(q.shape[:3], dtype=kernels.wide(q.dtype))


@_ring_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _copy(q, q.dtype), _copy(k, k.dtype), _copy(v, v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.group_name = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *_ring_backward(grad, *ctx.saved_tensors, ctx.group_name), None, None


_ring_forward.register_autograd(_differentiate, setup_context=_save)
