"""The mesh: named axes over the ranks of a job, as a value that is passed around. There is no
global one.

The axes, outermost to innermost, are ``recipe.schema.AXES``. The innermost axis has adjacent
ranks: its traffic is the most frequent and the hardest to hide.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer3d.recipe.schema import AXES, MeshTable
from composer3d.runtime.ranks import coordinates, identity
from composer3d.runtime.torch_private import flatten_mesh, unflatten_mesh
from composer3d.spec.errors import MeshError


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view of the mesh.

    Attributes:
        sizes: of all axes.
        rank: of this process in the job.
        device: of this process.
        device_mesh: torch's mesh with the dims (pp, dp_replicate, fsdp, tp), where fsdp is
            dp_shard x cp. Context parallel ranks hold different tokens of the same samples, so
            their gradients are summed, and their parameters sharded, together with those of
            dp_shard.
    """

    sizes: MeshTable
    rank: int
    device: torch.device
    device_mesh: DeviceMesh

    @classmethod
    def build(cls, sizes: MeshTable, device: torch.device) -> "Mesh":
        """Form the process groups of all axes. Collective over the default group.

        Raises MeshError where the default group has another size than the mesh.
        """
        if sizes.world_size != dist.get_world_size():
            shown = " x ".join(f"{axis} {getattr(sizes, axis)}" for axis in AXES)
            raise MeshError(
                f"mesh {shown} = {sizes.world_size} processes, but the world has "
                f"{dist.get_world_size()}; start {sizes.world_size} processes, or change an axis "
                "of [mesh]"
            )
        device_mesh = init_device_mesh(
            device.type,
            (sizes.pp, sizes.dp_replicate, sizes.dp_shard * sizes.cp, sizes.tp),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        return cls(sizes=sizes, rank=dist.get_rank(), device=device, device_mesh=device_mesh)

    @property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return coordinates(self.rank, self.sizes)

    @property
    def identity(self) -> str:
        """This process in words: ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``."""
        return identity(self.rank, self.sizes, self.device.type)

    @property
    def world_size(self) -> int:
        return self.sizes.world_size

    @property
    def batch_ranks(self) -> int:
        """The number of ranks along dp_replicate and dp_shard: they get different samples."""
        return self.sizes.batch_ranks

    @property
    def batch_rank(self) -> int:
        """This rank's number among the ``batch_ranks``."""
        return self.coords["dp_replicate"] * self.sizes.dp_shard + self.coords["dp_shard"]

    @property
    def stage_ranks(self) -> int:
        """The number of ranks that share the parameters of one pipeline stage."""
        return self.world_size // self.sizes.pp

    @property
    def fsdp(self) -> DeviceMesh | None:
        """The mesh to shard over (last dim) and replicate over (first of two dims).

        None: a single rank holds whole parameters.
        """
        if self.sizes.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "fsdp"]
        return self.device_mesh["fsdp"] if self.sizes.dp_shard * self.sizes.cp > 1 else None

    def replicas(self) -> DeviceMesh:
        """The ranks of ``fsdp`` if none of them shards: a mesh of (replicas, 1).

        Collective: it forms groups.
        """
        flat = flatten_mesh(self.device_mesh["dp_replicate", "fsdp"], "replicas")
        return unflatten_mesh(flat, (flat.size(), 1), ("replica", "whole"))

    def expert_replicas(self) -> DeviceMesh:
        """The ranks that hold the same experts if none of them shards: a mesh of (replicas, 1).

        Collective: it forms groups.
        """
        flat = flatten_mesh(self.sparse["dp_replicate", "efsdp"], "expert_replicas")
        return unflatten_mesh(flat, (flat.size(), 1), ("expert_replica", "whole_expert"))

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold parts of the same sequences; None if one rank holds whole sequences.

        Collective at its first use: it forms groups.
        """
        if self.sizes.cp == 1:
            return None
        sizes = (self.sizes.dp_shard, self.sizes.cp)
        return unflatten_mesh(self.device_mesh["fsdp"], sizes, ("dp_shard", "cp"))["cp"].get_group()

    @cached_property
    def sparse(self) -> DeviceMesh:
        """The same ranks as the experts see them: a mesh (pp, dp_replicate, efsdp, ep).

        efsdp x ep is dp_shard x cp x tp, with adjacent ranks along ep: an expert is on one rank of
        ep, and sharded over efsdp. Collective at its first use: it forms groups.
        """
        sizes = self.sizes
        return init_device_mesh(
            self.device.type,
            (sizes.pp, sizes.dp_replicate, sizes.efsdp, sizes.ep),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
        )

    @cached_property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks of cp and tp: with sequence parallelism, parts of the same sequences.

        None if one rank holds whole sequences. Collective at its first use: it forms groups.
        """
        sizes = self.sizes
        if sizes.cp * sizes.tp == 1:
            return None
        flat = flatten_mesh(self.device_mesh["fsdp", "tp"], "batch_and_sequence")
        split = unflatten_mesh(flat, (sizes.dp_shard, sizes.cp * sizes.tp), ("batch", "sequence"))
        return split["sequence"].get_group()

    @property
    def tp(self) -> DeviceMesh | None:
        """The tensor parallel ranks; None if there is one."""
        return self.device_mesh["tp"] if self.sizes.tp > 1 else None

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks of one pipeline."""
        return self.device_mesh.get_group("pp")

    def sum_over_world(self, *values: Tensor | float) -> list[float]:
        """Sum scalars over all ranks in float64: one all-reduce for all of them.

        If several ranks hold the same value, the caller must weight it so that it counts once.
        """
        scalars = [
            torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
            for value in values
        ]
        packed = torch.stack(scalars)
        dist.all_reduce(packed)
        return packed.tolist()

    def max_over_world(self, *values: float) -> list[float]:
        """Take the maximum of each scalar over all ranks: one all-reduce.

        With it, all ranks agree on an event that one of them has seen.
        """
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(packed, dist.ReduceOp.MAX)
        return packed.tolist()
