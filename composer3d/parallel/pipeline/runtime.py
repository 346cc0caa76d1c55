"""Pipeline parallelism on ``torch.distributed.pipelining``.

Shapes are static. Every rank reads labels and positions from its own loader, and passes them to its
stages as keywords. The last stage computes the loss, so no logits are sent. ``spec.schedules`` has
the source of each schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from composer3d.parallel.pipeline.trace import Recording, record
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import check_same
from composer3d.runtime.torch_private import ScheduleOfActions, around_pipeline_work, plan_actions
from composer3d.spec import schedules
from composer3d.spec.errors import PlanError


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
    """The pipeline on this rank. torch's runtime runs training steps; ``forward_only`` evaluates.

    Gradients are not scaled: the loss is divided once, by the number of valid tokens. In a training
    step, each boundary between stages of two ranks carries the activations of all micro-batches in
    one direction, and their gradients in the other.

    Args:
        modules: the stages of this rank, first to last. Each is called with tokens (stage 0) or the
            residual stream, and keywords.
        dw_builders: for each stage, the function that returns its deferred weight gradients (from
            ``zero_bubble.defer_weight_grads``), or None.
        mesh: the mesh of the job.
        parallel: the recipe's ``[parallel]``.
        placement: from ``place_stages``.
        micro_batches: micro-batches in a step.
        stage_activation: a meta tensor with the shape and dtype of one message between stages: this
            rank's shard of one micro-batch.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        dw_builders: Sequence[Callable[[], Callable[[], None]] | None],
        mesh: Mesh,
        parallel: ParallelTable,
        placement: Placement,
        micro_batches: int,
        stage_activation: Tensor,
    ) -> None:
        self._mesh = mesh
        self._placement = placement
        self._stage_activation = stage_activation
        own_stages = placement.stages[mesh.coords["pp"]]
        self._modules = dict(zip(own_stages, modules, strict=True))
        self._valid_tokens = torch.ones((), device=mesh.device)
        self._dw_builders = dict(zip(own_stages, dw_builders, strict=True))
        self._stages: list[PipelineStage] = []
        self._schedule = self._make_schedule(dw_builders, parallel, micro_batches)

    def _make_schedule(
        self,
        dw_builders: Sequence[Callable[[], Callable[[], None]] | None],
        parallel: ParallelTable,
        micro_batches: int,
    ) -> Any:
        mesh, placement = self._mesh, self._placement
        n_stages = sum(len(held) for held in placement.stages)
        shape, dtype = self._stage_activation.shape, self._stage_activation.dtype
        # Example inputs and outputs. They must require grad where a gradient flows.
        activation = torch.empty(shape, dtype=dtype, device=mesh.device, requires_grad=True)
        loss = torch.zeros((), device=mesh.device, requires_grad=True)
        # Tokens come from the loader, not from a stage: the shape of their example is never read.
        tokens = torch.empty(shape, dtype=torch.int64, device=mesh.device)

        stages: list[Any] = self._stages
        for (index, module), dw_builder in zip(self._modules.items(), dw_builders, strict=True):
            stages.append(
                PipelineStage(
                    module,
                    index,
                    n_stages,
                    mesh.device,
                    input_args=(tokens if index == 0 else activation,),
                    output_args=(loss if index == n_stages - 1 else activation,),
                    group=mesh.pp_group,
                    dw_builder=dw_builder,
                )
            )

        schedule_class: Any = ScheduleOfActions
        if not placement.csv_rows:
            schedule_class = get_schedule_class(parallel.schedule)
        takes_one_stage = issubclass(schedule_class, PipelineScheduleSingle)
        schedule = schedule_class(
            stages[0] if takes_one_stage else stages,
            micro_batches,
            lambda loss, _: loss / self._valid_tokens.to(loss.dtype),
            scale_grads=False,
        )
        if placement.csv_rows:
            plan_actions(schedule, placement.csv_rows)
        return schedule

    def step(self, tokens_BT: Tensor, keywords: Mapping[str, Any], valid_tokens: Tensor) -> Tensor:
        """Run forward and backward of all micro-batches of a step.

        Args:
            tokens_BT, keywords: the inputs of all micro-batches, joined along dim 0. ``labels_BT``
                is a keyword on the rank of the last stage.
            valid_tokens: the divisor of the loss, a scalar on the mesh's device.

        Returns:
            The sum of the divided losses on the rank of the last stage, 0 on the others: a float64
            scalar.

        Collectives: those of the stages, and sends and receives over pp.
        """
        self._valid_tokens = valid_tokens
        losses: list[Tensor] = []
        arguments: dict[str, Any] = dict(keywords)
        if "labels_BT" in keywords:
            # The last stage computes the loss itself, so no target is read. But the runtime calls
            # loss_fn only if there is one.
            arguments["target"] = keywords["labels_BT"]
            arguments["losses"] = losses
        inputs = (tokens_BT,) if 0 in self._modules else ()
        self._schedule.step(*inputs, **arguments, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        return total + sum(loss.detach().to(torch.float64) for loss in losses)

    def record(self) -> AbstractContextManager[Recording]:
        """Return a context that records the actions of the one ``step`` inside of it (``trace``).

        Collective over this rank's pipeline: all of its ranks must enter the context.
        """
        return record(self._stages, self._mesh.pp_group, self._mesh.device)

    def around_actions(
        self, context: Callable[[str], AbstractContextManager[object]]
    ) -> AbstractContextManager[None]:
        """Return a context in which ``context`` is entered around each action of this rank."""
        return around_pipeline_work(self._stages, context)

    def forward_only(self, micro_batches: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> Tensor:
        """Run micro-batches without gradients.

        In each tick, a rank runs at most one of its stages. Then it sends the output and receives
        its next inputs, in one batch of operations. If they were posted separately, two NCCL ranks
        could wait for each other.

        Args:
            micro_batches: the tokens (only stage 0 reads them) and the keywords of each.

        Returns:
            The sum of the losses, not divided, on the rank of the last stage, and 0 on the others:
            a float64 scalar.

        Collectives: those of the stages, and sends and receives over pp.
        """
        rank, group, device = self._mesh.coords["pp"], self._mesh.pp_group, self._mesh.device
        rank_of = self._rank_of_stages()
        # By stage and micro-batch.
        inputs: dict[tuple[int, int], Tensor] = {}
        total = torch.zeros((), dtype=torch.float64, device=device)
        for tick in schedules.forward_order(self._placement.stages, len(micro_batches)):
            ops = []
            for stage, micro_batch in filter(None, tick):
                # The last stage has no target.
                source, target = rank_of[stage], rank_of.get(stage + 1)
                if source == rank:
                    tokens_BT, keywords = micro_batches[micro_batch]
                    stage_input = tokens_BT if stage == 0 else inputs.pop((stage, micro_batch))
                    output = self._modules[stage](stage_input, **keywords)
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

    @property
    def modules(self) -> Mapping[int, nn.Module]:
        """This rank's stages, by stage number."""
        return self._modules

    def one_micro_batch(
        self, tokens_BT: Tensor, keywords: Mapping[str, Any], divisor: int
    ) -> Tensor:
        """Run one micro-batch forward through all stages and backward again, without the schedule.

        A rank has one stage at work at a time, and the others wait. No stage is left out, and no
        weight gradient is deferred beyond the backward of its stage.

        Args:
            tokens_BT: the tokens (only stage 0 reads them).
            keywords: as in ``step``, for one micro-batch.
            divisor: divides the loss.

        Returns:
            The divided loss on the rank of the last stage, and 0 on the others: a float64 scalar.

        Collectives: those of the stages, and sends and receives over pp: an activation and a
        gradient for each boundary of stages.
        """
        rank = self._mesh.coords["pp"]
        rank_of = self._rank_of_stages()
        last = len(rank_of) - 1
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        for stage in range(last + 1):
            if rank_of[stage] == rank:
                stage_input = tokens_BT if stage == 0 else inputs[stage]
                outputs[stage] = self._modules[stage](stage_input, **keywords)
            if stage < last:
                message = outputs[stage].detach() if stage in outputs else None
                received = self._pass_on(message, rank_of[stage], rank_of[stage + 1])
                if received is not None:
                    inputs[stage + 1] = received.requires_grad_()

        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        grads: dict[int, Tensor | None] = {}
        for stage in reversed(range(last + 1)):
            if rank_of[stage] == rank:
                output = outputs.pop(stage)
                if stage == last:
                    output = output / divisor
                    total += output.detach()
                output.backward(grads.pop(stage, None))
                dw_builder = self._dw_builders[stage]
                if dw_builder is not None:
                    dw_builder()()
            if stage > 0:
                message = inputs.pop(stage).grad if stage in inputs else None
                received = self._pass_on(message, rank_of[stage], rank_of[stage - 1])
                if received is not None:
                    grads[stage - 1] = received
        return total

    def _pass_on(self, message: Tensor | None, source: int, target: int) -> Tensor | None:
        """Send ``message`` from one pipeline rank to another, and return it there.

        Only the ranks ``source`` and ``target`` communicate.
        """
        rank, group = self._mesh.coords["pp"], self._mesh.pp_group
        if source == target:
            return message
        if rank == source:
            assert message is not None
            transfer = dist.P2POp(dist.isend, message.contiguous(), group=group, group_peer=target)
        elif rank == target:
            message = torch.empty_like(self._stage_activation, device=self._mesh.device)
            transfer = dist.P2POp(dist.irecv, message, group=group, group_peer=source)
        else:
            return None
        for request in dist.batch_isend_irecv([transfer]):
            request.wait()
        return message if rank == target else None

    def _rank_of_stages(self) -> dict[int, int]:
        """Return the pipeline rank that holds each stage."""
        return {
            stage: pp_rank for pp_rank, held in enumerate(self._placement.stages) for stage in held
        }
