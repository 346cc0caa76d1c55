"""The coordinates of a rank on the mesh, and its description in logs and errors.

This module does not import torch, because the launcher describes ranks too.
"""

from collections.abc import Callable, Sequence

from composer3d.recipe.schema import AXES, MeshTable
from composer3d.runtime import environment

MOST_DESCRIBED = 8  # ranks in a message


def coordinates(rank: int, sizes: MeshTable) -> dict[str, int]:
    """Return the coordinate of ``rank`` on each axis, outermost axis first.

    Args:
        rank: the global rank.
        sizes: the sizes of the mesh; ``dp_shard`` is not -1.
    """
    coords = {}
    for axis in reversed(AXES):  # the innermost axis has adjacent ranks
        rank, coords[axis] = divmod(rank, getattr(sizes, axis))
    return {axis: coords[axis] for axis in AXES}


def group_ranks(axis: str, rank: int, sizes: MeshTable) -> list[int]:
    """Return the ranks that ``rank`` shares an axis with, itself included, in order.

    Args:
        axis: an axis of ``AXES``; "fsdp", which is dp_shard x cp; "ep" or "efsdp", of the sparse
            view (``Mesh.sparse``); or "world".
        rank: the global rank.
        sizes: the sizes of the mesh; ``dp_shard`` is not -1.
    """
    shards = sizes.dp_shard * sizes.cp
    stage = shards * sizes.tp * sizes.dp_replicate
    # The distance of neighbours, and the number of ranks.
    strides = {
        "tp": (1, sizes.tp),
        "cp": (sizes.tp, sizes.cp),
        "dp_shard": (sizes.tp * sizes.cp, sizes.dp_shard),
        "fsdp": (sizes.tp, shards),
        "dp_replicate": (sizes.tp * shards, sizes.dp_replicate),
        "pp": (stage, sizes.pp),
        "ep": (1, sizes.ep),
        "efsdp": (sizes.ep, sizes.efsdp),
        "world": (1, sizes.world_size),
    }
    stride, size = strides[axis]
    first = rank - rank // stride % size * stride
    return list(range(first, first + stride * size, stride))


def identity(rank: int, sizes: MeshTable, device_type: str = "cpu") -> str:
    """Describe this process for its logs: ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``.

    Args:
        rank: the rank of this process.
        sizes: the sizes of the mesh.
        device_type: the type of its device, such as "cuda"; "cpu" leaves out the GPU.
    """
    host = f"node {environment.node()}"
    if device_type != "cpu":
        host += f" gpu {environment.local_rank()}"
    return f"rank {rank} ({_coordinates_text(rank, sizes)}, {host})"


def describe_rank(rank: int, sizes: MeshTable) -> str:
    """Describe any rank of the job by its coordinates: ``rank 13 (pp1 dp0 cp1 tp1)``."""
    return f"rank {rank} ({_coordinates_text(rank, sizes)})"


def describe_several(ranks: Sequence[int], describe: Callable[[int], str]) -> str:
    """Describe some ranks of the job one by one; of many, the first eight.

    Args:
        ranks: the ranks.
        describe: returns the description of one, such as ``describe_rank``.
    """
    text = ", ".join(describe(rank) for rank in ranks[:MOST_DESCRIBED])
    hidden = len(ranks) - MOST_DESCRIBED
    return f"{text} and {hidden} more" if hidden > 0 else text


def _coordinates_text(rank: int, sizes: MeshTable) -> str:
    coords = coordinates(rank, sizes)
    dp = coords["dp_replicate"] * sizes.dp_shard + coords["dp_shard"]
    return f"pp{coords['pp']} dp{dp} cp{coords['cp']} tp{coords['tp']}"
