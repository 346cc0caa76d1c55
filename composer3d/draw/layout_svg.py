"""Draw who holds what, and who sends what to whom, as on a whiteboard.

Columns are pipeline ranks, rows are data-parallel ranks. In each of these cells, the columns are
tensor parallel ranks, and the rows are context parallel ranks.
"""

from itertools import combinations, product
from typing import NamedTuple

from composer3d.draw.layout import (
    AXIS_WORDS,
    AxisTraffic,
    NodeLayout,
    fold,
    operation_words,
)
from composer3d.draw.svg import (
    FAINT,
    MARGIN,
    PAPER,
    QUIET_INK,
    WIDTH,
    Area,
    Picture,
    text_width,
    wrap,
)
from composer3d.facts.text import bytes_text
from composer3d.planner.traffic import Axis
from composer3d.runtime.ranks import coordinates

_ROW_LABEL_WIDTH = 168
_RANK_WIDTH = 128  # at least
_LINE_HEIGHT = 14
FONT_SIZE, SMALLEST_FONT_SIZE = 11, 9.5
# Between ranks of tp and of cp, between cells of pp and of dp. An arrow and its bytes fit in.
TP_GAP, CP_GAP, PP_GAP, DP_GAP = 66, 44, 84, 52
_CELL_PADDING = 12
_MOST_ROWS = 8  # of rank boxes
_SPACE_IN_NODE = 7  # between the boxes of ranks and the line round their node
_HEADER_HEIGHT = 74

# Colours of Okabe and Ito, dark enough for text on white.
_INKS: dict[Axis, str] = {
    "tp": "#00724f",
    "cp": "#8a3c74",
    "ep": "#7a5a00",
    "fsdp": "#005a94",
    "efsdp": "#005a94",
    "dp_replicate": "#0b7fa8",
    "replicas": "#005a94",
    "expert_replicas": "#005a94",
    "pp": "#b34a00",
    "sequence": QUIET_INK,
    "stage": QUIET_INK,
    "world": QUIET_INK,
}
_CELL_FILLS = ("#eaf4fc", "#fdf0e4", "#eaf6f0", "#f7edf4")


class _Grid(NamedTuple):
    """The positions of each axis that are shown, and the size of a rank's box."""

    pp: tuple[int, ...]
    tp: tuple[int, ...]
    dp: tuple[int, ...]
    cp: tuple[int, ...]
    rank_width: float
    rank_height: float

    @property
    def cell_width(self) -> float:
        count = len(self.tp)
        return count * self.rank_width + (count - 1) * TP_GAP + 2 * _CELL_PADDING

    @property
    def cell_height(self) -> float:
        count = len(self.cp)
        return count * self.rank_height + (count - 1) * CP_GAP + 2 * _CELL_PADDING

    @property
    def width(self) -> float:
        count = len(self.pp)
        return count * self.cell_width + (count - 1) * PP_GAP

    @property
    def height(self) -> float:
        count = len(self.dp)
        return count * self.cell_height + (count - 1) * DP_GAP

    def cell(self, column: int, row: int, top: float) -> Area:
        """Return the cell at the given place among those that are shown."""
        x = MARGIN + _ROW_LABEL_WIDTH + column * (self.cell_width + PP_GAP)
        y = top + row * (self.cell_height + DP_GAP)
        return Area(x, y, self.cell_width, self.cell_height)

    def rank_box(self, cell: Area, column: int, row: int) -> Area:
        """Return the box of a rank at the given place in a cell."""
        x = cell.x + _CELL_PADDING + column * (self.rank_width + TP_GAP)
        y = cell.y + _CELL_PADDING + row * (self.rank_height + CP_GAP)
        return Area(x, y, self.rank_width, self.rank_height)


def draw(layout: NodeLayout, *, heading: str, notes: list[str]) -> str:
    """Return an SVG picture of a layout.

    Args:
        layout: what to draw.
        heading: the first line.
        notes: lines below it.
    """
    picture = Picture()
    y = picture.heading(heading, notes)
    y = _legend(picture, layout, y + 12)

    grid = _make_grid(layout)
    top = y + 14 + _HEADER_HEIGHT
    _draw_grid(picture, layout, grid, top)
    y = top + grid.height + 40
    y = _stage_table(picture, layout, y)
    y = _traffic_table(picture, layout, y + 26)
    return picture.document(WIDTH, y + MARGIN, heading)


