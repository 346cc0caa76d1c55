"""Pipeline parallelism on ``torch.distributed.pipelining``: static shapes, labels and positions by keyword, no logits
sent.

Huang et al. 2019 (GPipe, arXiv 1811.06965), Narayanan et al. 2019 (1F1B, PipeDream-Flush: arXiv 2104.04473).
"""

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from composer3d.mesh import Mesh

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def build_schedule(
    module: nn.Module,
    mesh: Mesh,
    *,
    name: str,
    micro_batches: int,
    stream: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> PipelineScheduleSingle:
    """The runtime of this rank's stage.

    Args:
        module: the stage; called with tokens (first stage) or the residual stream, and keywords.
        stream: a meta tensor with the shape and dtype of what passes between stages: one micro-batch, this rank's
            shard.
        loss_fn: maps what the last stage returned, its summed loss, to what backward starts from.

    Gradients are not scaled: the loss is divided by the count of valid tokens once. Sends and receives of a rank and
    step: micro_batches x ``stream`` each way between neighbouring stages.
    """
    stages, index = mesh.table.pp, mesh.at["pp"]
    # In static mode the examples must require grad wherever a gradient flows.
    flows = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device, requires_grad=True)
    # The first stage's input comes from the loader: only that there is one counts, its shape is never read.
    tokens = torch.empty(stream.shape, dtype=torch.int64, device=mesh.device)
    stage = PipelineStage(
        module,
        index,
        stages,
        mesh.device,
        input_args=(tokens if index == 0 else flows,),
        output_args=(flows if index < stages - 1 else torch.zeros((), device=mesh.device, requires_grad=True),),
        group=mesh.pp_group,
    )
    return SCHEDULES[name](stage, n_microbatches=micro_batches, loss_fn=loss_fn, scale_grads=False)


def forward_only(
    module: nn.Module,
    mesh: Mesh,
    stream: Tensor,
    micro_batches: list[tuple[Tensor, dict[str, Tensor]]],
) -> Tensor:
    """Run micro-batches through the pipeline without gradients; the sum of the losses on the last stage, 0 elsewhere.

    Args:
        micro_batches: for each, the tokens (read by the first stage) and the keywords of this stage.
    """
    stages, index, group = mesh.table.pp, mesh.at["pp"], mesh.pp_group
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    sends: deque[tuple[dist.Work, Tensor]] = deque()
    for tokens_BT, keywords in micro_batches:
        inputs = tokens_BT
        if index > 0:
            inputs = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device)
            dist.recv(inputs, group=group, group_src=index - 1)
        output = module(inputs, **keywords)
        if index == stages - 1:
            total += output
        else:
            output = output.contiguous()
            work = dist.isend(output, group=group, group_dst=index + 1)
            assert work is not None
            sends.append((work, output))  # the tensor must live until it has been sent
            if len(sends) > 2:
                sends.popleft()[0].wait()
    for work, _ in sends:
        work.wait()
    return total
