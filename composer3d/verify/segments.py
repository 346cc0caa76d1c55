"""What ``aten::_flash_attention_forward`` and its backward compute from segments, on a CPU.

Written after the sources of FlashAttention 2 that torch builds (``mha_varlen_fwd``,
``mha_varlen_bwd`` and ``mask.h``), with all scores in memory and in any dtype. It has the traps of
the kernel as well: what lies outside of all segments, or beyond the longest one that the caller
named, is never written, which is NaN here; a query without a key has a logsumexp of plus infinity;
and where there is a limit on one side only, the other side has the longest keys as its limit.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.parallel.context.kernels import wide
from composer3d.parallel.context.segment_kernel import VariableLength


class _MaskedSegment(NamedTuple):
    """Places of queries and of keys, and the mask of their scores, true where one is visible."""

    queries: slice
    keys: slice
    visible: Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    """Return the output (N, H, D), the logsumexp (H, N), and what nobody reads."""
    _check(query, key, value, cum_seq_q, cum_seq_k, dropout_p, return_debug_mask)
    is_swapped = max_q == 1 and query.shape[1] > key.shape[1] and window_size_left < 0
    assert not is_swapped or len(cum_seq_q) == len(query) + 1, "a query is no segment of its own"
    out = torch.full_like(query, torch.nan)
    lse = query.new_full((query.shape[1], len(query)), torch.nan, dtype=wide(query.dtype))
    windows = (window_size_left, window_size_right)
    for queries, keys, visible in _segments(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, windows):
        scores = _scores(query[queries], key[keys], visible)
        segment_lse = scores.logsumexp(-1)
        finite_lse = segment_lse.clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - finite_lse[..., None]).exp()
        written = slice(queries.start, min(queries.stop, queries.start + max_q))
        count = written.stop - written.start
        values = _repeat(value[keys], query)
        out[written] = (weights @ values.movedim(0, 1)).movedim(0, 1)[:count].to(out)
        lse[:, written] = segment_lse.masked_fill(segment_lse.isneginf(), torch.inf)[:, :count]
    return out, lse, lse, lse, lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contributions to the gradients of query, key and value, in their shapes."""
    _check(query, key, value, cum_seq_q, cum_seq_k, dropout_p, False)
    assert logsumexp.is_contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    windows = (window_size_left, window_size_right)
    groups = query.shape[1] // key.shape[1]
    for queries, keys, visible in _segments(cum_seq_q, cum_seq_k, max_q, max_k, is_causal, windows):
        q, grad = (x[queries].to(logsumexp).movedim(0, 1) for x in (query, grad_out))
        k, v = (_repeat(x[keys], query).movedim(0, 1) for x in (key, value))
        weights = (_scores(query[queries], key[keys], visible) - logsumexp[:, queries, None]).exp()
        row_dot = (grad_out[queries] * out[queries]).sum(-1).to(logsumexp).mT[..., None]
        dscores = weights * (grad @ v.mT - row_dot) * query.shape[-1] ** -0.5
        written = slice(queries.start, min(queries.stop, queries.start + max_q))
        dq[written] = (dscores @ k).movedim(0, 1)[: written.stop - written.start].to(dq)
        written = slice(keys.start, min(keys.stop, keys.start + max_k))
        count = written.stop - written.start
        for total, part in ((dk, dscores.mT @ q), (dv, weights.mT @ grad)):
            part = part.unflatten(0, (-1, groups)).sum(1).movedim(0, 1)
            total[written] = part[:count].to(total)
    return dq, dk, dv


KERNEL = VariableLength(forward, backward)


def visible_scores(
    queries: int, keys: int, max_k: int, is_causal: bool, windows: tuple[int, int]
) -> Tensor:
    """Return the mask of a segment, of shape (queries, keys). Its last query and last key align."""
    left, right = windows
    if is_causal:
        right = 0
    if left >= max_k:
        left = -1
    if right >= max_k:
        right = -1
    is_local = left >= 0 or right >= 0
    if is_local and left < 0:
        left = max_k
    if is_local and right < 0:
        right = max_k
    if is_causal and right == 0 and left == max_k:
        left = keys + queries  # the causal kernel has no limit to the left
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if is_local:
        mask = mask.tril(keys - queries + right).triu(keys - queries - left)
    return mask


def _segments(
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    windows: tuple[int, int],
) -> Iterator[_MaskedSegment]:
    assert max_q > 0
    assert max_k > 0
    of_queries, of_keys = pairwise(cum_seq_q.tolist()), pairwise(cum_seq_k.tolist())
    for (q0, q1), (k0, k1) in zip(of_queries, of_keys, strict=True):
        visible = visible_scores(q1 - q0, k1 - k0, max_k, is_causal, windows)
        yield _MaskedSegment(slice(q0, q1), slice(k0, k1), visible)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    dropout_p: float,
    return_debug_mask: bool,
) -> None:
    assert dropout_p == 0
    assert not return_debug_mask
    for x in (query, key, value):
        assert x.ndim == 3
        assert x.stride(-1) == 1
    for offsets in (cum_seq_q, cum_seq_k):
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()


def _scores(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    q = query.to(wide(query.dtype)).movedim(0, 1)
    k = _repeat(key, query).movedim(0, 1)
    return (q @ k.mT * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)


def _repeat(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of keys or values for the query heads, in the wide dtype."""
    return x.to(wide(x.dtype)).repeat_interleave(query.shape[1] // x.shape[1], 1)
