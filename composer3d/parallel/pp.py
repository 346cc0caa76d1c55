"""Pipeline parallelism on ``torch.distributed.pipelining``: static shapes, labels and positions by keyword, no logits
sent.

Which schedule is whose: ``composer3d.schedules``. Private API of torch's pipelining stays in this file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
)

from composer3d import schedules
from composer3d.errors import PlanError
from composer3d.mesh import Mesh
from composer3d.recipe.schema import ParallelTable

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_SINGLE: dict[str, type[PipelineScheduleSingle]] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
_MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "LoopedBFS": ScheduleLoopedBFS,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def placement(pp: int, parallel: ParallelTable, micro_batches: int, rows: Sequence[Sequence[str]]) -> list[list[int]]:
    """The stages of each pipeline rank, in order; of one rank, all there is.

    Args:
        rows: of the schedule's file, where it has one.

    Raises:
        PlanError: the schedule takes no such number of micro-batches, or its file does not fit.
    """
    name, each = parallel.schedule, parallel.stages_per_rank
    if pp == 1:
        return [[0]]
    if name == "csv":
        return schedules.check_csv(rows, parallel.schedule_csv or "", pp=pp, each=each, micro_batches=micro_batches)
    if (need := schedules.micro_batches_wrong(name, micro_batches, pp, f"{pp} ranks")) is not None:
        raise PlanError(f"{name} has {micro_batches} micro-batches, but needs {need}")
    return [schedules.stages_of(rank, pp, each, v=schedules.SCHEDULES[name].v) for rank in range(pp)]


def build_schedule(
    modules: Sequence[nn.Module],
    builders: Sequence[Callable[[], Callable[[], None]] | None],
    mesh: Mesh,
    *,
    parallel: ParallelTable,
    rows: Sequence[Sequence[str]],
    stages: Sequence[Sequence[int]],
    micro_batches: int,
    stream: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Schedule:
    """The runtime of this rank's stages.

    Args:
        modules: the stages of this rank, first to last; called with tokens (first stage of all) or the residual stream,
            and keywords.
        builders: of each stage, what hands over the weight gradients that were put off (``deferred.put_off``).
        rows: of the schedule's file, where it has one.
        stages: of each pipeline rank (``placement``).
        stream: a meta tensor with the shape and dtype of what passes between stages: one micro-batch, this rank's
            shard.
        loss_fn: maps what the last stage returned, its summed loss, to what backward starts from.

    Gradients are not scaled: the loss is divided by the count of valid tokens once. Sends and receives of a rank and
    step: micro_batches x ``stream`` each way across every boundary of its stages.
    """
    count = sum(len(held) for held in stages)
    # In static mode the examples must require grad wherever a gradient flows.
    flows = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device, requires_grad=True)
    # The first stage's input comes from the loader: only that there is one counts, its shape is never read.
    tokens = torch.empty(stream.shape, dtype=torch.int64, device=mesh.device)
    loss = torch.zeros((), device=mesh.device, requires_grad=True)
    own: list[Any] = [
        PipelineStage(
            module,
            index,
            count,
            mesh.device,
            input_args=(tokens if index == 0 else flows,),
            output_args=(flows if index < count - 1 else loss,),
            group=mesh.pp_group,
            dw_builder=builder,
        )
        for module, builder, index in zip(modules, builders, stages[mesh.at["pp"]], strict=True)
    ]
    more: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss_fn, "scale_grads": False}
    if parallel.schedule in _SINGLE:
        return _SINGLE[parallel.schedule](own[0], **more)
    if parallel.schedule in _MULTI:
        return _MULTI[parallel.schedule](own, **more)
    runtime = _PipelineScheduleRuntime(own, **more)
    order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(order)
    return runtime


def forward_only(
    modules: Sequence[nn.Module],
    mesh: Mesh,
    stages: Sequence[Sequence[int]],
    stream: Tensor,
    micro_batches: Sequence[tuple[Tensor, dict[str, Tensor]]],
) -> Tensor:
    """Run micro-batches through the pipeline without gradients; the sum of the losses where the last stage is, else 0.

    Ranks move in step: in each tick a rank runs one of its stages, then sends what it made and receives what the others
    made for it in one batch. Sends apart from receives would let two ranks of NCCL wait for each other.

    Args:
        micro_batches: for each, the tokens (read by the first stage) and the keywords of this rank's stages.
    """
    rank, group = mesh.at["pp"], mesh.pp_group
    rank_of = {stage: number for number, held in enumerate(stages) for stage in held}
    module_of = dict(zip(stages[rank], modules, strict=True))
    last = len(rank_of) - 1
    inputs: dict[tuple[int, int], Tensor] = {}
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for tick in schedules.forward_order(stages, len(micro_batches)):
        ops = []
        for work in tick:
            if work is None or (work[0] == last and rank_of[last] != rank):
                continue
            stage, number = work
            here, there = rank_of[stage] == rank, stage < last and rank_of[stage + 1] == rank
            if here:
                tokens_BT, keywords = micro_batches[number]
                output = module_of[stage](tokens_BT if stage == 0 else inputs.pop(work), **keywords)
                if stage == last:
                    total += output
                elif there:
                    inputs[stage + 1, number] = output
                else:
                    peer = rank_of[stage + 1]
                    ops.append(dist.P2POp(dist.isend, output.contiguous(), group=group, group_peer=peer))
            elif there:
                inputs[stage + 1, number] = torch.empty_like(stream, device=mesh.device)
                source = rank_of[stage]
                ops.append(dist.P2POp(dist.irecv, inputs[stage + 1, number], group=group, group_peer=source))
        for request in dist.batch_isend_irecv(ops) if ops else ():
            request.wait()
    return total
