"""Draw who holds what in a run: ``python -m tools.draw_run`` writes the README's ``docs/run.svg``.

The picture is computed from ``recipes/quickstart.toml``: the coordinates of each rank, the blocks
of each pipeline stage, the samples of each data-parallel rank and the heads of each
tensor-parallel rank. It shows a mesh of the axes pp, dp_shard and tp.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from composer3d.recipe.resolve import load
from composer3d.recipe.schema import Recipe
from composer3d.recipe.stages import stage_ranges
from composer3d.runtime.ranks import coordinates

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart.toml"
PICTURE = ROOT / "docs" / "run.svg"

# Sizes in pixels.
RANK_WIDTH, RANK_HEIGHT = 156, 96
RANK_GAP = 30  # between the ranks of one cell
CELL_PADDING = 16
STAGE_GAP, BATCH_GAP = 64, 56  # between the cells of two stages, and of two data-parallel ranks
LEFT, TOP = 128, 92
LEGEND_HEIGHT = 96

PAGE, INK, QUIET = "#ffffff", "#1f2328", "#59636e"
STAGE_FILLS = ("#ddf4ff", "#fff1e5", "#e6f7ea", "#f6e9ff")
PP_INK, DP_INK, TP_INK = "#bc4c00", "#0550ae", "#1a7f37"


class Box(NamedTuple):
    """A rectangle: its upper left corner and its size, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle_x(self) -> float:
        """The x of its centre."""
        return self.x + self.width / 2

    @property
    def middle_y(self) -> float:
        """The y of its centre."""
        return self.y + self.height / 2


