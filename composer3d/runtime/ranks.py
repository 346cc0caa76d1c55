"""A rank's coordinates on the mesh, and its description for people.

This module does not import torch: the launcher describes ranks as well.
"""

import os

from composer3d.recipe.schema import AXES, MeshTable


def coordinates(rank: int, sizes: MeshTable) -> dict[str, int]:
    """The coordinate of ``rank`` on each axis, outermost first. All ``sizes`` must be known."""
    coords = {}
    for axis in reversed(AXES):  # the innermost axis has adjacent ranks
        rank, coords[axis] = divmod(rank, getattr(sizes, axis))
    return {axis: coords[axis] for axis in AXES}


def identity(rank: int, sizes: MeshTable, device_type: str = "cpu") -> str:
    """Describe this process for its logs: ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``.

    Args:
        rank: of this process.
        sizes: of the mesh.
        device_type: "cpu" leaves out the GPU.
    """
    host = f"node {os.environ.get('GROUP_RANK', '0')}"
    if device_type != "cpu":
        host += f" gpu {os.environ.get('LOCAL_RANK', '0')}"
    return f"rank {rank} ({_coordinates_text(rank, sizes)}, {host})"


def describe_rank(rank: int, sizes: MeshTable) -> str:
    """Describe any rank of the job by its coordinates: ``rank 13 (pp1 dp0 cp1 tp1)``."""
    return f"rank {rank} ({_coordinates_text(rank, sizes)})"


def _coordinates_text(rank: int, sizes: MeshTable) -> str:
    coords = coordinates(rank, sizes)
    dp = coords["dp_replicate"] * sizes.dp_shard + coords["dp_shard"]
    return f"pp{coords['pp']} dp{dp} cp{coords['cp']} tp{coords['tp']}"
