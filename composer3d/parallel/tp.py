"""Tensor parallelism from the plan's table: Megatron-style columns and rows, sequence parallel residual stream.

Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198). Per block and micro-batch, forward:
two all-gathers and two reduce-scatters of the residual stream over tp (two all-reduces without sequence parallelism),
and the transposes of them in backward.
"""

from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from composer3d.errors import PlanError
from composer3d.parallel.plan import Plan, Style
from composer3d.recipe.schema import ParallelTable


class Replicated(ParallelStyle):
    """A module that every tp rank runs alike on a replicated input: parameters, input and output are ``Replicate()``.

    The parameters become DTensors all the same, so that the norm of all gradients, the optimizer and a checkpoint see
    one kind of parameter and count each element once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def partition(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in part.named_parameters(recurse=False):
                value = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))

        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:])

        def leave(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, partition, enter, leave)  # type: ignore[arg-type]


def _style(style: Style, parallel: ParallelTable) -> ParallelStyle:
    """The placements behind one word of a plan. The residual stream is a local tensor between modules."""
    stream: Placement = Shard(1) if parallel.sequence_parallel else Replicate()
    match style:
        case "embedding":  # the vocabulary is sharded: a rank looks up its rows, the sum is scattered
            # A DTensor comes out, which the stage makes local: FSDP warns of modules that return a view.
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False)
        case "norm":
            return SequenceParallel() if parallel.sequence_parallel else Replicated()
        case "gather":  # one all-gather for all projections that read this input
            return PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        case "column":
            return ColwiseParallel()
        case "row":
            return RowwiseParallel(output_layouts=stream)
        case "head":
            if parallel.loss_parallel:
                return ColwiseParallel(input_layouts=stream, use_local_output=False)
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())


def apply(stage: nn.Module, plan: Plan, mesh: DeviceMesh, parallel: ParallelTable) -> None:
    """Cut the modules of ``stage`` (on the meta device, or all ranks alike) over the 1-D tp ``mesh``, in place.

    Afterwards every parameter is a DTensor on ``mesh``: ``Shard(0)`` for columns, embedding and head, ``Shard(1)`` for
    rows, ``Replicate()`` for norms. No collective is run here.

    Raises:
        PlanError: a parameter stayed a plain tensor, which the plan's styles do not cut.
    """
    table = {
        name: _style(style, parallel)
        for name, _ in stage.named_modules()
        for glob, style in plan.tensor.items()
        if fnmatchcase(name, glob)
    }
    parallelize_module(stage, mesh, table, src_data_rank=None)
    plain = [name for name, parameter in stage.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise PlanError([f"the plan's tensor table leaves parameter {name!r} uncut" for name in plain])


def loss_context(mesh: DeviceMesh | None, parallel: ParallelTable) -> AbstractContextManager[None]:
    """Around forward and backward: cross-entropy of logits that stay sharded over the vocabulary."""
    return loss_parallel() if mesh is not None and parallel.loss_parallel else nullcontext()
