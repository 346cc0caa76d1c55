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
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Where a distributed checkpoint keeps the bytes of one part of a tensor: file, offset and length.
StorageInfo = _StorageInfo

# The pipeline schedule that runs a given list of actions.
ScheduleOfActions = _PipelineScheduleRuntime


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group of this ``group_name``: custom operators take names, not groups."""
    return _resolve_process_group(GroupName(name))


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Change the time-out of groups that are made without one; DeviceMesh makes its groups so."""
    c10d = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    yield
    # Not after an error, with which the process ends.
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the dims of ``mesh`` into one called ``name``. Collective: it forms a group."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Split the one dim of ``mesh`` into dims of these sizes and names. Collective: it forms
    groups.
    """
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def offset_of(tensor: DTensor) -> tuple[int, ...]:
    """The global index of the first element of this rank's shard."""
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset)


def plan_actions(schedule: _PipelineScheduleRuntime, rows: Sequence[Sequence[str]]) -> None:
    """Give a ``ScheduleOfActions`` the actions of each pipeline rank, such as "0F0"."""
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(cast(Any, actions))


def own_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters that ``module`` itself holds, by name; the live dict."""
    return cast("dict[str, Tensor | None]", module._parameters)


def accumulate_unsharded_grads(unit: FSDPModule) -> None:
    """Move gradients that were added outside of a backward to where FSDP sums micro-batches.

    Under mixed precision FSDP keeps that sum in the wide dtype. From torch 2.15 on, gradients are
    added up there in the first place, and nothing is left to move.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    for parameter in group.fsdp_params:
        if hasattr(parameter, "to_accumulated_grad_if_needed"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def silence_selective_checkpoint_warning() -> None:
    """Silence a warning of every rank under torch.compile with selective checkpointing.

    It says that a checkpointed region must not change a tensor in place. No block does.
    """
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
