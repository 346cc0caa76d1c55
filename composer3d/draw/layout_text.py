"""Print who holds what, and who sends what, with characters."""

from composer3d.draw.layout import (
    NodeLayout,
    fold,
    operation_words,
)
from composer3d.draw.terminal import Style
from composer3d.facts.text import bytes_text
from composer3d.runtime.ranks import coordinates

_MOST_RANKS = 16  # that are listed


def render(layout: NodeLayout, style: Style) -> str:
    """Return a layout as text: pipeline ranks, ranks on nodes, and the traffic of each axis."""
    return "\n".join([*_stages(layout), *_ranks(layout, style), *_traffic(layout)]) + "\n"


def _stages(layout: NodeLayout) -> list[str]:
    if layout.recipe.mesh.pp == 1:
        return []
    return [
        f"pp {pp_rank}: {layout.stage_words(pp_rank)}: {layout.layer_words(pp_rank)}"
        for pp_rank in range(layout.recipe.mesh.pp)
    ] + [""]


def _ranks(layout: NodeLayout, style: Style) -> list[str]:
    """List ranks by node. Of a large job, the first node, the second one and the last are shown."""
    mesh = layout.recipe.mesh
    shown = fold(layout.nodes, max(3, _MOST_RANKS // layout.gpus_per_node))
    if layout.recipe.world_size <= _MOST_RANKS:
        shown = tuple(range(layout.nodes))
    lines = []
    for index, node in enumerate(shown):
        if index and node - shown[index - 1] > 1:
            lines.append(f"... {node - shown[index - 1] - 1} more nodes ...")
        lines.append(_rule(f"node {node}", style))
        first = node * layout.gpus_per_node
        for rank in range(first, min(first + layout.gpus_per_node, mesh.world_size)):
            lines.append(f"  {_rank(layout, rank)}")
    return [*lines, ""]


def _rule(words: str, style: Style) -> str:
    line = "─" if style.has_unicode else "-"
    return f"{line * 2} {words} {line * (40 - len(words))}"


def _rank(layout: NodeLayout, rank: int) -> str:
    mesh = layout.recipe.mesh
    at = coordinates(rank, mesh)
    place = " ".join(f"{axis}{at[axis]}" for axis in at if getattr(mesh, axis) > 1)
    words = [layout.stage_words(at["pp"])] if mesh.pp > 1 else []
    words += layout.share_words(rank)
    words.append(layout.sample_words(at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]))
    if mesh.cp > 1:
        words.append(layout.token_words(at["cp"]))
    name = f"rank {rank} ({place})" if place else f"rank {rank}"
    return f"{name}: {'; '.join(words)}"


def _traffic(layout: NodeLayout) -> list[str]:
    title = "bytes that one rank sends in a step"
    if layout.recipe.mesh.pp > 1:
        title += f" (a rank of pp {layout.busiest}, which sends the most)"
    lines = [
        title,
        f"{'axis':<16}{'ranks':>6}{'forward':>10}{'backward':>10}{layout.node_link:>10}{'NIC':>10}",
    ]
    for row in layout.traffic(layout.busiest):
        numbers = (row.forward_bytes, row.backward_bytes, row.node_bytes, row.nic_bytes)
        cells = "".join(f"{bytes_text(count) if count else '-':>10}" for count in numbers)
        operations = operation_words(row.flows)
        lines.append(f"{row.axis:<16}{row.group.size:>6}{cells}  {operations}")
    return lines
