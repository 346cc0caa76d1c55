"""Sharded data parallelism: FSDP2 and HSDP, set so that gradients are summed and never averaged.

Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), Zhao et al. 2023 (FSDP, arXiv 2304.11277). The loss is divided once,
by the count of valid tokens of the whole step, so a division by the number of ranks would be a second one.
"""

from collections.abc import Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from composer3d.recipe.schema import ParallelTable


def apply(
    stage: nn.Module,
    *,
    first: nn.Module | None,
    blocks: Iterable[nn.Module],
    last: nn.Module | None,
    mesh: DeviceMesh,
    parallel: ParallelTable,
) -> None:
    """Shard ``stage`` over the last axis of ``mesh`` and replicate it over the first, where there are two. In place.

    Units: ``first``, every block, ``last``. Parameters become DTensors ``Shard(0)`` over the last axis (before their tp
    placement). Collectives a unit and step: all-gather of parameters (once, and with ``zero = 3`` again for backward,
    each micro-batch), reduce-scatter of gradients, then all-reduce over the replicating axis.
    """
    again = parallel.zero == 3
    if first is not None:
        fully_shard(first, mesh=mesh, reshard_after_forward=again)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    if last is not None:
        # Backward starts with `last`: dropping its parameters would only gather them again at once.
        fully_shard(last, mesh=mesh, reshard_after_forward=False)
    fully_shard(stage, mesh=mesh, reshard_after_forward=False)
    for unit in units(stage):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, and a sum is what is wanted


def units(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def begin_micro_batch(stage: nn.Module, parallel: ParallelTable, *, last: bool) -> None:
    """Say whether the backward that follows is the last of the step. Without pp; a pipeline's runtime says it itself.

    ``zero`` 0 and 1 keep whole gradients and parameters until then, so that they are reduced and gathered once a step.
    """
    if isinstance(stage, FSDPModule):
        now = last or parallel.zero == 3
        stage.set_requires_gradient_sync(now)
        stage.set_reshard_after_backward(now)
        stage.set_is_last_backward(last)


def reshard(stage: nn.Module) -> None:
    """Drop gathered parameters after an evaluation: no backward did, and the optimizer would leave them stale."""
    for unit in units(stage):
        unit.reshard()
