"""Who a rank is: its coordinates on the mesh, and the words for it.

No torch here: the launcher speaks of ranks as well.
"""

import os

from composer3d.recipe.schema import AXES, MeshTable


def coordinates(rank: int, table: MeshTable) -> dict[str, int]:
    """The place of ``rank`` on each axis of ``table``, whose sizes must all be known."""
    places = {}
    for axis in reversed(AXES):  # the innermost axis has adjacent ranks
        rank, places[axis] = divmod(rank, getattr(table, axis))
    return {axis: places[axis] for axis in AXES}


def identity(rank: int, table: MeshTable, device_type: str = "cpu") -> str:
    """Describe this process, which is ``rank``, for its logs: ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``."""
    node, gpu = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    return f"{place(rank, table)[:-1]}, node {node}{'' if device_type == 'cpu' else f' gpu {gpu}'})"


def place(rank: int, table: MeshTable) -> str:
    """Describe any rank of the job by its coordinates: ``rank 13 (pp1 dp0 cp1 tp1)``."""
    at = coordinates(rank, table)
    dp = at["dp_replicate"] * table.dp_shard + at["dp_shard"]
    return f"rank {rank} (pp{at['pp']} dp{dp} cp{at['cp']} tp{at['tp']})"