def _make_grid(layout: NodeLayout) -> _Grid:
    """Choose how many ranks of each axis are shown: as many as fit, and evenly over the axes."""
    mesh = layout.recipe.mesh
    rank_height = 12 + _LINE_HEIGHT * (1 + len(_rank_lines(layout, 0)))
    # The last rank has the longest numbers, but for tokens: an early rank of cp has late tokens.
    longest = [*_rank_lines(layout, mesh.world_size - 1), *_token_lines(layout, 0)]
    rank_width = max(_RANK_WIDTH, *(6 + text_width(line, SMALLEST_FONT_SIZE) for line in longest))

    def grid_of(pp: int, tp: int, dp: int, cp: int) -> _Grid:
        return _Grid(
            fold(mesh.pp, pp),
            fold(mesh.tp, tp),
            fold(mesh.batch_ranks, dp),
            fold(mesh.cp, cp),
            rank_width,
            rank_height,
        )

    def limits(size: int) -> range:
        return range(min(2, size), min(size, _MOST_ROWS) + 1)

    def goodness(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, int]:
        return len(first) * len(second), min(len(first), len(second))

    room = WIDTH - 2 * MARGIN - _ROW_LABEL_WIDTH
    wide = [
        grid
        for pp, tp in product(limits(mesh.pp), limits(mesh.tp))
        if (grid := grid_of(pp, tp, 1, 1)).width <= room
    ]
    columns = max(wide, key=lambda grid: goodness(grid.pp, grid.tp))
    tall = [
        grid_of(1, 1, dp, cp)
        for dp, cp in product(limits(mesh.batch_ranks), limits(mesh.cp))
        if dp * cp <= _MOST_ROWS
    ]
    # A folded axis needs no more than a few of its ranks to show its pattern.
    if layout.recipe.world_size > 2 * _MOST_ROWS:
        most = 4 if mesh.cp == 1 else 6
        tall = [grid for grid in tall if len(grid.dp) * len(grid.cp) <= most]
    rows = max(tall, key=lambda grid: goodness(grid.dp, grid.cp))
    return _Grid(columns.pp, columns.tp, rows.dp, rows.cp, rank_width, rank_height)


def _draw_grid(picture: Picture, layout: NodeLayout, grid: _Grid, top: float) -> None:
    mesh = layout.recipe.mesh
    boxes: dict[int, Area] = {}
    for column, pp_rank in enumerate(grid.pp):
        _column_header(picture, layout, pp_rank, grid.cell(column, 0, top))
        for row in range(len(grid.dp)):
            fill = _CELL_FILLS[column % len(_CELL_FILLS)]
            picture.rectangle(grid.cell(column, row, top), fill=fill, radius=8)
    for row, batch_rank in enumerate(grid.dp):
        _row_header(picture, layout, batch_rank, grid.cell(0, row, top))

    places = product(
        enumerate(grid.pp),
        enumerate(grid.dp),
        enumerate(grid.cp),
        enumerate(grid.tp),
    )
    for (column, pp), (row, dp), (cp_row, cp), (tp_column, tp) in places:
        rank = ((pp * mesh.batch_ranks + dp) * mesh.cp + cp) * mesh.tp + tp
        box = grid.rank_box(grid.cell(column, row, top), tp_column, cp_row)
        boxes[rank] = box
    _nodes(picture, layout, boxes)
    for rank, box in boxes.items():
        _rank(picture, layout, rank, box)
    _arrows(picture, layout, grid, top)


def _column_header(picture: Picture, layout: NodeLayout, pp_rank: int, cell: Area) -> None:
    """Write what a pipeline rank holds above its column; long lists are cut after three lines."""
    mesh = layout.recipe.mesh
    words = layout.stage_words(pp_rank)
    title = f"pp {pp_rank}: {words}" if mesh.pp > 1 else "all layers"
    lines = wrap(layout.layer_words(pp_rank), FONT_SIZE, cell.width + PP_GAP / 2)
    if len(lines) > 3:
        lines = [*lines[:2], "(see the table below)"]
    y = cell.y - 18 - _LINE_HEIGHT * len(lines)
    if text_width(title, 13) > cell.width + PP_GAP / 2:
        title = f"pp {pp_rank}"
    picture.text(cell.middle_x, y, title, size=13, bold=True, anchor="middle")
    for line in lines:
        y += _LINE_HEIGHT
        picture.text(cell.middle_x, y, line, size=FONT_SIZE, anchor="middle")


