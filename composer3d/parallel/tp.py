"""Tensor parallelism from the plan's table: Megatron-style columns and rows, sequence parallel residual stream.

Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198). Per block and micro-batch, forward:
two all-gathers and two reduce-scatters of the residual stream over tp (two all-reduces without sequence parallelism),
and the transposes of them in backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from composer3d.errors import PlanError
from composer3d.parallel.plan import Plan, Style
from composer3d.recipe.schema import ParallelTable

SEQUENCE_DIM = 1
_Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gather_sequence(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole sequence from the ranks' consecutive shards of it.

    Backward sums the ranks' gradients and keeps this rank's shard. Bytes sent a rank: (n-1) shards, both ways.
    """
    return _Exchange.apply(x_BTC, group, _all_gather, _reduce_scatter)


def scatter_sum(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's shard of the sequence, of the sum of the ranks' ``x_BTC``: the transpose of ``gather_sequence``."""
    return _Exchange.apply(x_BTC, group, _reduce_scatter, _all_gather)


def sum_gradients(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x_BTC`` itself, which all ranks hold alike; backward sums what each made of it."""
    return _Exchange.apply(x_BTC, group, _same, _all_reduce)


def sum_outputs(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' ``x_BTC``; backward hands the gradient on, since all ranks go on alike."""
    return _Exchange.apply(x_BTC, group, _all_reduce, _same)


class _Exchange(torch.autograd.Function):
    """A collective and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: _Collective, back: _Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grads[0], ctx.group), None, None, None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((group.size(), *x.shape))
    dist.all_gather_single(out.flatten(0, 1), x.contiguous(), group=group)
    return out.movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = x.unflatten(SEQUENCE_DIM, (group.size(), -1)).movedim(SEQUENCE_DIM, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    dist.reduce_scatter_single(out, parts.flatten(0, 1), group=group)
    return out


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


class Local(ParallelStyle):
    """Runs a module's own forward on this rank's shards, as plain tensors, with a collective before or after it.

    The parameters are DTensors, so that FSDP, the norm of all gradients, the optimizer and a checkpoint know their
    place in the whole; the arithmetic between collectives never pays for DTensor's dispatch.

    Args:
        placement: of every parameter over tp.
        grad: placement of their gradients as backward leaves them; ``Partial()`` where ranks saw other tokens.
        enter, leave: what is done with the input, and with the output.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        grad: Placement | None = None,
        enter: _Collective | None = None,
        leave: _Collective | None = None,
    ) -> None:
        super().__init__()
        self.placement, self.grad = placement, grad or placement
        self.enter, self.leave = enter, leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        group, run = device_mesh.get_group(), type(module).forward

        def forward(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            x = self.enter(x, group) if self.enter is not None else x
            out = run(self._on_local_parameters(module), x, *arguments, **keywords)
            return self.leave(out, group) if self.leave is not None else out

        module.forward = forward
        return module

    def _on_local_parameters(self, module: nn.Module) -> nn.Module:
        """A shallow twin of ``module`` with its own parameters as plain tensors. Read at each call: FSDP swaps them."""
        if not module._parameters:
            return module
        twin = object.__new__(type(module))
        local = {
            name: p.to_local(grad_placements=[self.grad]) if isinstance(p, DTensor) else p
            for name, p in module._parameters.items()
        }
        twin.__dict__ = {**module.__dict__, "_parameters": local}
        return twin


def _style(style: Style, parallel: ParallelTable) -> ParallelStyle:
    """The placements behind one word of a plan. The residual stream is a local tensor between modules."""
    sequence = parallel.sequence_parallel
    stream: Placement = Shard(SEQUENCE_DIM) if sequence else Replicate()
    match style:
        case "embedding":  # the vocabulary is sharded: a rank looks up its rows, the sum is scattered
            # A DTensor comes out, which the stage makes local: FSDP warns of modules that return a view.
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False)
        case "norm":
            return Local(Replicate(), grad=Partial() if sequence else None)
        case "head_norm":  # of each head alone: a rank sees its heads only, so its gradient is a part of the sum
            return Local(Replicate(), grad=Partial())
        case "gather":  # one all-gather for all projections that read this input
            return Local(Replicate(), enter=gather_sequence if sequence else sum_gradients)
        case "column":
            return Local(Shard(0))
        case "row":
            return Local(Shard(1), leave=scatter_sum if sequence else sum_outputs)
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
        name: _style(style, parallel) for name, _ in stage.named_modules() if (style := plan.style_of(name)) is not None
    }
    parallelize_module(stage, mesh, table, src_data_rank=None)
    plain = [name for name, parameter in stage.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise PlanError([f"the plan's tensor table leaves parameter {name!r} uncut" for name in plain])


def loss_context(mesh: DeviceMesh | None, parallel: ParallelTable) -> AbstractContextManager[None]:
    """Around forward and backward: cross-entropy of logits that stay sharded over the vocabulary."""
    return loss_parallel() if mesh is not None and parallel.loss_parallel else nullcontext()
