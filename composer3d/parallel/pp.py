"""Pipeline parallelism on ``torch.distributed.pipelining``: static shapes, labels and positions by keyword, no logits
sent.

Huang et al. 2019 (GPipe, arXiv 1811.06965), Narayanan et al. 2019 (1F1B, PipeDream-Flush: arXiv 2104.04473) and 2021
(interleaved: the same paper, section 2.2). Stage s is on pipeline rank s modulo pp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from composer3d.mesh import Mesh

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_SINGLE: dict[str, type[PipelineScheduleSingle]] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
_MULTI: dict[str, type[PipelineScheduleMulti]] = {"Interleaved1F1B": ScheduleInterleaved1F1B}


def build_schedule(
    modules: Sequence[nn.Module],
    mesh: Mesh,
    *,
    name: str,
    micro_batches: int,
    stream: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Schedule:
    """The runtime of this rank's stages.

    Args:
        modules: the stages of this rank, first to last; called with tokens (first stage of all) or the residual stream,
            and keywords.
        stream: a meta tensor with the shape and dtype of what passes between stages: one micro-batch, this rank's
            shard.
        loss_fn: maps what the last stage returned, its summed loss, to what backward starts from.

    Gradients are not scaled: the loss is divided by the count of valid tokens once. Sends and receives of a rank and
    step: micro_batches x ``stream`` each way across every boundary of its stages.
    """
    count = len(modules) * mesh.table.pp
    # In static mode the examples must require grad wherever a gradient flows.
    flows = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device, requires_grad=True)
    # The first stage's input comes from the loader: only that there is one counts, its shape is never read.
    tokens = torch.empty(stream.shape, dtype=torch.int64, device=mesh.device)
    loss = torch.zeros((), device=mesh.device, requires_grad=True)
    stages: list[Any] = [
        PipelineStage(
            module,
            index,
            count,
            mesh.device,
            input_args=(tokens if index == 0 else flows,),
            output_args=(flows if index < count - 1 else loss,),
            group=mesh.pp_group,
        )
        for module, index in zip(modules, stage_indices(mesh, len(modules)), strict=True)
    ]
    more: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss_fn, "scale_grads": False}
    return _SINGLE[name](stages[0], **more) if name in _SINGLE else _MULTI[name](stages, **more)


def stage_indices(mesh: Mesh, stages_per_rank: int) -> range:
    """The stages that this rank holds, of pp x ``stages_per_rank``."""
    return range(mesh.at["pp"], mesh.table.pp * stages_per_rank, mesh.table.pp)


def forward_only(
    modules: Sequence[nn.Module],
    mesh: Mesh,
    stream: Tensor,
    micro_batches: Sequence[tuple[Tensor, dict[str, Tensor]]],
) -> Tensor:
    """Run micro-batches through the pipeline without gradients; the sum of the losses on the last stage, 0 elsewhere.

    Args:
        micro_batches: for each, the tokens (read by the first stage) and the keywords of this rank's stages.
    """
    pp, rank, group = mesh.table.pp, mesh.at["pp"], mesh.pp_group
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    sends: list[tuple[dist.Work | None, Tensor]] = []
    # pp micro-batches go through a rank's first stage, then through its second, and so on: all ranks stay busy.
    for begin in range(0, len(micro_batches), pp):
        previous, sends = sends, []
        for module, index in zip(modules, stage_indices(mesh, len(modules)), strict=True):
            for tokens_BT, keywords in micro_batches[begin : begin + pp]:
                inputs = tokens_BT
                if index > 0:
                    inputs = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device)
                    dist.recv(inputs, group=group, group_src=(rank - 1) % pp)
                output = module(inputs, **keywords)
                if index == pp * len(modules) - 1:
                    total += output
                else:  # the tensor must live until it has been sent
                    output = output.contiguous()
                    sends.append((dist.isend(output, group=group, group_dst=(rank + 1) % pp), output))
        _wait(previous)
    _wait(sends)
    return total


def _wait(sends: Sequence[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sends:
        if work is not None:
            work.wait()
