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

    Ranks move in step: in each tick a rank runs one of its stages, then sends what it made and receives what it needs
    next in one batch. Sends apart from receives would let two ranks of NCCL wait for each other when stages interleave.

    Args:
        micro_batches: for each, the tokens (read by the first stage) and the keywords of this rank's stages.
    """
    pp, rank, group = mesh.table.pp, mesh.at["pp"], mesh.pp_group
    last = pp * len(modules) - 1
    rounds = -(-len(micro_batches) // pp)

    def work(tick: int) -> tuple[int, int] | None:
        """(stage of this rank, micro-batch): pp of them go through its first stage, then its second, and so on."""
        turn, slot = divmod(tick - rank, pp)
        number = turn // len(modules) * pp + slot
        return (
            (turn % len(modules), number) if 0 <= turn < rounds * len(modules) and number < len(micro_batches) else None
        )

    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    inputs = torch.empty_like(stream, device=mesh.device)
    for tick in range(rounds * len(modules) * pp + pp - 1):
        ops = []
        if (now := work(tick)) is not None:
            stage, (tokens_BT, keywords) = now[0] * pp + rank, micro_batches[now[1]]
            output = modules[now[0]](inputs if stage > 0 else tokens_BT, **keywords)
            if stage == last:
                total += output
            else:
                ops.append(dist.P2POp(dist.isend, output.contiguous(), group=group, group_peer=(rank + 1) % pp))
        if (following := work(tick + 1)) is not None and following[0] * pp + rank > 0:
            inputs = torch.empty_like(inputs)
            ops.append(dist.P2POp(dist.irecv, inputs, group=group, group_peer=(rank - 1) % pp))
        for request in dist.batch_isend_irecv(ops) if ops else ():
            request.wait()
    return total
