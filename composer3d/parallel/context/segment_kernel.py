"""Attention of many blocks of all rows at once, by a kernel for segments of variable length.

Shapes and dtypes are those of ``kernels``. No collectives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer3d.parallel.context.kernels import Kernel, kernel_of, least

_aten = torch.ops.aten


class VariableLength(NamedTuple):
    """Operators with the arguments of ``aten::_flash_attention_forward`` and its backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


_FLASH = VariableLength(_aten._flash_attention_forward, _aten._flash_attention_backward)
# What computes segments, by the kernel of blocks. torch has no cuDNN operator for segments.
VARIABLE_LENGTH = {Kernel.CUDA_FLASH: _FLASH, Kernel.CUDNN: _FLASH}


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


def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Compute ``(out, lse)`` of all segments in one call of the kernel of ``VARIABLE_LENGTH``.

    A query that sees no key gets 0 and ``least(lse.dtype)``.
    """
    rows = q.shape[0]
    operator = VARIABLE_LENGTH[kernel_of(q)].forward
    out_NHD, lse_HN, *_ = operator(
        *map(_as_NHD, (q, k, v)),
        *lengths_of(segments),
        0.0,
        calls_causal(segments),
        False,
        **window_of(segments),
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
    """Compute the contributions of all segments to dq, dk and dv.

    They are those of ``kernels.attend_block_backward``, with its shapes.
    """
    rows = q.shape[0]
    operator = VARIABLE_LENGTH[kernel_of(q)].backward
    lse_HN = lse.transpose(0, 1).flatten(1).contiguous()
    # Without dropout, the state of the random generator is not read.
    grads = operator(
        *map(_as_NHD, (grad, q, k, v, out)),
        lse_HN,
        *lengths_of(segments),
        0.0,
        calls_causal(segments),
        lse_HN,
        lse_HN,
        **window_of(segments),
    )
    dq, dk, dv = (_as_BHTD(x_NHD, rows) for x_NHD in grads)
    return dq, dk, dv


def _as_NHD(x: Tensor) -> Tensor:
    """Put all rows one after another: (B, H, T, D) to (B T, H, D). The last dim is contiguous."""
    x_NHD = x.transpose(1, 2).flatten(0, 1)
    return x_NHD if x_NHD.stride(-1) == 1 else x_NHD.contiguous()


def _as_BHTD(x_NHD: Tensor, rows: int) -> Tensor:
    return x_NHD.unflatten(0, (rows, -1)).transpose(1, 2)


def lengths_of(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    """Return the offsets, and bounds of the numbers of queries and keys in a segment."""
    # For a bound of 1, torch calls a kernel for decoding, which takes each query for a segment.
    most_queries = max(segments.longest_queries, 2)
    most_keys = segments.longest_keys
    if segments.left >= 0 and not segments.causal:
        # The kernel lets a query see this many keys after its own, when all of them are meant.
        most_keys = max(most_keys, most_queries)
    return segments.query_offsets, segments.key_offsets, most_queries, most_keys


def calls_causal(segments: Segments) -> bool:
    """Return whether to call the kernel for causal attention; with a window, it is another one."""
    return segments.causal and segments.left < 0


def window_of(segments: Segments) -> dict[str, int]:
    """Return the arguments of the kernel that limit which keys a query sees."""
    return {
        "window_size_left": segments.left,
        "window_size_right": 0 if segments.causal else -1,
    }
