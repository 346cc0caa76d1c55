"""The mesh: named axes over the ranks of a job, as one value that is passed around. There is no global one.

Axes, outermost to innermost: ``pp, dp_replicate, dp_shard, cp, tp``. The innermost gets adjacent ranks, since its
traffic is the most frequent and the hardest to hide. Private API of DeviceMesh stays in this file.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer3d.errors import MeshError
from composer3d.ranks import coordinates, identity
from composer3d.recipe.schema import AXES, MeshTable


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view of the mesh: the sizes, this rank's coordinates, and the DeviceMesh of each parallelism.

    ``device_mesh`` has the axes (pp, dp_replicate, fsdp, tp) with fsdp = dp_shard x cp: context-parallel ranks hold
    different tokens of the same samples, so their gradients are summed, and their parameters sharded, together with
    dp_shard's.
    """

    table: MeshTable
    rank: int
    device: torch.device
    device_mesh: DeviceMesh

    @classmethod
    def build(cls, table: MeshTable, device: torch.device) -> "Mesh":
        """Form the process groups of every axis. Collective: every rank of the default group calls it.

        Raises MeshError where the default group's size is not the mesh's.
        """
        if table.world_size != dist.get_world_size():
            shown = " x ".join(f"{axis} {getattr(table, axis)}" for axis in AXES)
            raise MeshError(
                f"mesh {shown} = {table.world_size} processes, but the world has {dist.get_world_size()}; "
                f"start {table.world_size} processes, or change an axis of [mesh]"
            )
        device_mesh = init_device_mesh(
            device.type,
            (table.pp, table.dp_replicate, table.dp_shard * table.cp, table.tp),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        return cls(table=table, rank=dist.get_rank(), device=device, device_mesh=device_mesh)

    @property
    def at(self) -> dict[str, int]:
        return coordinates(self.rank, self.table)

    @property
    def identity(self) -> str:
        return identity(self.rank, self.table, self.device.type)

    @property
    def world_size(self) -> int:
        return self.table.world_size

    @property
    def batch_ranks(self) -> int:
        return self.table.batch_ranks

    @property
    def batch_rank(self) -> int:
        return self.at["dp_replicate"] * self.table.dp_shard + self.at["dp_shard"]

    @property
    def stage_ranks(self) -> int:
        """Ranks that share the parameters of one pipeline stage."""
        return self.world_size // self.table.pp

    @property
    def fsdp(self) -> DeviceMesh | None:
        """What parameters are sharded (and, first, replicated) over; None where one rank holds them."""
        if self.table.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "fsdp"]
        return self.device_mesh["fsdp"] if self.table.dp_shard * self.table.cp > 1 else None

    def replicas(self) -> DeviceMesh:
        """The ranks of ``fsdp`` where none of them shards: (as many replicas, 1). Collective: it forms groups."""
        whole = self.device_mesh["dp_replicate", "fsdp"]
        return whole._flatten("replicas")._unflatten(0, (whole.size(), 1), ("replica", "whole"))

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of the same sequences. Collective at its first call: it forms groups."""
        if self.table.cp == 1:
            return None
        sizes = (self.table.dp_shard, self.table.cp)
        return self.device_mesh["fsdp"]._unflatten(0, sizes, ("dp_shard", "cp"))["cp"].get_group()

    @property
    def tp(self) -> DeviceMesh | None:
        return self.device_mesh["tp"] if self.table.tp > 1 else None

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group("pp")

    def sum_over_world(self, *values: Tensor | float) -> list[float]:
        """Sum scalars over all ranks of the job, in float64: one all-reduce for all of ``values`` together.

        A value that several ranks hold alike must be weighted by the caller, so that it counts once.
        """
        packed = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device).detach() for v in values])
        dist.all_reduce(packed)
        return packed.tolist()

    def max_over_world(self, *values: float) -> list[float]:
        """The largest of each scalar over all ranks: how ranks agree on what one of them has seen. One all-reduce."""
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, dist.ReduceOp.MAX)
        return packed.tolist()
