"""The rectangles of attention scores that a rank computes.

In each round of the ring, a rank has its own queries and some keys: its own, those of another rank,
or those of all ranks. ``tiles`` cuts the visible scores into rectangles, and into squares with a
causal diagonal. Kernels compute both without a mask. A mask is needed only at the far edge of a
sliding window, of at most ``BAND`` x ``BAND`` booleans.

Rectangles are enough for packed documents too. A document is a run of consecutive tokens, so a
chunk of queries and an earlier chunk of keys have at most one document in common.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from composer3d.facts.limits import JOB
from composer3d.parallel.context.ownership import OwnedRange

# The most queries in a tile at the edge of a window, or of a kernel that builds all scores.
BAND = JOB.band

# Values of ``window`` that are not a width.
NO_WINDOW = 0  # a query sees all keys of its document up to its own
NOT_CAUSAL = -1  # a query sees all keys of its document

# The first position, and the one after the last.
Positions = tuple[int, int]

# For each row, the first positions of its documents, except 0. None: each row is one document.
Starts = tuple[tuple[int, ...], ...] | None


class Tile(NamedTuple):
    """One call of a kernel: some queries of this rank, and some keys.

    Attributes:
        rows: samples of the micro-batch.
        queries: places in this rank's shard.
        keys: places in the shard of the keys.
        causal: whether the tile is a square on the diagonal, in which a query sees the keys up to
            its own.
        mask: (1, 1, queries, keys), true where a query sees a key. None: a query sees all keys, or,
            in a causal tile, those up to its own.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    mask: Tensor | None = None

    @property
    def all_see(self) -> bool:
        """Whether every query sees a key."""
        return self.mask is None


class TokenRun(NamedTuple):
    """Consecutive tokens of one document on one rank.

    Attributes:
        shift: a token's position in the sequence minus its place in the rank's shard.
        positions: the positions of the tokens in the sequence.
        document: the number of the document in its row.
    """

    shift: int
    positions: Positions
    document: int


class _Rectangle(NamedTuple):
    """A rectangle of visible scores.

    Attributes:
        queries, keys: their positions in the sequence.
        kind: "diagonal" is a causal square. In "full", every query sees every key. In "edge", the
            sliding window ends within the rectangle.
    """

    queries: Positions
    keys: Positions
    kind: Literal["diagonal", "full", "edge"]


def starts_of(documents_BT: Tensor | None) -> Starts:
    """Return the positions in each row at which a document other than the first one starts."""
    if documents_BT is None:
        return None
    starts: list[list[int]] = [[] for _ in range(len(documents_BT))]
    documents_BT = documents_BT.cpu()
    # This runs in each layer: two operators, for any number of rows.
    for row, last in (documents_BT[:, 1:] != documents_BT[:, :-1]).nonzero().tolist():
        starts[row].append(last + 1)
    return tuple(map(tuple, starts))


# Few entries: documents differ in each micro-batch, and an entry may have hundreds of tiles.
@lru_cache(maxsize=256)
def tiles(
    queries: tuple[OwnedRange, ...],
    keys: tuple[OwnedRange, ...],
    starts: Starts,
    window: int,
    device: torch.device,
    banded: bool = False,
    fake_mode: object | None = None,
) -> tuple[Tile, ...]:
    """Cut the visible scores of ``queries`` with ``keys`` into tiles.

    The tile with a query's own key, if there is one, comes before the query's other tiles:
    ``ring.attend_in_rounds`` stores what a causal tile returns, and merges it with nothing.

    Args:
        queries, keys: the ranges of tokens that the rank of the queries holds, and those of the
            keys.
        starts: from ``starts_of``.
        window: a query sees the last ``window`` keys up to its own; or ``NO_WINDOW``, or
            ``NOT_CAUSAL``.
        device: the device of the masks.
        banded: limit a tile to ``BAND`` queries, for a kernel that builds all scores of a tile.
        fake_mode: of the queries (``torch_private.fake_mode_of``). Tiles are kept between calls,
            and the masks of a dry run must not reach another one.
    """
    # Samples of the micro-batch, with the starts of their documents.
    row_groups: list[tuple[slice, tuple[int, ...]]] = [(slice(None), ())]
    if starts is not None:
        row_groups = [(slice(row, row + 1), cuts) for row, cuts in enumerate(starts)]

    found: list[Tile] = []
    for rows, cuts in row_groups:
        key_runs: dict[int, list[TokenRun]] = {}
        for key_run in reversed(list(runs_of(keys, cuts))):
            key_runs.setdefault(key_run.document, []).append(key_run)
        for query_run in runs_of(queries, cuts):
            for key_run in key_runs.get(query_run.document, ()):
                for rectangle in _visible(query_run.positions, key_run.positions, window, banded):
                    found.append(
                        _tile(
                            rows,
                            rectangle,
                            query_run.shift,
                            key_run.shift,
                            window,
                            device,
                            fake_mode,
                        )
                    )

    # One call, where the visible scores are one rectangle or triangle. Causal tiles fill a triangle
    # only if queries and keys are the same tokens, which they are not with all-gather.
    is_uncut = starts is None and window in (NO_WINDOW, NOT_CAUSAL) and not banded
    if is_uncut and len(found) > 1 and (queries == keys or not any(t.causal for t in found)):
        # The visible chunks are adjacent in the shards. Places ascend with positions, so the causal
        # diagonal of the joined tile is right as well.
        return (
            Tile(
                rows=slice(None),
                queries=_hull([tile.queries for tile in found]),
                keys=_hull([tile.keys for tile in found]),
                causal=queries == keys and window == NO_WINDOW,
            ),
        )
    return tuple(found)


