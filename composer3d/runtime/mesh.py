"""The device mesh of a job: its ranks, arranged on named axes.

A mesh is passed as an argument; there is no global one. Its axes, outermost to innermost, are
``recipe.schema.AXES``. The ranks of the innermost axis are adjacent, because its traffic is the
most frequent and the hardest to overlap with computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer3d.facts.errors import MeshError
from composer3d.recipe.schema import AXES, MeshTable
from composer3d.runtime.process_group import form_mesh
from composer3d.runtime.ranks import coordinates, identity
from composer3d.runtime.torch_private import flatten_mesh, unflatten_mesh


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One rank's view of the mesh.

    Attributes:
        sizes: the size of each axis.
        rank: the global rank of this process.
        device: the device of this process.
        device_mesh: torch's mesh with the dims (pp, dp_replicate, fsdp, tp), where fsdp is
            dp_shard x cp. FSDP shards parameters and reduces gradients over both: context parallel
            ranks hold different tokens of the same samples, so their gradients must be summed.
    """

    sizes: MeshTable
    rank: int
    device: torch.device
    device_mesh: DeviceMesh

    @classmethod
    def build(cls, sizes: MeshTable, device: torch.device) -> "Mesh":
        """Form the process groups of all axes. Collective over the default group.

        Args:
            sizes: the size of each axis; ``dp_shard`` is not -1.
            device: the device of this process.

        Raises:
            MeshError: the product of the sizes is not the number of ranks in the default group.
        """
        if sizes.world_size != dist.get_world_size():
            shown = " x ".join(f"{axis} {getattr(sizes, axis)}" for axis in AXES)
            raise MeshError(
                f"mesh {shown} = {sizes.world_size} processes, but the world has "
                f"{dist.get_world_size()}; start {sizes.world_size} processes, or change an axis "
                "of [mesh]"
            )
        device_mesh = form_mesh(
            lambda: init_device_mesh(
                device.type,
                (sizes.pp, sizes.dp_replicate, sizes.dp_shard * sizes.cp, sizes.tp),
                mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
            )
        )
        return cls(sizes=sizes, rank=dist.get_rank(), device=device, device_mesh=device_mesh)

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        return coordinates(self.rank, self.sizes)

    @property
    def identity(self) -> str:
        """The name of this process in logs: ``rank 13 (pp1 dp0 cp1 tp1, node 1 gpu 5)``."""
        return identity(self.rank, self.sizes, self.device.type)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.sizes.world_size

    @property
    def batch_ranks(self) -> int:
        """The number of ranks with different samples: dp_replicate x dp_shard."""
        return self.sizes.batch_ranks

    @property
    def batch_rank(self) -> int:
        """This rank's index among the ``batch_ranks``, from 0. cp and tp ranks share it."""
        return self.coords["dp_replicate"] * self.sizes.dp_shard + self.coords["dp_shard"]

    @property
    def stage_ranks(self) -> int:
        """The number of ranks that share each pipeline stage: world size / pp."""
        return self.world_size // self.sizes.pp

    @property
    def fsdp(self) -> DeviceMesh | None:
        """The mesh that FSDP shards over (the last dim) and replicates over (the first of two).

        None if dp_replicate, dp_shard and cp are all 1: FSDP then has nothing to shard or reduce.
        """
        if self.sizes.dp_replicate > 1:
            return self.device_mesh["dp_replicate", "fsdp"]
        return self.device_mesh["fsdp"] if self.sizes.dp_shard * self.sizes.cp > 1 else None

    def replicas(self) -> DeviceMesh:
        """Form the mesh of data parallelism without sharding, of shape (replicas, 1).

        The replicas are the ranks of dp_replicate, dp_shard and cp. FSDP replicates over the first
        dim, and "shards" over the second, which has one rank. Collective: it forms groups.
        """
        flat = _join(self.device_mesh["dp_replicate", "fsdp"], "replicas")
        return _split(flat, (flat.size(), 1), ("replica", "whole"))

    def expert_replicas(self) -> DeviceMesh:
        """The ranks that hold the same experts if none of them shards: a mesh of (replicas, 1).

        Collective: it forms groups.
        """
        flat = _join(self.sparse["dp_replicate", "efsdp"], "expert_replicas")
        return _split(flat, (flat.size(), 1), ("expert_replica", "whole_expert"))

    @cached_property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The group of ranks that hold parts of the same sequences; None if cp is 1.

        The first use is collective: it forms groups.
        """
        if self.sizes.cp == 1:
            return None
        sizes = (self.sizes.dp_shard, self.sizes.cp)
        return _split(self.device_mesh["fsdp"], sizes, ("dp_shard", "cp"))["cp"].get_group()

    @cached_property
    def sparse(self) -> DeviceMesh:
        """The same ranks as the experts see them: a mesh (pp, dp_replicate, efsdp, ep).

        efsdp x ep is dp_shard x cp x tp, with adjacent ranks along ep: an expert is on one rank of
        ep, and sharded over efsdp. Collective at its first use: it forms groups.

        Raises:
            MeshError: ep does not divide dp_shard x cp x tp.
        """
        sizes = self.sizes
        ranks = sizes.dp_shard * sizes.cp * sizes.tp
        if ranks % sizes.ep:
            raise MeshError(
                f"mesh.ep = {sizes.ep} must divide the {ranks} ranks of dp_shard x cp x tp"
            )
        return form_mesh(
            lambda: init_device_mesh(
                self.device.type,
                (sizes.pp, sizes.dp_replicate, sizes.efsdp, sizes.ep),
                mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
            )
        )

    @cached_property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks of cp and tp: with sequence parallelism, parts of the same sequences.

        None if one rank holds whole sequences. Collective at its first use: it forms groups.
        """
        sizes = self.sizes
        if sizes.cp * sizes.tp == 1:
            return None
        flat = _join(self.device_mesh["fsdp", "tp"], "batch_and_sequence")
        split = _split(flat, (sizes.dp_shard, sizes.cp * sizes.tp), ("batch", "sequence"))
        return split["sequence"].get_group()

    @cached_property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's pipeline stage; None if that is this rank alone.

        Collective at its first use: it forms groups.
        """
        if self.stage_ranks == 1:
            return None
        return _join(self.device_mesh["dp_replicate", "fsdp", "tp"], "stage").get_group()

    def groups(self, *, has_experts: bool) -> dict[str, dist.ProcessGroup]:
        """Return this rank's process group of each axis with several ranks.

        The axes are pp, dp_replicate, fsdp, cp and tp, and with experts also efsdp and ep.
        Collective at its first use: it forms groups.
        """
        meshes = {}
        for axis in ("pp", "dp_replicate", "fsdp", "tp"):
            meshes[axis] = self.device_mesh[axis]
        if has_experts:
            meshes["efsdp"], meshes["ep"] = self.sparse["efsdp"], self.sparse["ep"]
        groups = {axis: mesh.get_group() for axis, mesh in meshes.items() if mesh.size() > 1}
        if self.cp_group is not None:
            groups["cp"] = self.cp_group
        return groups

    def axis_of(self, group: dist.ProcessGroup) -> str:
        """Return the name of the axis whose ranks form ``group``, for people and for counts.

        Names are "pp", "dp_replicate", "fsdp" (dp_shard x cp), "cp" and "tp"; for experts "ep" and
        "efsdp"; "sequence" (cp x tp), over which routers sum; and "world". A group of other axes
        has their names, such as "dp_replicate x dp_shard". If axes have the same group, the first
        of these names counts.
        """
        name = group.group_name
        if name not in self._axis_by_group:
            # Groups are formed late: names are looked up again when an unknown group appears.
            self._axis_by_group.update(self._axes_of_formed_groups())
        if name not in self._axis_by_group:
            self._axis_by_group[name] = self._varying_axes(group)
        return self._axis_by_group[name]

    @cached_property
    def _axis_by_group(self) -> dict[str, str]:
        return {}

    def _axes_of_formed_groups(self) -> dict[str, str]:
        """Map the names of the groups that this mesh has formed to axes. It forms no group."""
        formed = vars(self)  # what ``cached_property`` has computed
        names: dict[str, str] = {}
        meshes = [self.device_mesh, *([self.sparse] if "sparse" in formed else [])]
        for mesh in meshes:
            for dim, axis in enumerate(mesh.mesh_dim_names or ()):
                if mesh.size(dim) > 1:
                    # pp and dp_replicate are in both meshes, with equal groups.
                    names.setdefault(mesh.get_group(axis).group_name, axis)
        for attribute, axis in (
            ("cp_group", "cp"),
            ("sequence_group", "sequence"),
            ("stage_group", "stage"),
        ):
            group = formed.get(attribute)
            if group is not None:
                names.setdefault(group.group_name, axis)
        if dist.group.WORLD is not None:
            names.setdefault(dist.group.WORLD.group_name, "world")
        return names

    def _varying_axes(self, group: dist.ProcessGroup) -> str:
        """Name a group by the axes along which its ranks differ."""
        ranks = dist.get_process_group_ranks(group)
        coords = [coordinates(rank, self.sizes) for rank in ranks]
        varying = [axis for axis in AXES if len({place[axis] for place in coords}) > 1]
        is_whole = len(ranks) == prod(getattr(self.sizes, axis) for axis in varying)
        if not is_whole and "pp" not in varying:
            # Not all ranks of tp: those that hold the same experts (``expert_replicas``).
            varying = [*(["dp_replicate"] if "dp_replicate" in varying else []), "efsdp"]
        return " x ".join(varying)

    @property
    def tp(self) -> DeviceMesh | None:
        """The mesh of the tensor parallel ranks; None if tp is 1."""
        return self.device_mesh["tp"] if self.sizes.tp > 1 else None

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The group of ranks that form one pipeline."""
        return self.device_mesh.get_group("pp")

    def sum_over_world(self, *values: Tensor | float) -> list[float]:
        """Return the sums of scalars, as ``start_sum_over_world``. On a GPU, the host waits."""
        return self.start_sum_over_world(*values).tolist()

    def start_sum_over_world(self, *values: Tensor | float) -> Tensor:
        """Sum each scalar over all ranks, in float64. Collective: one all-reduce for all scalars.

        If several ranks hold the same value, the caller must weight it so that it counts once.

        Args:
            values: numbers or 0-dim tensors on the mesh's device. All ranks pass equally many.

        Returns:
            The sums, in the order of ``values``: a tensor (n) on the mesh's device. On a GPU,
            nothing waits for them.
        """
        packed = torch.stack([self._scalar(value) for value in values])
        dist.all_reduce(packed)
        return packed

    def _scalar(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(torch.float64)
        # ``torch.tensor`` would copy the number from the host.
        return torch.full((), value, dtype=torch.float64, device=self.device)


def _join(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all dims of ``mesh`` into one dim called ``name``. Collective over all ranks."""
    return form_mesh(lambda: flatten_mesh(mesh, name))


def _split(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Split the only dim of ``mesh``, as ``unflatten_mesh``. Collective over all ranks."""
    return form_mesh(lambda: unflatten_mesh(mesh, sizes, names))
