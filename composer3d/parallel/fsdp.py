"""Sharded data parallelism: FSDP2 and HSDP, set so that gradients are summed and never averaged.

Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), Zhao et al. 2023 (FSDP, arXiv 2304.11277). The loss is divided once,
by the count of valid tokens of the whole step, so a division by the number of ranks would be a second one.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from composer3d.mesh import Mesh
from composer3d.parallel.ties import tied
from composer3d.recipe.schema import MemoryTable, ParallelTable, PrecisionTable


def mesh_of(mesh: Mesh, parallel: ParallelTable, precision: PrecisionTable, memory: MemoryTable) -> DeviceMesh | None:
    """What parameters are sharded (and, first, replicated) over; None where FSDP has nothing to do.

    One rank alone needs it for mixed precision and for what is kept on the host: it holds the master parameters, and
    casts and copies as it gathers.
    """
    if parallel.zero == 0 and mesh.fsdp is not None:
        return mesh.replicas()
    alone = precision.compute is not None or memory.cpu_offload
    return mesh.device_mesh["fsdp"] if mesh.fsdp is None and alone else mesh.fsdp


def apply(
    stage: nn.Module, mesh: DeviceMesh, parallel: ParallelTable, precision: PrecisionTable, memory: MemoryTable
) -> None:
    """Shard ``stage`` over the last axis of ``mesh`` and replicate it over the first, where there are two. In place.

    Units: ``first``, every block, ``last``, of which a stage may lack the ends; where these two share a parameter, the
    stage itself is the unit of both. Parameters become DTensors ``Shard(0)`` over the last axis (before their tp
    placement; ``Shard(1)`` where tp cuts rows unevenly) in ``precision.params``; they are gathered in
    ``precision.compute``, and gradients reduced over these axes in ``precision.params``. Collectives a unit and step:
    all-gather of parameters (once, and with ``zero = 3`` again for backward, each micro-batch), reduce-scatter of
    gradients (once, and with ``zero`` 2 and 3 each micro-batch), then all-reduce over the replicating axis. Under pp
    torch keeps whole gradients until the last micro-batch at every level, and parameters that a backward has gathered.

    With ``cpu_offload`` shards stay in the host's memory, pinned where the device is a GPU: they are copied to the
    device before each all-gather, and gradients from it after each reduce-scatter.
    """
    compute = precision.compute and getattr(torch, precision.compute)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute and getattr(torch, precision.params))
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if memory.cpu_offload else OffloadPolicy()
    parts = dict(stage.named_children())
    first, last = (None, None) if tied(stage) else (parts.get("first"), parts.get("last"))
    order = [module for module in (first, *parts["blocks"].children(), last) if module is not None]
    for module in (*order, stage):
        fully_shard(
            module,
            mesh=mesh,
            # Backward starts with `last`: dropping its parameters would only gather them again at once.
            reshard_after_forward=parallel.zero == 3 and module is not last and module is not stage,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=_uneven,
        )
    # By itself FSDP gathers what ran before a unit in forward: before the first one that is `last`, of the micro-batch
    # before, for nothing. A unit that names itself gathers nothing more.
    for earlier, module in zip((*order[:1], *order), order, strict=False):
        cast(FSDPModule, module).set_modules_to_backward_prefetch([cast(FSDPModule, earlier)])
    for unit in units(stage):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, and a sum is what is wanted


def _uneven(parameter: nn.Parameter) -> Shard | None:
    """Columns of a matrix whose rows tp cuts unevenly, as it does a vocabulary that it does not divide.

    Two cuts of one dimension are a ``_StridedShard``, which has each rank at the wrong rows then: of 259 rows over tp 2
    and fsdp 3, the last rank holds 216 to 258, and torch 2.13 says that it holds 217 to 258.
    """
    whole: Tensor = parameter
    if not isinstance(whole, DTensor) or not whole.placements[0].is_shard(0):
        return None
    return Shard(1) if whole.shape[0] % whole.device_mesh.size() else None


def units(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def begin_micro_batch(stage: nn.Module, parallel: ParallelTable, *, last: bool) -> None:
    """Say whether the backward that follows is the last of the step. Without pp; a pipeline's runtime says it itself.

    ``zero`` 0 and 1 keep whole gradients until then, so that they are reduced once a step; 2 keeps only parameters.
    """
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or parallel.zero >= 2)
        stage.set_reshard_after_backward(last or parallel.zero == 3)
        stage.set_is_last_backward(last)


def widen(stage: nn.Module) -> None:
    """Move gradients that were added outside of a backward to where FSDP keeps them until it reduces them.

    In mixed precision that is in ``precision.params``, and a sum of micro-batches belongs there; else nothing moves.
    """
    for unit in units(stage):
        group = unit._get_fsdp_state()._fsdp_param_group
        for each in group.fsdp_params if group is not None else ():
            if hasattr(each, "to_accumulated_grad_if_needed"):  # from torch 2.15 on, leaves add up in the wide dtype
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()


def reshard(stage: nn.Module) -> None:
    """Drop gathered parameters after an evaluation: no backward did, and the optimizer would leave them stale."""
    for unit in units(stage):
        unit.reshard()
