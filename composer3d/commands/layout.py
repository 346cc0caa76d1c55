"""``composer3d layout``: draw what each rank holds and sends.

It answers without torch, unless the architecture is a user's own.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer3d.commands.arguments import (
    gpus_option,
    gpus_per_node_option,
    json_option,
    picture_option,
    recipe_argument,
    set_option,
)
from composer3d.draw import layout_svg, layout_text
from composer3d.draw.files import write_picture
from composer3d.draw.layout import AxisTraffic, NodeLayout, make_layout
from composer3d.draw.terminal import style_of
from composer3d.facts.text import one_line
from composer3d.recipe.resolve import load
from composer3d.recipe.schema import AXES, Recipe

EXAMPLES = (
    "composer3d layout quickstart",
    "composer3d layout llama3-405b-16384-3d -o layout.svg",
)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    recipe: str = recipe_argument()
    sets: Sequence[str] = set_option()
    as_json: bool = json_option()
    gpus: int | None = gpus_option()
    out: str | None = picture_option()
    gpus_per_node: int = gpus_per_node_option(help="ranks of a node; default: %(default)s")


def run(options: Options) -> int:
    """Draw the mesh of a recipe: nodes, layers, shards, samples, and the bytes of each axis.

    Raises:
        UserError: the recipe cannot be used, or the file cannot be written.
    """
    chosen = load(options.recipe, options.sets, world_size=options.gpus, may_import=True).recipe
    layout = make_layout(chosen, options.gpus_per_node)
    heading = f"{os.path.basename(options.recipe)}: {mesh_words(chosen)}"
    note = note_of(layout)
    if options.out is not None:
        write_picture(options.out, layout_svg.draw(layout, heading=heading, notes=[note]))
    if options.as_json:
        print(json.dumps(_as_json(layout)))
    elif options.out is None:
        print(heading, note, "", layout_text.render(layout, style_of(sys.stdout)), sep="\n", end="")
    else:
        print(f"wrote {one_line(options.out)}")
    return 0


def mesh_words(recipe: Recipe) -> str:
    """Return the ranks and axes of a recipe: ``8 ranks = pp 2 x dp_shard 2 x tp 2``."""
    axes = [axis for axis in (*AXES, "ep") if getattr(recipe.mesh, axis) > 1]
    parts = [f"{axis} {getattr(recipe.mesh, axis)}" for axis in axes if axis != "ep"]
    words = f"{recipe.world_size:,} ranks"
    if parts:
        words += f" = {' x '.join(parts)}"
    if recipe.mesh.ep > 1:
        words += f", with ep {recipe.mesh.ep} in dp_shard x cp x tp"
    return words


def note_of(layout: NodeLayout) -> str:
    """Return the nodes, the batch and the precision of a layout in a sentence."""
    recipe = layout.recipe
    nodes = f"{layout.nodes:,} nodes of {layout.gpus_per_node}" if layout.nodes > 1 else "1 node"
    batch = recipe.data
    return (
        f"{nodes}; {recipe.model.n_layers} blocks; a step has {batch.global_batch:,} samples of "
        f"{batch.seq_len:,} tokens, {recipe.micro_batches} micro-batches of {batch.micro_batch} on "
        f"each data-parallel rank; zero {recipe.parallel.zero}; computes in "
        f"{recipe.precision.computes_in}"
    )


def _as_json(layout: NodeLayout) -> dict[str, Any]:
    mesh = layout.recipe.mesh
    return {
        "ok": True,
        "world_size": mesh.world_size,
        "nodes": layout.nodes,
        "gpus_per_node": layout.gpus_per_node,
        "traffic_is_known": True,
        "mesh": asdict(mesh),
        "pp_ranks": [
            {
                "pp": pp_rank,
                "stages": layout.held_stages[pp_rank],
                "layers": layout.layer_words(pp_rank),
                "traffic": {row.axis: _traffic_json(row) for row in layout.traffic(pp_rank)},
            }
            for pp_rank in range(mesh.pp)
        ],
    }


def _traffic_json(row: AxisTraffic) -> dict[str, Any]:
    return {
        "ranks": row.group.size,
        "stride": row.group.stride,
        "forward_bytes": row.forward_bytes,
        "backward_bytes": row.backward_bytes,
        "nvlink_bytes": row.node_bytes,
        "nic_bytes": row.nic_bytes,
        "flows": [{**asdict(flow), "sent_bytes": flow.sent_bytes} for flow in row.flows],
    }
