"""Pipeline parallelism on ``torch.distributed.pipelining``: static shapes, labels and positions by keyword, no logits
sent.

Which schedule is whose: ``composer3d.schedules``. Private API of torch's pipelining stays in this file.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from composer3d import schedules
from composer3d.dist import check_same
from composer3d.errors import PlanError
from composer3d.mesh import Mesh
from composer3d.recipe.schema import ParallelTable


class Placement(NamedTuple):
    """``stages`` of each pipeline rank, in order; of one rank, all there is. ``rows``: of a schedule's file."""

    stages: list[list[int]]
    rows: list[list[str]]


def place(pp: int, parallel: ParallelTable, micro_batches: int) -> Placement:
    """Which stages are where. Collective where the schedule is a file: all ranks must have read the same.

    Raises:
        PlanError: the schedule takes no such number of micro-batches, or its file does not fit.
        MeshError: ranks have read different files.
    """
    name, each, path = parallel.schedule, parallel.stages_per_rank, parallel.schedule_csv or ""
    if pp == 1:
        return Placement([[0]], [])
    if name == "csv":
        rows = schedules.read_csv(path)
        check_same("the schedule in parallel.schedule_csv", rows)
        return Placement(schedules.check_csv(rows, path, pp=pp, each=each, micro_batches=micro_batches), rows)
    if (need := schedules.micro_batches_wrong(name, micro_batches, pp, f"{pp} ranks")) is not None:
        raise PlanError(f"{name} has {micro_batches} micro-batches, but needs {need}")
    return Placement([schedules.stages_of(rank, pp, each, v=schedules.SCHEDULES[name].v) for rank in range(pp)], [])


class Pipeline:
    """Runs this rank's stages: a step on torch's runtime, a validation in ticks.

    Args:
        modules: the stages of this rank, first to last; called with tokens (first stage of all) or the residual stream,
            and keywords.
        builders: of each stage, what hands over the weight gradients that were put off (``deferred.put_off``).
        stream: a meta tensor with the shape and dtype of what passes between stages: one micro-batch, this rank's
            shard.

    Gradients are not scaled: the loss is divided by the count of valid tokens once. Sends and receives of a rank and
    step: micro_batches x ``stream`` each way across every boundary of its stages.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        builders: Sequence[Callable[[], Callable[[], None]] | None],
        mesh: Mesh,
        parallel: ParallelTable,
        placement: Placement,
        micro_batches: int,
        stream: Tensor,
    ) -> None:
        self._mesh, self._placement, self._stream = mesh, placement, stream
        self._modules = dict(zip(placement.stages[mesh.at["pp"]], modules, strict=True))
        count = sum(len(held) for held in placement.stages)
        # In static mode the examples must require grad wherever a gradient flows.
        flows = torch.empty(stream.shape, dtype=stream.dtype, device=mesh.device, requires_grad=True)
        # The first stage's input comes from the loader: only that there is one counts, its shape is never read.
        tokens = torch.empty(stream.shape, dtype=torch.int64, device=mesh.device)
        loss = torch.zeros((), device=mesh.device, requires_grad=True)
        own: list[Any] = []
        for (index, module), builder in zip(self._modules.items(), builders, strict=True):
            taken, made = (tokens if index == 0 else flows,), (flows if index < count - 1 else loss,)
            rest: dict[str, Any] = {"group": mesh.pp_group, "dw_builder": builder}
            own.append(PipelineStage(module, index, count, mesh.device, taken, made, **rest))
        runtime = _PipelineScheduleRuntime if placement.rows else get_schedule_class(parallel.schedule)
        given: Any = own[0] if issubclass(runtime, PipelineScheduleSingle) else own
        self._schedule = runtime(given, micro_batches, lambda loss, _: loss / self._valid_tokens, scale_grads=False)
        if placement.rows:
            order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(placement.rows)}
            self._schedule._prepare_schedule_with_comms(order)

    def step(self, tokens_BT: Tensor, keywords: dict[str, Tensor], valid_tokens: float) -> Tensor:
        """Forward and backward of a step; the loss of all its micro-batches where the last stage is, else 0.

        Args:
            tokens_BT, keywords: of all micro-batches of the step; labels among them where the last stage is.
        """
        self._valid_tokens = valid_tokens
        losses: list[Tensor] = []
        arguments: dict[str, Any] = dict(keywords)
        if "labels_BT" in keywords:
            # The loss is made inside the stage; the runtime wants a target of its own before it asks loss_fn.
            arguments |= {"target": keywords["labels_BT"], "losses": losses}
        inputs = (tokens_BT,) if 0 in self._modules else ()
        self._schedule.step(*inputs, **arguments, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return total + sum(loss.detach().to(torch.float64) for loss in losses)

    def forward_only(self, micro_batches: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> Tensor:
        """Run micro-batches without gradients; the sum of the losses where the last stage is, else 0.

        Ranks move in step: in each tick a rank runs one of its stages, then sends what it made and receives what the
        others made for it in one batch. Sends apart from receives would let two ranks of NCCL wait for each other.

        Args:
            micro_batches: for each, the tokens (read by the first stage) and the keywords of this rank's stages.
        """
        rank, group = self._mesh.at["pp"], self._mesh.pp_group
        rank_of = {stage: number for number, held in enumerate(self._placement.stages) for stage in held}
        inputs: dict[tuple[int, int], Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        for tick in schedules.forward_order(self._placement.stages, len(micro_batches)):
            ops = []
            for stage, number in filter(None, tick):
                here, peer = rank_of[stage], rank_of.get(stage + 1)
                if here == rank:
                    tokens_BT, keywords = micro_batches[number]
                    inward = tokens_BT if stage == 0 else inputs.pop((stage, number))
                    output = self._modules[stage](inward, **keywords)
                    if peer is None:
                        total += output
                    elif peer == rank:
                        inputs[stage + 1, number] = output
                    else:
                        ops.append(dist.P2POp(dist.isend, output.contiguous(), group=group, group_peer=peer))
                elif peer == rank:
                    inputs[stage + 1, number] = torch.empty_like(self._stream, device=self._mesh.device)
                    ops.append(dist.P2POp(dist.irecv, inputs[stage + 1, number], group=group, group_peer=here))
            for request in dist.batch_isend_irecv(ops) if ops else ():
                request.wait()
        return total
