"""Private API of torch: every private name that composer3d uses, in one place.

``tests/runtime/test_torch_private.py`` checks each name with every supported version of torch.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Where a distributed checkpoint keeps the bytes of one part of a tensor: file, offset and length.
StorageInfo = _StorageInfo

# The pipeline schedule that runs a given list of actions.
ScheduleOfActions = _PipelineScheduleRuntime


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this ``group_name``: custom operators take only names."""
    return _resolve_process_group(GroupName(name))


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Set the default time-out of new process groups, which the groups of DeviceMesh have too."""
    c10d = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    yield
    # After an error the old values are not restored: the process ends.
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all dims of ``mesh`` into one dim called ``name``. Collective: it forms a group."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Split the only dim of ``mesh`` into several. Collective: it forms groups.

    Args:
        mesh: a mesh of one dim.
        sizes: the sizes of the new dims, outermost first. Their product is the size of ``mesh``.
        names: the names of the new dims.
    """
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def offset_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the global index of the first element of this rank's shard, one number per dim."""
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset)


def plan_actions(schedule: _PipelineScheduleRuntime, rows: Sequence[Sequence[str]]) -> None:
    """Set the actions of a ``ScheduleOfActions``. Torch adds the sends and receives.

    Args:
        schedule: the schedule, which is changed in place.
        rows: the compute actions of each pipeline rank in order, each such as "0F0".
    """
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(cast(Any, actions))


def own_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the live dict of the parameters of ``module`` itself, without its submodules."""
    return cast("dict[str, Tensor | None]", module._parameters)


def accumulate_unsharded_grads(unit: FSDPModule) -> None:
    """Add the gradients that were computed outside of a backward to FSDP's sum of micro-batches.

    Under mixed precision FSDP keeps that sum in the reduce dtype. Without mixed precision, and from
    torch 2.15 on, these gradients are part of the sum already, and nothing changes.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def shard_over(mesh: DeviceMesh, dim: int) -> ShardPlacementResult:
    """Make a result of ``shard_placement_fn`` that shards ``dim`` over another mesh than its unit.

    All parameters that share process groups in one unit must get the same object.

    Args:
        mesh: of one dim, or of two: then parameters are replicated over the first one.
        dim: of the parameter.
    """
    if mesh.ndim == 1:
        return ShardPlacementResult(Shard(dim), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return ShardPlacementResult(Shard(dim), info)


def silence_selective_checkpoint_warning() -> None:
    """Silence a warning that every rank prints under torch.compile with selective checkpointing.

    The warning says that a checkpointed region must not change a tensor in place. No block does.
    """
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
