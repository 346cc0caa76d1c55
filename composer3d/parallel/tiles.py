"""Which rectangles of the scores a rank computes: all that its queries see; what is hidden, within a mask alone.

A sequence of T tokens lies over ``size`` ranks, n = T / size on each. In balanced order it is cut into 2 size chunks,
and rank r holds chunks r and 2 size - 1 - r, the zigzag of ring-flash-attention after Brandon et al. 2023 (Striped
Attention, arXiv 2311.09431); else rank r holds the r-th of ``size``. A document is a run of consecutive tokens, so that
a chunk and a later one share one at most: with documents too, what is seen falls into rectangles, causal squares and,
at the far edge of a window, small triangles. Only those need a mask, of ``BAND`` x ``BAND`` booleans or fewer.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BAND = 256  # queries that share their keys at the edge of a window
Range = tuple[int, int]
Span = tuple[int, int, int]  # tokens that follow each other: first place in the shard, first position, how many
Starts = tuple[tuple[int, ...], ...] | None  # by row, where documents start; None: every row is one


class Tile(NamedTuple):
    """Queries and keys of some rows, by their places in the shards: a square that is causal, or a rectangle.

    ``seen`` (1, 1, queries, keys): which of the keys a query sees; None: all of them.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    seen: Tensor | None = None


def spans(rank: int, size: int, tokens: int, balanced: bool) -> tuple[Span, ...]:
    """What ``rank`` holds of a sequence, ``tokens`` on each rank."""
    if size == 1 or not balanced:
        return ((0, rank * tokens, tokens),)
    half = tokens // 2
    return (0, rank * half, half), (half, (2 * size - 1 - rank) * half, half)


def starts_of(documents_BT: Tensor | None) -> Starts:
    """Where the documents of each row start, but for its first token: where the number changes."""
    if documents_BT is None:
        return None
    return tuple(tuple((row.diff().nonzero().flatten() + 1).tolist()) for row in documents_BT.cpu())


@lru_cache(maxsize=256)  # an entry may hold hundreds of tiles: documents differ in each micro-batch
def tiles(
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    starts: Starts,
    window: int,
    device: torch.device,
    banded: bool = False,
) -> tuple[Tile, ...]:
    """What the ``queries`` see of the ``keys``. Where they see their own, squares on the diagonal come first.

    ``window``: a query sees its own key and ``window`` - 1 before it; 0: all before it; -1: all, later ones too.
    ``banded``: no tile has more than ``BAND`` queries, for a kernel that makes all scores of one.
    """
    found: list[Tile] = []
    for row, cuts in enumerate(((),) if starts is None else starts):
        rows = slice(None) if starts is None else slice(row, row + 1)
        held: dict[int, list[tuple[int, Range]]] = {}
        for key_shift, k, document in list(_runs(keys, cuts))[::-1]:
            held.setdefault(document, []).append((key_shift, k))
        for shift, q, document in _runs(queries, cuts):
            for key_shift, k in held.get(document, ()):
                for (q0, q1), (k0, k1), kind in _visible(q, k, window, banded):
                    seen = _near(q0 - k0, q1 - q0, k1 - k0, window, device) if kind == "edge" else None
                    mine, theirs = slice(q0 - shift, q1 - shift), slice(k0 - key_shift, k1 - key_shift)
                    found.append(Tile(rows, mine, theirs, kind == "own", seen))
    one_call = starts is None and window <= 0 and not banded and len(found) > 1
    if one_call and (queries == keys or not any(tile.causal for tile in found)):
        # Chunks that lie side by side in the shards: one call of a kernel. Places ascend with positions.
        _, *parts = list(zip(*found, strict=True))[:3]
        mine, theirs = (slice(min(part.start for part in each), max(part.stop for part in each)) for each in parts)
        return (Tile(slice(None), mine, theirs, queries == keys and window == 0),)
    return tuple(found)


@lru_cache
def _near(ahead: int, queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(1, 1, queries, keys): which keys the window of a query holds, the first of each being ``ahead`` apart."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).triu(ahead - window + 1)


def _runs(spans: tuple[Span, ...], cuts: tuple[int, ...]) -> Iterator[tuple[int, Range, int]]:
    """Positions of one document that follow each other: what to take off to get a place, first and end, document."""
    for place, first, tokens in spans:
        inner = cuts[bisect_right(cuts, first) : bisect_right(cuts, first + tokens - 1)]
        for begin, end in pairwise((first, *inner, first + tokens)):
            yield first - place, (begin, end), bisect_right(cuts, begin)


def _visible(q: Range, k: Range, window: int, banded: bool) -> Iterator[tuple[Range, Range, str]]:
    """Queries and keys that see each other, of two runs of one document; the keys hold those of all queries or none."""
    (q0, q1), (k0, k1) = q, k
    narrow = 0 < window < q1 - k0
    step = min(window, BAND) if narrow else BAND if banded else q1 - q0
    for begin in range(q0, q1, step):
        end = min(begin + step, q1)
        if window < 0:
            yield (begin, end), k, "whole"
            continue
        if k0 <= begin < k1:
            yield (begin, end), (begin, end), "own"
        before = min(begin, k1)
        by_all = max(k0, end - window) if narrow else k0  # the first key that all of these queries see
        if by_all < before:
            yield (begin, end), (by_all, before), "whole"
        first = max(k0, begin - window + 1)
        if narrow and first < min(by_all, before):
            yield (begin, end), (first, min(by_all, before)), "edge"
