"""Faults of documents and windows where only GPUs take the path: ``parallel/context/packed.py``.

The second step of a proof takes it, with ``verify.segments`` in place of a GPU's kernel.
"""

from collections.abc import Callable, Iterator
from typing import Any

from composer3d.parallel.context import packed, ring
from tools.prove.faults.places import PACKED, harms
from tools.prove.faults.plant import fault_by, instead_of


def _change_edges(change: Callable[[Any], Any]) -> None:
    """Change the segments of documents in which a window ends."""

    @instead_of(packed, packed._segments_with_edge)
    def wrong(right: Any, *arguments: Any) -> Iterator[Any]:
        return map(change, right(*arguments))


@harms("mesh.dp_shard=2 model.window=16", f"mesh.cp=2 model.window=16 {PACKED}")
def see_one_key_too_many() -> None:
    """Windows of a GPU: a query sees one key more than the window has."""
    _change_edges(
        lambda segment: segment._replace(left=segment.left + 1) if segment.left >= 0 else segment
    )


@harms("mesh.cp=2 model.window=16")
@fault_by(_change_edges)
def lose_the_first_key(segment: Any) -> Any:
    """Windows of a GPU: the first key of a segment is left out, except where it is the only one."""
    begin, end = segment.keys
    is_cut = not segment.causal and end - begin > 1
    return segment._replace(keys=(begin + 1, end)) if is_cut else segment


@harms("mesh.cp=2 model.window=16")
def let_windows_end_with_the_last_edge() -> None:
    """Windows of a GPU: an edge inside of a document is not looked for."""
    packed._segments_with_edge = lambda row, queries, keys, window: packed._segments_without_edge(
        row, queries, keys, window, -1
    )


@harms(f"mesh.cp=2 {PACKED}")
def let_documents_begin_one_late() -> None:
    """Documents of a GPU: each one but the first begins a token late."""

    @instead_of(ring, ring.plan_calls)
    def wrong(
        right: Any, rank: int, size: int, rows: int, tokens: int, starts: Any, *others: Any
    ) -> Any:
        late = starts and tuple(
            tuple(start + (0 < start < tokens * size - 1) for start in row) for row in starts
        )
        return right(rank, size, rows, tokens, late, *others)