def _row_header(picture: Picture, layout: NodeLayout, batch_rank: int, cell: Area) -> None:
    mesh = layout.recipe.mesh
    replica, shard = divmod(batch_rank, mesh.dp_shard)
    lines = []
    if mesh.dp_replicate > 1:
        lines.append(f"dp_replicate {replica}")
    lines.append(f"dp_shard {shard}")
    y = cell.middle_y - _LINE_HEIGHT * len(lines) / 2
    for line in lines:
        picture.text(MARGIN, y, line, size=13, bold=True)
        y += _LINE_HEIGHT + 2
    for line in wrap(layout.sample_words(batch_rank), FONT_SIZE, _ROW_LABEL_WIDTH - 10):
        picture.text(MARGIN, y, line, size=FONT_SIZE)
        y += _LINE_HEIGHT


def _rank_lines(layout: NodeLayout, rank: int) -> list[str]:
    """Return the lines in the box of a rank, below its number."""
    cp_rank = coordinates(rank, layout.recipe.mesh)["cp"]
    return [
        layout.place_of(rank),
        *layout.share_words(rank),
        *_token_lines(layout, cp_rank),
    ]


def _token_lines(layout: NodeLayout, cp_rank: int) -> list[str]:
    """Return the tokens of a context parallel rank, a line for each range of them."""
    if layout.recipe.mesh.cp == 1:
        return []
    return layout.token_words(cp_rank).split(", ")


def _rank(picture: Picture, layout: NodeLayout, rank: int, box: Area) -> None:
    picture.rectangle(box, fill=PAPER, stroke=QUIET_INK, radius=5)
    y = box.y + 16
    picture.text(box.middle_x, y, f"rank {rank}", size=12, bold=True, anchor="middle")
    for line in _rank_lines(layout, rank):
        y += _LINE_HEIGHT
        size = min(FONT_SIZE, FONT_SIZE * (box.width - 6) / text_width(line, FONT_SIZE))
        picture.text(box.middle_x, y, line, size=size, anchor="middle")


