"""Pipeline parallelism on ``torch.distributed.pipelining``.

Shapes are static. Every rank reads labels and positions from its own loader, and passes them to its
stages as keywords. The last stage computes the loss, so no logits are sent. ``facts.schedules`` has
the source of each schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from composer3d.facts import schedules
from composer3d.facts.errors import PlanError
from composer3d.models.contract import Parts
from composer3d.parallel.executor import StepShape, cut_into_micro_batches
from composer3d.parallel.pipeline.neighbours import StageOfPairs, form_routes
from composer3d.parallel.pipeline.trace import Recording, record
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import check_same
from composer3d.runtime.torch_private import ScheduleOfActions, around_pipeline_work, plan_actions


class Placement(NamedTuple):
    """The assignment of stages to pipeline ranks.

    Attributes:
        stages: the stage numbers of each pipeline rank, in order.
        csv_rows: the actions of each pipeline rank, if the schedule is a CSV file; else empty.
    """

    stages: list[list[int]]
    csv_rows: list[list[str]]


def place_stages(pp: int, parallel: ParallelTable, micro_batches: int) -> Placement:
    """Decide which pipeline rank holds which stages.

    Collective over all ranks for a CSV schedule: it checks that they have read the same file.

    Args:
        pp: pipeline ranks.
        parallel: the recipe's ``[parallel]``.
        micro_batches: micro-batches that a rank runs in a step.

    Raises:
        PlanError: the schedule cannot run this number of micro-batches; or its file cannot be read
            or run.
        MeshError: ranks have read different files.
    """
    name, per_rank = parallel.schedule, parallel.stages_per_rank
    if pp == 1:
        return Placement([[0]], [])
    if name == "csv":
        path = parallel.schedule_csv or ""
        rows = schedules.read_csv(path)
        check_same("the schedule in parallel.schedule_csv", rows)
        stages = schedules.check_csv(
            rows, path, pp=pp, stages_per_rank=per_rank, micro_batches=micro_batches
        )
        return Placement(stages, rows)
    need = schedules.micro_batch_requirement(name, micro_batches, pp, f"pp = {pp}")
    if need is not None:
        raise PlanError(f"{name} has {micro_batches} micro-batches, but needs {need}")
    v_shaped = schedules.SCHEDULES[name].v_shaped
    stages = [schedules.stages_of(rank, pp, per_rank, v_shaped=v_shaped) for rank in range(pp)]
    return Placement(stages, [])


class Pipeline:
    """The ``Executor`` of a rank of a pipeline. torch's runtime runs the schedule of a step.

    Gradients are not scaled: the loss is divided once, by the number of valid tokens. In a training
    step, each boundary between stages of two ranks carries the activations of all micro-batches in
    one direction, and their gradients in the other. Two ranks with such a boundary have a group of
    their own (``neighbours``). To make a Pipeline is collective over all ranks: it forms them.

    Args:
        modules: the stages of this rank, first to last. Each is called with tokens (stage 0) or the
            residual stream, and keywords.
        dw_builders: for each stage, the function that returns its deferred weight gradients (from
            ``zero_bubble.defer_weight_grads``), or None.
        mesh: the mesh of the job.
        parallel: the recipe's ``[parallel]``.
        placement: from ``place_stages``.
        step: the size of a rank's step.
        stage_activation: a meta tensor with the shape and dtype of one message between stages: this
            rank's shard of one micro-batch.
    """

    def __init__(
        self,
        modules: Sequence[Parts],
        dw_builders: Sequence[Callable[[], Callable[[], None]] | None],
        mesh: Mesh,
        parallel: ParallelTable,
        placement: Placement,
        step: StepShape,
        stage_activation: Tensor,
    ) -> None:
        self._mesh, self._step = mesh, step
        self._placement = placement
        self._stage_activation = stage_activation
        own_stages = placement.stages[mesh.coords["pp"]]
        self._modules = dict(zip(own_stages, modules, strict=True))
        self._divisor = torch.ones((), device=mesh.device)
        self._losses: list[Tensor] = []  # of the step's micro-batches, divided
        self._stages: list[StageOfPairs] = []
        self._schedule = self._make_schedule(dw_builders, parallel)

    def _make_schedule(
        self,
        dw_builders: Sequence[Callable[[], Callable[[], None]] | None],
        parallel: ParallelTable,
    ) -> Any:
        mesh, placement = self._mesh, self._placement
        n_stages = sum(len(held) for held in placement.stages)
        shape, dtype = self._stage_activation.shape, self._stage_activation.dtype
        # Example inputs and outputs. They must require grad where a gradient flows.
        activation = torch.empty(shape, dtype=dtype, device=mesh.device, requires_grad=True)
        depths = max(module.mtp_layers for module in self._modules.values())
        loss = torch.zeros([1 + depths] if depths else [], device=mesh.device, requires_grad=True)
        # Tokens come from the loader, not from a stage: the shape of their example is never read.
        tokens = torch.empty(shape, dtype=torch.int64, device=mesh.device)

        routes = form_routes(placement.stages, mesh)
        stages: list[Any] = self._stages
        for (index, module), dw_builder in zip(self._modules.items(), dw_builders, strict=True):
            stages.append(
                StageOfPairs(
                    module,
                    index,
                    n_stages,
                    mesh.device,
                    input_args=(tokens if index == 0 else activation,),
                    output_args=(loss if index == n_stages - 1 else activation,),
                    group=mesh.pp_group,
                    dw_builder=dw_builder,
                    rank=mesh.rank,
                    routes=routes,
                )
            )

        schedule_class: Any = ScheduleOfActions
        if not placement.csv_rows:
            schedule_class = get_schedule_class(parallel.schedule)
        takes_one_stage = issubclass(schedule_class, PipelineScheduleSingle)
        schedule = schedule_class(
            stages[0] if takes_one_stage else stages,
            self._step.micro_batches,
            self._divided,
            scale_grads=False,
        )
        if placement.csv_rows:
            plan_actions(schedule, placement.csv_rows)
        return schedule

    def forward_backward(
        self, tokens_BT: Tensor, keywords: Mapping[str, Any], divisor: Tensor
    ) -> Tensor:
        """See ``Executor.forward_backward``, with its shapes (B, T)."""
        self._divisor = divisor
        self._losses.clear()
        arguments: dict[str, Any] = dict(keywords)
        if "labels_BT" in keywords:
            # The last stage computes the loss itself, so no target is read. But the runtime calls
            # loss_fn only if there is one.
            arguments["target"] = keywords["labels_BT"]
        inputs = (tokens_BT,) if 0 in self._modules else ()
        self._schedule.step(*inputs, **arguments, return_outputs=False)
        total = torch.zeros(divisor.shape, dtype=torch.float64, device=self._mesh.device)
        return total + sum(loss.to(torch.float64) for loss in self._losses)

    def _divided(self, loss: Tensor, _: Any) -> Tensor:
        """Return the scalar of which the runtime computes the gradients of a micro-batch."""
        divided = loss / self._divisor.to(loss.dtype)
        self._losses.append(divided.detach())
        # Nobody reads the sum of several losses; each has the gradient 1.
        return divided.to(torch.float64).sum() if divided.dim() else divided

    @property
    def stages(self) -> Sequence[StageOfPairs]:
        """This rank's stages, first to last."""
        return self._stages

    def record(self) -> AbstractContextManager[Recording]:
        """Return a context that records the actions of the one step inside of it (``trace``).

        Collective over this rank's pipeline: all of its ranks must enter the context.
        """
        return record(self._stages, self._mesh.pp_group, self._mesh.device)

    def around_actions(
        self, context: Callable[[str], AbstractContextManager[object]]
    ) -> AbstractContextManager[None]:
        """Return a context in which ``context`` is entered around each action of this rank."""
        return around_pipeline_work(self._stages, context)

    def forward(self, tokens_BT: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        """See ``Executor.forward``, with its shapes (B, T).

        In each tick, a rank runs at most one of its stages. Then it sends the output and receives
        its next inputs, in one batch of operations. If they were posted separately, two NCCL ranks
        could wait for each other.
        """
        micro_batches = list(cut_into_micro_batches(tokens_BT, keywords, self._step.micro_batch))
        rank, group, device = self._mesh.coords["pp"], self._mesh.pp_group, self._mesh.device
        rank_of = {
            stage: pp_rank for pp_rank, held in enumerate(self._placement.stages) for stage in held
        }
        # By stage and micro-batch.
        inputs: dict[tuple[int, int], Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=device)
        for tick in schedules.forward_order(self._placement.stages, len(micro_batches)):
            ops = []
            for stage, micro_batch in filter(None, tick):
                # The last stage has no target.
                source, target = rank_of[stage], rank_of.get(stage + 1)
                if source == rank:
                    tokens, inputs_of_stage = micro_batches[micro_batch]
                    stage_input = tokens if stage == 0 else inputs.pop((stage, micro_batch))
                    output = self._modules[stage](stage_input, **inputs_of_stage)
                    if target is None:
                        total += output
                    elif target == rank:
                        inputs[stage + 1, micro_batch] = output
                    else:
                        message = output.contiguous()
                        ops.append(dist.P2POp(dist.isend, message, group=group, group_peer=target))
                elif target == rank:
                    message = torch.empty_like(self._stage_activation, device=device)
                    inputs[stage + 1, micro_batch] = message
                    ops.append(dist.P2POp(dist.irecv, message, group=group, group_peer=source))
            if ops:
                for request in dist.batch_isend_irecv(ops):
                    request.wait()
        return total
