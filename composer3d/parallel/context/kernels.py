"""Attention of a block of queries with a block of keys, forward and backward.

Forward returns the output and the logsumexp of each row of scores. With the logsumexp, the outputs
of several blocks of keys can be merged. The backward of a block needs only its own inputs, and the
output and logsumexp of the whole rows (Dao et al. 2022, FlashAttention, arXiv 2205.14135).

Shapes: queries, ``out`` and their gradients (B, H, T, D); keys and values (B, K, S, D); ``lse``
(B, H, T); ``mask`` (B, 1, T, S) or (1, 1, T, S), true where a query sees a key. H is a multiple of
K, and query head h reads key-value head h // (H / K). A causal block is square. With a mask,
``causal`` is ignored: the mask must hide later keys as well. ``lse`` is in ``wide(dtype)``, the
rest in the dtype of the queries. No collectives.

``attend_segments`` computes many blocks of all rows in one call of a variable-length kernel.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer3d.models.layers.attention import bias_of

_aten = torch.ops.aten


class Kernel(Enum):
    """A kernel that computes a block. The value is a name to print."""

    CPU_FLASH = "CPU flash"
    # For whole sequences without documents and windows, F.sdpa is called, which may choose cuDNN.
    CUDA_FLASH = "CUDA flash"
    # It builds all scores of a block.
    REFERENCE = "plain scores"


class VariableLength(NamedTuple):
    """Operators with the arguments of ``aten::_flash_attention_forward`` and its backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


# The kernels that have a form for segments of variable length.
VARIABLE_LENGTH = {
    Kernel.CUDA_FLASH: VariableLength(
        _aten._flash_attention_forward, _aten._flash_attention_backward
    )
}


class Segments(NamedTuple):
    """Segments of queries and keys, in tensors of all rows one after another.

    Queries of segment i see only keys of segment i. Two limits can cut off more keys. They count
    from a query's own key: the last query has the last key, the one before it the key before, and
    so on, even if there are more queries than keys.

    Attributes:
        query_offsets, key_offsets: int32 (segments + 1), from 0 to the number of all queries or
            keys: where segments begin and end.
        longest_queries, longest_keys: the most queries and keys in a segment.
        causal: whether keys after a query's own are cut off.
        left: how many keys before a query's own are not cut off; -1: all of them.
        all_see: whether every query sees a key.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    longest_queries: int
    longest_keys: int
    causal: bool
    left: int
    all_see: bool


def kernel_of(q: Tensor) -> Kernel:
    """Return the kernel for blocks without a mask, by the device, dtype and head width of ``q``.

    On a GPU, blocks with a mask always use ``Kernel.REFERENCE``.
    """
    if not q.is_cuda:
        return Kernel.CPU_FLASH
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    is_recent = is_half and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if is_recent and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return Kernel.CUDA_FLASH
    return Kernel.REFERENCE


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which blocks are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)`` of this block alone.

    A query that sees no key gets 0 and minus infinity. The last dim of q, k and v must be
    contiguous.
    """
    kernel = kernel_of(q)
    if kernel is Kernel.CPU_FLASH:
        bias = None if mask is None else bias_of(mask, q.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal and mask is None, attn_mask=bias
        )
        if mask is not None:
            # For a query that sees no key, the kernel returns an lse of 0. Merging would take it
            # for a key with a score of 0.
            lse = lse.masked_fill(~mask.any(-1), -torch.inf)
        return out, lse
    if kernel is Kernel.CUDA_FLASH and mask is None:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return attend_reference(q, k, v, causal=causal, mask=mask)


def attend_block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this block's contribution to the gradients of q, k and v.

    Args:
        grad: the gradient of ``out``.
        out, lse: output and logsumexp of the whole rows, merged over all blocks.

    Returns:
        The contributions to dq, dk and dv, of the shapes of q, k and v.
    """
    kernel = kernel_of(q)
    if kernel is Kernel.CPU_FLASH:
        bias = None if mask is None else bias_of(mask, q.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=bias
        )
    if kernel is Kernel.CUDA_FLASH and mask is None:
        lse = lse.contiguous()
        # Rows are not packed, so there are no cumulative lengths. Without dropout, the state of the
        # random generator is not read, so ``lse`` is passed in its place.
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, lse, lse
        )
    return attend_reference_backward(grad, q, k, v, out, lse, causal=causal, mask=mask)


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)`` of all segments in one call of the kernel of ``VARIABLE_LENGTH``.

    A query that sees no key gets 0 and ``least(lse.dtype)``.
    """
    rows = q.shape[0]
    operator = VARIABLE_LENGTH[kernel_of(q)].forward
    out_NHD, lse_HN, *_ = operator(
        *map(_as_NHD, (q, k, v)),
        *_lengths(segments),
        0.0,
        _is_causal(segments),
        False,
        **_window(segments),
    )
    lse = lse_HN.unflatten(1, (rows, -1)).transpose(0, 1)
    if not segments.all_see:
        # The kernel returns plus infinity. Merging would take it for a key with this score.
        lse = lse.nan_to_num(nan=torch.nan, posinf=least(lse.dtype))
    return _as_BHTD(out_NHD, rows), lse