def _nodes(picture: Picture, layout: NodeLayout, boxes: dict[int, Area]) -> None:
    """Draw a dashed line round the shown ranks of each node, if these are rectangles."""
    of_nodes: dict[int, list[Area]] = {}
    for rank, box in sorted(boxes.items()):
        of_nodes.setdefault(rank // layout.gpus_per_node, []).append(box)
    outlines = [_outline(own) for own in of_nodes.values()]
    if any(_overlap(a, b) for a, b in combinations(outlines, 2)):
        return  # Each rank names its node.
    for box in outlines:
        picture.rectangle(box, fill="none", stroke=QUIET_INK, radius=8, dashed=True)


def _outline(boxes: list[Area]) -> Area:
    """Return the box that holds some boxes, with space around them."""
    x = min(box.x for box in boxes) - _SPACE_IN_NODE
    y = min(box.y for box in boxes) - _SPACE_IN_NODE
    right = max(box.right for box in boxes) + _SPACE_IN_NODE
    bottom = max(box.bottom for box in boxes) + _SPACE_IN_NODE
    return Area(x, y, right - x, bottom - y)


def _overlap(a: Area, b: Area) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


class _Gap(NamedTuple):
    """The space between two neighbouring boxes, and the axis that they exchange bytes on.

    ``hidden`` is the number of ranks that are left out between them.
    """

    area: Area
    axis: Axis
    hidden: int


def _arrows(picture: Picture, layout: NodeLayout, grid: _Grid, top: float) -> None:
    """Draw the traffic between neighbours. The first arrow of each axis has its bytes."""
    across, down = [], []
    for column, row in product(range(len(grid.pp)), range(len(grid.dp))):
        cell = grid.cell(column, row, top)
        if column + 1 < len(grid.pp):
            area = Area(cell.right, cell.y, PP_GAP, cell.height)
            across.append(_Gap(area, "pp", _hidden_after(grid.pp, column)))
        if row + 1 < len(grid.dp):
            area = Area(cell.x, cell.bottom, cell.width, DP_GAP)
            axis = _data_axis(layout, grid.dp[row], grid.dp[row + 1])
            down.append(_Gap(area, axis, _hidden_after(grid.dp, row)))

        ranks = product(range(len(grid.tp)), range(len(grid.cp)))
        for tp_column, cp_row in ranks:
            box = grid.rank_box(cell, tp_column, cp_row)
            if tp_column + 1 < len(grid.tp):
                area = Area(box.right, box.y, TP_GAP, box.height)
                across.append(_Gap(area, "tp", _hidden_after(grid.tp, tp_column)))
            if cp_row + 1 < len(grid.cp):
                area = Area(box.x, box.bottom, box.width, CP_GAP)
                down.append(_Gap(area, "cp", _hidden_after(grid.cp, cp_row)))

    labelled: set[Axis] = set()
    for gaps, draw_gap in ((across, _across), (down, _down)):
        for gap in gaps:
            forward_bytes, backward_bytes = layout.most_sent(gap.axis)
            words: tuple[str, ...] = ()
            if gap.axis not in labelled:
                words = (bytes_text(forward_bytes), bytes_text(backward_bytes))
                labelled.add(gap.axis)
            draw_gap(picture, gap, words)


def _hidden_after(shown: tuple[int, ...], index: int) -> int:
    """Return how many positions are left out after the one at ``index``."""
    return shown[index + 1] - shown[index] - 1


def _data_axis(layout: NodeLayout, batch_rank: int, other: int) -> Axis:
    """Return the axis on which two data-parallel ranks exchange parameters or gradients."""
    if layout.recipe.parallel.zero == 0:
        return "replicas"
    shards = layout.recipe.mesh.dp_shard
    return "fsdp" if batch_rank // shards == other // shards else "dp_replicate"


def _across(picture: Picture, gap: _Gap, words: tuple[str, ...]) -> None:
    """Draw arrows between two columns, with the bytes of forward above, of backward below."""
    area, ink = gap.area, _INKS[gap.axis]
    left, right, middle = area.x + 3, area.right - 3, area.middle_y
    picture.arrow(left, middle - 6, right, middle - 6, ink=ink)
    picture.arrow(right, middle + 6, left, middle + 6, ink=ink)
    for line, y in zip(words, (middle - 14, middle + 22), strict=False):
        picture.text(area.middle_x, y, line, size=10, anchor="middle", ink=ink)
    if gap.hidden:
        line, y = f"{gap.hidden} more", middle + (33 if words else 22)
        picture.text(area.middle_x, y, line, size=10, anchor="middle", ink=QUIET_INK)


def _down(picture: Picture, gap: _Gap, words: tuple[str, ...]) -> None:
    """Draw arrows between two rows, with the bytes of forward and of backward on their right."""
    area, ink = gap.area, _INKS[gap.axis]
    top, bottom, middle = area.y + 3, area.bottom - 3, area.middle_x
    picture.arrow(middle - 6, top, middle - 6, bottom, ink=ink)
    picture.arrow(middle + 6, bottom, middle + 6, top, ink=ink)
    lines = [(line, ink) for line in words]
    if gap.hidden:
        lines.append((f"{gap.hidden} more", QUIET_INK))
    y = area.middle_y + 4 - 6 * (len(lines) - 1)
    for line, line_ink in lines:
        picture.text(middle + 16, y, line, size=10, ink=line_ink)
        y += 12


def _legend(picture: Picture, layout: NodeLayout, y: float) -> float:
    """Draw the meaning of lines and numbers; return the y below."""
    shown = layout.axes
    x = float(MARGIN)
    axes: tuple[Axis, ...] = ("pp", "fsdp", "replicas", "dp_replicate", "cp", "tp")
    for axis in axes:
        if axis not in shown:
            continue
        words = f"{axis}: {AXIS_WORDS[axis]}"
        if x + 30 + text_width(words, 12) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        picture.line(x, y + 6, x + 22, y + 6, ink=_INKS[axis], width=3)
        picture.text(x + 28, y + 10, words, size=12)
        x += 28 + text_width(words, 12) + 16
    words = "a node"
    if x + 30 + text_width(words, 12) > WIDTH - MARGIN:
        x, y = float(MARGIN), y + 20
    picture.rectangle(Area(x, y, 22, 12), fill="none", stroke=QUIET_INK, radius=3, dashed=True)
    picture.text(x + 28, y + 10, words, size=12)
    y += 18
    rule = (
        "Bytes at an arrow: the most that a rank sends on the axis in a step, first in forward, "
        "then in backward."
    )
    picture.text(MARGIN, y + 12, rule, size=12)
    return y + 22


def _stage_table(picture: Picture, layout: NodeLayout, y: float) -> float:
    """List the layers of every pipeline rank; return the y below."""
    mesh = layout.recipe.mesh
    if mesh.pp == 1:
        return y
    picture.text(MARGIN, y, "Pipeline ranks", size=14, bold=True)
    y += 8
    stage_ranks = mesh.world_size // mesh.pp
    for pp_rank in range(mesh.pp):
        first = pp_rank * stage_ranks
        ranks = f"rank {first:,}"
        if stage_ranks > 1:
            ranks = f"ranks {first:,} to {first + stage_ranks - 1:,}"
        words = f"{layout.stage_words(pp_rank)}: {layout.layer_words(pp_rank)}"
        lines = wrap(words, 12, WIDTH - 2 * MARGIN - 240)
        for index, line in enumerate(lines):
            y += 16
            if index == 0:
                picture.text(MARGIN, y, f"pp {pp_rank}", size=12, bold=True)
                picture.text(MARGIN + 52, y, ranks, size=12, ink=QUIET_INK)
            picture.text(MARGIN + 240, y, line, size=12)
    return y


_COLUMNS = (("axis", 0.0), ("ranks", 190.0), ("operations in a step", 400.0))
# Beside these, the places of the numbers: bytes in forward and backward, inside nodes and between.
_NUMBERS = (800.0, 890.0, 980.0, 1070.0)


def _traffic_table(picture: Picture, layout: NodeLayout, y: float) -> float:
    """List the traffic of the busiest pipeline rank by axis; return the y below."""
    title = "What one rank sends in a step"
    if layout.recipe.mesh.pp > 1:
        title += f" (a rank of pp {layout.busiest}, which sends the most)"
    picture.text(MARGIN, y, title, size=14, bold=True)
    y += 22
    for words, x in _COLUMNS:
        picture.text(MARGIN + x, y, words, size=12, ink=QUIET_INK)
    link = layout.node_link
    for words, x in zip(("forward", "backward", link, "NIC"), _NUMBERS, strict=True):
        picture.text(MARGIN + x + 80, y, words, size=12, ink=QUIET_INK, anchor="end")
    y += 6
    picture.line(MARGIN, y, WIDTH - MARGIN, y, ink=FAINT)
    for row in layout.traffic(layout.busiest):
        y += 18
        picture.text(MARGIN, y, row.axis, size=12, bold=True, ink=_INKS[row.axis])
        picture.text(MARGIN + _COLUMNS[1][1], y, _group_words(row), size=12)
        numbers = (row.forward_bytes, row.backward_bytes, row.node_bytes, row.nic_bytes)
        for x, count in zip(_NUMBERS, numbers, strict=True):
            words = bytes_text(count) if count else "-"
            picture.text(MARGIN + x + 80, y, words, size=12, anchor="end")
        lines = wrap(operation_words(row.flows), 12, 410)
        for index, line in enumerate(lines):
            y += 15 if index else 0
            picture.text(MARGIN + _COLUMNS[2][1], y, line, size=12)
    rules = (
        f"forward + backward = {link} + NIC. Backward includes what is sent once a step. {link} is "
        "the link inside a node, NIC the one between nodes: the mean over all such ranks. "
        "Collectives go round a ring in the order of ranks."
    )
    y += 8
    for line in wrap(rules, 11, WIDTH - 2 * MARGIN):
        y += 15
        picture.text(MARGIN, y, line, size=11, ink=QUIET_INK)
    return y


def _group_words(row: AxisTraffic) -> str:
    """Return the ranks of a group in words: "0, 8, ..., 120 (16)"."""
    ranks = row.group.ranks
    shown = ", ".join(map(str, ranks))
    if len(ranks) > 3:
        shown = f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"{shown} ({len(ranks)})"