def main(arguments: Sequence[str]) -> int:
    """Write the picture; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.draw_run", description="Draw who holds what in the quickstart run."
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE.svg", type=Path, default=PICTURE, help="default: docs/run.svg"
    )
    out = parser.parse_args(arguments).out
    out.write_text(draw(load(RECIPE).recipe))
    print(f"wrote {out}")
    return 0


def draw(recipe: Recipe) -> str:
    """Return the picture of a recipe as SVG.

    Raises:
        ValueError: the mesh has an axis that the picture does not show, or a rank has several
            stages.
    """
    mesh = recipe.mesh
    if mesh.dp_replicate > 1 or mesh.cp > 1 or recipe.parallel.stages_per_rank > 1:
        raise ValueError("the picture shows a mesh of pp, dp_shard and tp, one stage a rank")

    cell = Box(
        0,
        0,
        mesh.tp * RANK_WIDTH + (mesh.tp - 1) * RANK_GAP + 2 * CELL_PADDING,
        RANK_HEIGHT + 2 * CELL_PADDING,
    )
    width = LEFT + mesh.pp * cell.width + (mesh.pp - 1) * STAGE_GAP + CELL_PADDING
    legend_y = TOP + mesh.dp_shard * cell.height + (mesh.dp_shard - 1) * BATCH_GAP
    height = legend_y + LEGEND_HEIGHT

    def cell_at(stage: int, batch_rank: int) -> Box:
        x = LEFT + stage * (cell.width + STAGE_GAP)
        y = TOP + batch_rank * (cell.height + BATCH_GAP)
        return Box(x, y, cell.width, cell.height)

    parts = [_title(recipe, width)]
    for stage, blocks in enumerate(stage_ranges(recipe)):
        parts.append(_stage_heading(cell_at(stage, 0), stage, mesh.pp, blocks))
    for batch_rank in range(mesh.dp_shard):
        parts.append(_batch_heading(cell_at(0, batch_rank), recipe, batch_rank))
        for stage in range(mesh.pp):
            parts.append(_cell(cell_at(stage, batch_rank), stage))
    for rank in range(mesh.world_size):
        at = coordinates(rank, mesh)
        parts.append(_rank(cell_at(at["pp"], at["dp_shard"]), recipe, rank, at["tp"]))
    for batch_rank in range(mesh.dp_shard):
        for stage in range(mesh.pp):
            here = cell_at(stage, batch_rank)
            if stage + 1 < mesh.pp:
                parts.append(_pipeline_arrow(here))
            if batch_rank + 1 < mesh.dp_shard:
                parts.append(_data_arrow(here))
    parts.append(_legend(legend_y))

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">'
    )
    page = f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{PAGE}"/>'
    return "\n".join([head, page, *parts, "</svg>"]) + "\n"


def _title(recipe: Recipe, width: float) -> str:
    mesh = recipe.mesh
    title = (
        f"{RECIPE.name}: {mesh.world_size} processes = "
        f"pp {mesh.pp} x dp_shard {mesh.dp_shard} x tp {mesh.tp}"
    )
    return _text(width / 2, 32, title, size=18, weight="bold")


def _stage_heading(cell: Box, stage: int, stages: int, blocks: range) -> str:
    contents = [f"blocks {_span(blocks)}"]
    if stage == 0:
        contents.insert(0, "embedding")
    if stage == stages - 1:
        contents.append("norm and head")
    heading = f"stage {stage} (pp {stage}): {', '.join(contents)}"
    return _text(cell.middle_x, TOP - 18, heading, size=14, weight="bold")


def _batch_heading(cell: Box, recipe: Recipe, batch_rank: int) -> str:
    rows = recipe.data.global_batch // recipe.mesh.batch_ranks
    samples = range(batch_rank * rows, (batch_rank + 1) * rows)
    lines = [
        _text(LEFT / 2, cell.middle_y - 14, f"dp {batch_rank}", size=14, weight="bold"),
        _text(LEFT / 2, cell.middle_y + 6, f"samples {_span(samples)}", size=12),
        _text(LEFT / 2, cell.middle_y + 24, "of each step", size=12),
    ]
    return "\n".join(lines)


def _cell(cell: Box, stage: int) -> str:
    fill = STAGE_FILLS[stage % len(STAGE_FILLS)]
    return _rectangle(cell, fill=fill, stroke="none", radius=10)


def _rank(cell: Box, recipe: Recipe, rank: int, tp: int) -> str:
    mesh, shape = recipe.mesh, recipe.model
    x = cell.x + CELL_PADDING + tp * (RANK_WIDTH + RANK_GAP)
    box = Box(x, cell.y + CELL_PADDING, RANK_WIDTH, RANK_HEIGHT)
    heads = shape.n_heads // mesh.tp
    lines = [
        _rectangle(box, fill=PAGE, stroke=QUIET, radius=6),
        _text(box.middle_x, box.y + 24, f"rank {rank}", size=15, weight="bold"),
        _text(box.middle_x, box.y + 46, f"tp {tp}: heads {_span(_share(heads, tp))}", size=12),
        _text(box.middle_x, box.y + 64, f"keeps 1/{mesh.tp * mesh.dp_shard} of", size=12),
        _text(box.middle_x, box.y + 80, "the stage's matrices", size=12),
    ]
    if tp:  # to the rank before
        lines.append(_arrow(box.x - RANK_GAP, box.middle_y, box.x, box.middle_y, TP_INK))
    return "\n".join(lines)


def _share(size: int, index: int) -> range:
    return range(index * size, (index + 1) * size)


def _pipeline_arrow(cell: Box) -> str:
    begin = cell.x + cell.width
    return _arrow(begin, cell.middle_y, begin + STAGE_GAP, cell.middle_y, PP_INK)


def _data_arrow(cell: Box) -> str:
    begin = cell.y + cell.height
    return _arrow(cell.middle_x, begin, cell.middle_x, begin + BATCH_GAP, DP_INK)


def _legend(y: float) -> str:
    rows = [
        (PP_INK, "pp: activations go forward, their gradients come back, for each micro-batch"),
        (DP_INK, "dp_shard: weights are gathered before use; gradients are summed and cut"),
        (TP_INK, "tp: activations are gathered and reduce-scattered, twice in every block"),
    ]
    lines = []
    for index, (ink, words) in enumerate(rows):
        row_y = y + 28 + 22 * index
        lines.append(_arrow(LEFT, row_y - 4, LEFT + 36, row_y - 4, ink))
        lines.append(_text(LEFT + 50, row_y, words, size=13, anchor="start"))
    return "\n".join(lines)


def _span(numbers: range) -> str:
    """The first and the last of consecutive numbers, in words."""
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int,
    weight: str = "normal",
    anchor: str = "middle",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{INK}">{escape(words)}</text>'
    )


def _rectangle(box: Box, *, fill: str, stroke: str, radius: int) -> str:
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
        f'rx="{radius}" fill="{fill}" stroke="{stroke}"/>'
    )


def _arrow(x0: float, y0: float, x1: float, y1: float, ink: str) -> str:
    """A line with a point at both ends, horizontal or vertical."""
    point = 6
    if y0 == y1:
        ends = [
            f"{x0:g},{y0:g} {x0 + point:g},{y0 - 4:g} {x0 + point:g},{y0 + 4:g}",
            f"{x1:g},{y1:g} {x1 - point:g},{y1 - 4:g} {x1 - point:g},{y1 + 4:g}",
        ]
    else:
        ends = [
            f"{x0:g},{y0:g} {x0 - 4:g},{y0 + point:g} {x0 + 4:g},{y0 + point:g}",
            f"{x1:g},{y1:g} {x1 - 4:g},{y1 - point:g} {x1 + 4:g},{y1 - point:g}",
        ]
    line = (
        f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{ink}" stroke-width="2"/>'
    )
    return "\n".join([line, *(f'<polygon points="{end}" fill="{ink}"/>' for end in ends)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
