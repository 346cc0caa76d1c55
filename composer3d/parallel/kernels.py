"""Attention of a block of queries to a block of key-values, with what a ring needs of it: each row's logsumexp.

A block's backward takes the output and logsumexp of the whole row, of which the block may be a part: with these two,
the block's share of all gradients follows from the block alone (Dao et al. 2022, FlashAttention, arXiv 2205.14135).

Shapes: queries, ``out`` and their gradients (B, H, T, D), key-values (B, K, S, D), ``lse`` (B, H, T); H is a multiple
of K and head h reads key-value head h // (H / K). Causal blocks are square. ``lse`` is in ``wide(dtype)``, the rest in
the dtype of the queries. ``seen`` (B, 1, T, S), booleans: the keys that a query sees; where it is given, what is causal
is in it. No collectives.
"""

import torch
from torch import Tensor

from composer3d.models.layers import bias_of

_aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attend_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this block alone, 0 and minus infinity where a query sees no key.

    The last dimension of all inputs is contiguous.
    """
    if kernel_of(q) == "CPU flash":
        causal, mask = (causal, None) if seen is None else (False, bias_of(seen, q.dtype))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        # The kernel returns 0 for such a query, which would enter the merge as a key with a score of 0.
        return out, lse if seen is None else lse.masked_fill(~seen.any(-1), -torch.inf)
    if seen is None and kernel_of(q) == "CUDA flash":
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return attend_plainly(q, k, v, causal=causal, seen=seen)


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of q, k and v.

    Args:
        grad: of ``out``.
        out, lse: of the whole rows, not of this block.
    """
    if kernel_of(q) == "CPU flash":
        causal, mask = (causal, None) if seen is None else (False, bias_of(seen, q.dtype))
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask
        )
    if seen is None and kernel_of(q) == "CUDA flash":
        # No cumulative lengths: rows are not packed. Without dropout the state of the generator is not read.
        lengths, generator = (None, None, q.shape[2], k.shape[2]), (lse, lse)
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, *generator
        )
    return attend_plainly_backward(grad, q, k, v, out, lse, causal=causal, seen=seen)


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``attend_block`` with all scores in memory: for CUDA where flash does not go, and to test the others against."""
    scores = _scores(q, k, causal, seen)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)).exp() @ _grouped(v, v)  # not -inf less -inf
    return out.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def attend_plainly_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_block_backward`` with all scores in memory."""
    g, o, queries = (_grouped(x, k) for x in (grad, out, q))
    keys, values = _grouped(k, k), _grouped(v, v)
    weights = (_scores(q, k, causal, seen) - lse.unflatten(1, (k.shape[1], -1))[..., None]).exp()
    dscores = weights * (g @ values.mT - (g * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = (dscores @ keys).flatten(1, 2)
    dk, dv = (dscores.mT @ queries).sum(2), (weights.mT @ g).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def kernel_of(q: Tensor) -> str:
    """What computes a block of such queries without a mask; on CUDA all scores are made where flash does not go."""
    if not q.is_cuda:
        return "CPU flash"
    half = q.dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability(q.device) >= (8, 0)
    return "CUDA flash" if half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 else "plain scores"


def _grouped(x: Tensor, kv: Tensor) -> Tensor:
    """(B, K, heads / K, T, D) in the wide dtype: the heads of ``x`` beside the key-value head that they read."""
    return x.to(wide(x.dtype)).unflatten(1, (kv.shape[1], -1))


def _scores(q: Tensor, k: Tensor, causal: bool, seen: Tensor | None) -> Tensor:
    scores = _grouped(q, k) @ _grouped(k, k).mT * q.shape[-1] ** -0.5
    if seen is None and causal:
        seen = torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if seen is None else scores.masked_fill(~seen[:, :, None], -torch.inf)
