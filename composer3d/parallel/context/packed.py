"""Calls of a variable-length kernel, each for many documents and all rows of a micro-batch.

Such a kernel gets two lists of segments: of queries and of keys. Queries of segment i see only keys
of segment i. In each round of the ring, a rank has its own queries and some keys: its own, those of
another rank, or those of all ranks. ``plan_calls`` covers the visible scores of each round with as
few calls as it can:

- Without a window, one call for each round of the ring. A part of a sequence and a part before it
  have at most one document in common, and its tokens are adjacent in the shards of both ranks.
- One or two calls for the keys of all ranks: a document that is in both chunks of a balanced rank
  has two segments with keys in common, which one call cannot have.
- With a window that ends inside of a document, a call for each pair of chunks. A call has one limit
  for all of its segments, so rows whose documents end at different places may need more calls.

Positions are places in the whole sequence, and places those in a rank's shard.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.models.to_device import copy_to_device_of
from composer3d.parallel.context import segment_kernel
from composer3d.parallel.context.ownership import OwnedRange, owned_ranges
from composer3d.parallel.context.segment_kernel import Segments
from composer3d.parallel.context.tiles import NOT_CAUSAL, Starts, TokenRun, runs_of
from composer3d.runtime.torch_private import fake_mode_of

_ALL_ROWS = slice(None)


class KernelCall(NamedTuple):
    """One call of a variable-length kernel.

    Attributes:
        queries: places in this rank's shard, the same in all rows.
        keys: places in the shard of the keys, the same in all rows.
        offsets: where ``CallPlan.offsets_on`` has the offsets of the queries, and of the keys.
        causal, left, longest_queries, longest_keys, all_see: as in ``Segments``.
    """

    queries: slice
    keys: slice
    offsets: tuple[slice, slice]
    causal: bool
    left: int
    longest_queries: int
    longest_keys: int
    all_see: bool

    @property
    def rows(self) -> slice:
        """The samples of the micro-batch: all of them."""
        return _ALL_ROWS

    def segments(self, offsets: Tensor) -> Segments:
        """Return what the kernel needs; ``offsets``, 1-D, are those of ``CallPlan.offsets_on``."""
        of_queries, of_keys = self.offsets
        return Segments(
            offsets[of_queries],
            offsets[of_keys],
            self.longest_queries,
            self.longest_keys,
            self.causal,
            self.left,
            self.all_see,
        )


class CallPlan:
    """The calls of all rounds of a micro-batch, for all layers with one window.

    Attributes:
        rounds: the calls with the keys of each rank, or of the only round if keys are gathered.
    """

    def __init__(self, rounds: tuple[tuple[KernelCall, ...], ...], numbers: list[int]) -> None:
        self.rounds = rounds
        self._numbers = numbers
        self._offsets: Tensor | None = None

    def offsets_on(self, like: Tensor) -> Tensor:
        """Return the offsets of all calls, int32, 1-D, on the device of ``like``.

        The first call copies them there, without a wait. Later ones return the same tensor.
        """
        offsets = self._offsets
        if (
            offsets is None
            or offsets.device != like.device
            # Each dry run has tensors of its own kind, and this plan may outlive it.
            or fake_mode_of(offsets) is not fake_mode_of(like)
        ):
            on_host = torch.tensor(self._numbers, dtype=torch.int32, device="cpu")
            self._offsets = offsets = copy_to_device_of(like, on_host)
        return offsets

    def attend(self, call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``(out, lse)`` of a call, (B, H, T, D) and (B, H, T)."""
        return segment_kernel.attend_segments(q, k, v, call.segments(self.offsets_on(q)))

    def differentiate(
        self,
        call: KernelCall,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the contributions of a call to dq (B, H, T, D), and dk and dv (B, K, S, D)."""
        segments = call.segments(self.offsets_on(q))
        return segment_kernel.attend_segments_backward(grad, q, k, v, out, lse, segments)


class _Segment(NamedTuple):
    """Queries and keys of one document, with the limits of ``Segments``.

    Attributes:
        row: the sample of the micro-batch.
        queries, keys: the first place, and the one after the last.
        causal, left: as in ``Segments``.
    """

    row: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    left: int

    def may_precede(self, other: "_Segment") -> bool:
        """Return whether a call may have ``other`` after this segment."""
        if (self.causal, self.left) != (other.causal, other.left):
            return False
        ends_before = self.queries[1] <= other.queries[0] and self.keys[1] <= other.keys[0]
        return self.row < other.row or (self.row == other.row and ends_before)


# An entry has numbers for each document; documents differ in each micro-batch.
@lru_cache(maxsize=256)
def plan_calls(
    rank: int,
    size: int,
    rows: int,
    tokens: int,
    starts: Starts,
    window: int,
    method: str,
    balanced: bool,
) -> CallPlan:
    """Plan the calls of ``rank`` in all rounds.

    Args:
        rank, size: this rank's, in the group that a sequence is cut over.
        rows, tokens: of this rank's shard.
        starts, window: as in ``tiles.tiles``.
        method: "allgather": there is one round, with the keys of all ranks. Otherwise there is a
            round for each rank.
        balanced: whether shards are in balanced order.
    """
    queries = _join_neighbours(owned_ranges(rank, size, tokens, balanced=balanced))
    if method == "allgather":
        all_keys = [owned_ranges(0, 1, tokens * size, balanced=balanced)]
    else:
        all_keys = [owned_ranges(source, size, tokens, balanced=balanced) for source in range(size)]

    numbers: list[int] = []
    rounds = []
    for keys in all_keys:
        keys = _join_neighbours(keys)
        segments: list[_Segment] = []
        for row in range(rows):
            cuts = () if starts is None else starts[row]
            segments += _segments(row, runs_of(queries, cuts), runs_of(keys, cuts), window)
        rounds.append(tuple(_call(group, rows, numbers) for group in _group(segments)))
    return CallPlan(tuple(rounds), numbers)


def _join_neighbours(ranges: Iterable[OwnedRange]) -> tuple[OwnedRange, ...]:
    """Join ranges that are adjacent in the sequence."""
    joined: list[OwnedRange] = []
    for tokens in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.position + last.length == tokens.position:
            joined[-1] = last._replace(length=last.length + tokens.length)
        else:
            joined.append(tokens)
    return tuple(joined)


def _segments(
    row: int, query_runs: Iterable[TokenRun], key_runs: Iterable[TokenRun], window: int
) -> Iterator[_Segment]:
    """Yield the segments of a row, in the order of the queries."""
    keys_of: defaultdict[int, list[TokenRun]] = defaultdict(list)
    for run in key_runs:
        keys_of[run.document].append(run)
    queries_of: defaultdict[int, list[TokenRun]] = defaultdict(list)
    for run in query_runs:
        queries_of[run.document].append(run)

    for document, queries in queries_of.items():
        keys = keys_of[document]
        if not keys:
            continue
        span = queries[-1].positions[1] - keys[0].positions[0]
        if 0 < window < span:
            yield from _segments_with_edge(row, queries, keys, window)
        else:
            # A limit that cuts nothing: then all causal segments of a window fit into one call.
            left = window - 1 if window > 0 else -1
            yield from _join(_segments_without_edge(row, queries, keys, window, left))


def _segments_without_edge(
    row: int, queries: Sequence[TokenRun], keys: Sequence[TokenRun], window: int, left: int
) -> Iterator[_Segment]:
    """Yield the segments of a document whose window, if there is one, cuts no key off."""
    for query in queries:
        begin, end = query.positions
        seen = [key for key in keys if window == NOT_CAUSAL or key.positions[0] < end]
        if not seen:
            continue
        last = seen[-1]
        key_end, causal = last.positions[1], False
        if window != NOT_CAUSAL and key_end > begin:  # the run has the keys of these queries
            key_end, causal = end, True
        # Runs of one document are adjacent in the shard.
        key_places = (seen[0].positions[0] - seen[0].shift, key_end - last.shift)
        query_places = (begin - query.shift, end - query.shift)
        yield _Segment(row, query_places, key_places, causal, left if causal else -1)


def _segments_with_edge(
    row: int, queries: Sequence[TokenRun], keys: Sequence[TokenRun], window: int
) -> Iterator[_Segment]:
    """Yield the segments of a document in which the window ends: one for each pair of runs."""
    for query in queries:
        begin, end = query.positions
        for key in keys:
            key_begin, key_end = key.positions
            causal = key_end > begin
            if causal:
                key_end = end
            if key_begin >= end or key_end + window - 1 <= begin:
                continue
            first_seen = max(key_begin, begin - window + 1)
            # Later queries see no key of the run.
            query_end = min(end, key_end + window - 1)
            left = window - 1 - (query_end - key_end)
            if not causal and query_end - first_seen <= window:
                left = -1
            yield _Segment(
                row,
                (begin - query.shift, query_end - query.shift),
                (first_seen - key.shift, key_end - key.shift),
                causal,
                left,
            )


def _join(segments: Iterable[_Segment]) -> Iterator[_Segment]:
    """Join the segments of one document whose queries are adjacent, where they see as before."""
    last: _Segment | None = None
    for segment in segments:
        if last is not None:
            (first, middle), (begin, end) = last.queries, segment.queries
            more_keys = segment.keys[1] - last.keys[1]
            if (
                middle == begin
                and last.causal == segment.causal
                and last.keys[0] == segment.keys[0]
                and more_keys == (end - begin if segment.causal else 0)
            ):
                last = segment._replace(queries=(first, end))
                continue
            yield last
        last = segment
    if last is not None:
        yield last


def _group(segments: Iterable[_Segment]) -> list[list[_Segment]]:
    """Distribute segments over calls: each goes to the first call that can have it."""
    groups: list[list[_Segment]] = []
    for segment in segments:
        for group in groups:
            if group[-1].may_precede(segment):
                group.append(segment)
                break
        else:
            groups.append([segment])
    return groups


def _call(segments: Sequence[_Segment], rows: int, numbers: list[int]) -> KernelCall:
    """Make a call of segments in order; append their offsets to ``numbers``.

    The kernel writes only within segments. Queries without keys, and keys without queries, are
    segments too, so that their outputs and gradients are zeros.
    """
    q0, q1 = _hull([segment.queries for segment in segments])
    k0, k1 = _hull([segment.keys for segment in segments])
    q_offsets, k_offsets = [0], [0]
    all_see = True

    def fill(q: int, k: int) -> None:
        nonlocal all_see
        if q > q_offsets[-1]:
            all_see = False
            q_offsets.append(q)
            k_offsets.append(k_offsets[-1])
        if k > k_offsets[-1]:
            q_offsets.append(q)
            k_offsets.append(k)

    for segment in segments:
        # Offsets count the tokens of earlier rows too.
        to_q = segment.row * (q1 - q0) - q0
        to_k = segment.row * (k1 - k0) - k0
        fill(segment.queries[0] + to_q, segment.keys[0] + to_k)
        q_offsets.append(segment.queries[1] + to_q)
        k_offsets.append(segment.keys[1] + to_k)
    fill(rows * (q1 - q0), rows * (k1 - k0))

    causal, left = segments[0].causal, segments[0].left
    longest_queries = max(end - begin for begin, end in pairwise(q_offsets))
    longest_keys = max(end - begin for begin, end in pairwise(k_offsets))
    of_queries = of_keys = _append(numbers, q_offsets)
    if k_offsets != q_offsets:
        of_keys = _append(numbers, k_offsets)
    return KernelCall(
        queries=slice(q0, q1),
        keys=slice(k0, k1),
        offsets=(of_queries, of_keys),
        causal=causal,
        left=left,
        longest_queries=longest_queries,
        longest_keys=longest_keys,
        all_see=all_see,
    )


def _hull(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in ranges), max(end for _, end in ranges)


def _append(numbers: list[int], offsets: Sequence[int]) -> slice:
    begin = len(numbers)
    numbers += offsets
    return slice(begin, len(numbers))