def attend_segments_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contributions of all segments to dq, dk and dv: see ``attend_block_backward``."""
    rows = q.shape[0]
    operator = VARIABLE_LENGTH[kernel_of(q)].backward
    lse_HN = lse.transpose(0, 1).flatten(1).contiguous()
    # Without dropout, the state of the random generator is not read.
    grads = operator(
        *map(_as_NHD, (grad, q, k, v, out)),
        lse_HN,
        *_lengths(segments),
        0.0,
        _is_causal(segments),
        lse_HN,
        lse_HN,
        **_window(segments),
    )
    dq, dk, dv = (_as_BHTD(x_NHD, rows) for x_NHD in grads)
    return dq, dk, dv


def least(dtype: torch.dtype) -> float:
    """Return the logsumexp of no scores: a finite number, so that differences of two are not NaN.

    Merged with the logsumexp of scores, it changes nothing.
    """
    return torch.finfo(dtype).min


def _as_NHD(x: Tensor) -> Tensor:
    """Put all rows one after another: (B, H, T, D) to (B T, H, D). The last dim is contiguous."""
    x_NHD = x.transpose(1, 2).flatten(0, 1)
    return x_NHD if x_NHD.stride(-1) == 1 else x_NHD.contiguous()


def _as_BHTD(x_NHD: Tensor, rows: int) -> Tensor:
    return x_NHD.unflatten(0, (rows, -1)).transpose(1, 2)


def _lengths(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    """Return the offsets, and bounds of the numbers of queries and keys in a segment."""
    # For a bound of 1, torch calls a kernel for decoding, which takes each query for a segment.
    most_queries = max(segments.longest_queries, 2)
    most_keys = segments.longest_keys
    if segments.left >= 0 and not segments.causal:
        # The kernel lets a query see this many keys after its own, when all of them are meant.
        most_keys = max(most_keys, most_queries)
    return segments.query_offsets, segments.key_offsets, most_queries, most_keys


def _is_causal(segments: Segments) -> bool:
    """Return whether to call the kernel for causal attention; with a window, it is another one."""
    return segments.causal and segments.left < 0


def _window(segments: Segments) -> dict[str, int]:
    return {
        "window_size_left": segments.left,
        "window_size_right": 0 if segments.causal else -1,
    }


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``attend_block`` with all scores in memory, where no flash kernel can be used."""
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    finite_lse = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf minus -inf would be NaN
    out = (scores - finite_lse).exp() @ _by_kv_head(v, v)
    return out.flatten(1, 2).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def attend_reference_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``attend_block_backward`` with all scores in memory."""
    grads, outs, queries = (_by_kv_head(x, k) for x in (grad, out, q))
    keys, values = _by_kv_head(k, k), _by_kv_head(v, v)
    row_lse = lse.unflatten(1, (k.shape[1], -1))[..., None]
    weights = (_scores(q, k, causal, mask) - row_lse).exp()
    row_dot = (grads * outs).sum(-1, keepdim=True)
    dscores = weights * (grads @ values.mT - row_dot) * q.shape[-1] ** -0.5
    dq = (dscores @ keys).flatten(1, 2)
    dk = (dscores.mT @ queries).sum(2)
    dv = (weights.mT @ grads).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """Group the heads of ``x`` by the key-value head that they read: (B, K, H / K, T, D), wide."""
    return x.to(wide(x.dtype)).unflatten(1, (kv.shape[1], -1))


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    scores = _by_kv_head(q, k) @ _by_kv_head(k, k).mT * q.shape[-1] ** -0.5
    if mask is None and causal:
        mask = torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores if mask is None else scores.masked_fill(~mask[:, :, None], -torch.inf)
