"""How often the calls of a plan compute each score."""

from itertools import pairwise

import torch
from torch import Tensor

from composer3d.parallel.context.packed import CallPlan, KernelCall
from composer3d.parallel.context.segment_kernel import calls_causal, lengths_of, window_of
from composer3d.verify.segments import visible_scores


def count_scores(plan: CallPlan, call: KernelCall, rows: int, tokens: int, all_keys: int) -> Tensor:
    """How often a call computes each score: (rows, tokens, all_keys)."""
    counts = torch.zeros(rows, tokens, all_keys, dtype=torch.int64)
    segments = call.segments(plan.offsets_on(counts))
    q_lengths = (call.queries.stop - call.queries.start, segments.query_offsets.tolist())
    k_lengths = (call.keys.stop - call.keys.start, segments.key_offsets.tolist())
    for length, offsets in (q_lengths, k_lengths):
        assert offsets[0] == 0
        assert offsets[-1] == rows * length
        assert offsets == sorted(offsets)
    _, _, most_queries, most_keys = lengths_of(segments)
    window = window_of(segments)
    some_see_none = False
    for (q0, q1), (k0, k1) in zip(pairwise(q_lengths[1]), pairwise(k_lengths[1]), strict=True):
        assert q1 - q0 <= most_queries
        assert k1 - k0 <= most_keys
        visible = visible_scores(
            q1 - q0,
            k1 - k0,
            most_keys,
            calls_causal(segments),
            (window["window_size_left"], window["window_size_right"]),
        )
        some_see_none |= not visible.any(-1).all()
        for q, k in visible.nonzero().tolist():
            q_row, q_place = divmod(q0 + q, q_lengths[0])
            k_row, k_place = divmod(k0 + k, k_lengths[0])
            assert q_row == k_row
            counts[q_row, q_place + call.queries.start, k_place + call.keys.start] += 1
    assert call.all_see == (not some_see_none)
    return counts