def _tile(
    rows: slice,
    rectangle: _Rectangle,
    query_shift: int,
    key_shift: int,
    window: int,
    device: torch.device,
    fake_mode: object | None,
) -> Tile:
    (q0, q1), (k0, k1) = rectangle.queries, rectangle.keys
    mask = None
    if rectangle.kind == "edge":
        mask = _window_mask(q0 - k0, q1 - q0, k1 - k0, window, device, fake_mode)
    return Tile(
        rows=rows,
        queries=slice(q0 - query_shift, q1 - query_shift),
        keys=slice(k0 - key_shift, k1 - key_shift),
        causal=rectangle.kind == "diagonal",
        mask=mask,
    )


def _hull(slices: list[slice]) -> slice:
    return slice(min(part.start for part in slices), max(part.stop for part in slices))


@lru_cache
def _window_mask(
    distance: int,
    queries: int,
    keys: int,
    window: int,
    device: torch.device,
    fake_mode: object | None,
) -> Tensor:
    """Return the mask of a tile at the edge of a window, which is kept for each ``fake_mode``.

    ``distance`` is the position of the first query minus that of the first key.
    """
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    return mask.triu(distance - window + 1)


def runs_of(owned: tuple[OwnedRange, ...], cuts: tuple[int, ...]) -> Iterator[TokenRun]:
    """Cut a rank's tokens into runs, at the starts of documents."""
    for place, first, count in owned:
        end = first + count
        inner = cuts[bisect_right(cuts, first) : bisect_right(cuts, end - 1)]
        for run_begin, run_end in pairwise((first, *inner, end)):
            document = bisect_right(cuts, run_begin)
            yield TokenRun(shift=first - place, positions=(run_begin, run_end), document=document)


def _visible(q: Positions, k: Positions, window: int, banded: bool) -> Iterator[_Rectangle]:
    """Yield the rectangles in which queries ``q`` see keys ``k``, two runs of one document.

    ``k`` must contain either all tokens of ``q`` or none of them.
    """
    (q0, q1), (k0, k1) = q, k
    has_edge = 0 < window < q1 - k0
    step = q1 - q0
    if has_edge:
        step = min(window, BAND)
    elif banded:
        step = BAND

    for begin in range(q0, q1, step):
        end = min(begin + step, q1)
        if window == NOT_CAUSAL:
            yield _Rectangle((begin, end), k, "full")
            continue
        if k0 <= begin < k1:
            yield _Rectangle((begin, end), (begin, end), "diagonal")
        keys_before = min(begin, k1)
        first_seen_by_all = max(k0, end - window) if has_edge else k0
        if first_seen_by_all < keys_before:
            yield _Rectangle((begin, end), (first_seen_by_all, keys_before), "full")
        first_seen = max(k0, begin - window + 1)
        if has_edge and first_seen < min(first_seen_by_all, keys_before):
            edge = (first_seen, min(first_seen_by_all, keys_before))
            yield _Rectangle((begin, end), edge, "edge")
