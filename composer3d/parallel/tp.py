"""Tensor parallelism from the plan's table: Megatron-style columns and rows, sequence parallel residual stream.

Shoeybi et al. 2019 (arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198). Per block and micro-batch, forward:
two all-gathers and two reduce-scatters of the residual stream over tp (two all-reduces without sequence parallelism),
and the transposes of them in backward. The embedding takes one of the second kind, the head one of the first, and the
loss what ``vocab.cross_entropy`` says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composer3d.errors import PlanError
from composer3d.models.llama import cross_entropy
from composer3d.parallel import vocab
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


def gather_columns(x_NV: Tensor, columns: int, group: dist.ProcessGroup) -> Tensor:
    """All ``columns`` from the ranks' chunks of them, on ranks that go on alike; backward keeps this rank's chunk.

    Bytes sent a rank: (n-1) chunks, the last ones padded to the size of the others; none in backward.
    """
    _, held = vocab.own_rows(columns, group)
    padded_NV = F.pad(x_NV, (0, -(-columns // group.size()) - held))
    gathered_NV = _Exchange.apply(
        padded_NV, group, _all_gather, lambda grad, _: grad.chunk(group.size(), 1)[group.rank()]
    )
    return gathered_NV[:, :columns]


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


@dataclass
class Local(ParallelStyle):
    """Runs a module's own forward on this rank's shards, as plain tensors, with a collective before or after it.

    The parameters are DTensors, so that FSDP, the norm of all gradients, the optimizer and a checkpoint know their
    place in the whole; the arithmetic between collectives never pays for DTensor's dispatch.
    """

    placement: Placement  # of every parameter over tp
    grad: Placement | None = None  # of their gradients, if another: ``Partial()`` where ranks saw other tokens
    enter: _Collective = lambda x, group: x  # what is done with the input
    leave: _Collective = lambda x, group: x  # and with the output
    part: Callable[[Tensor], Tensor] = lambda parameter: parameter  # what of its parameters the module computes with
    # Given the module, whole yet: what it shall compute, called with its twin and the input that came in.
    compute: Callable[[nn.Module, dist.ProcessGroup], Callable[..., Tensor]] = lambda module, group: (
        type(module).forward
    )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        run = self.compute(module, group)
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))

        def shards() -> dict[str, Tensor | None]:
            """Its own parameters as plain tensors. Read at each call: FSDP swaps them."""
            own, grads = cast("dict[str, DTensor | None]", module._parameters), [self.grad or self.placement]
            return {n: None if p is None else self.part(p.to_local(grad_placements=grads)) for n, p in own.items()}

        def forward(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            twin, own = module, module.__dict__.get("prepared") or shards()
            if own:  # a shallow twin, whose own parameters are these
                twin = object.__new__(type(module))
                twin.__dict__ = {**module.__dict__, "_parameters": own}
            return self.leave(run(twin, self.enter(x, group), *arguments, **keywords), group)

        module.forward = forward
        if module._parameters:  # before a compiled block runs: torch 2.13 cannot keep a DTensor's mesh for its backward
            module.__dict__["prepare"] = lambda *_: module.__dict__.update(prepared=shards())
        return module


def _embedding(module: nn.Module, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """For a table that tokens are looked up in: those whose row another rank holds give 0 before the sum."""
    first, size = vocab.own_rows(module.get_parameter("weight").shape[0], group)
    lookup = type(module).forward

    def forward(twin: nn.Module, tokens_BT: Tensor) -> Tensor:
        row_BT = tokens_BT - first
        elsewhere_BT = (row_BT < 0) | (row_BT >= size)
        return lookup(twin, row_BT.masked_fill(elsewhere_BT, 0)).masked_fill(elsewhere_BT[..., None], 0)

    return forward


def _head(whole: bool, head: Any, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """For a module that makes logits and hands them to its seam ``cross_entropy``, put in here."""
    own, kind = getattr(head, "cross_entropy", None), type(head).__name__
    if own is None:
        raise PlanError(
            f"a head needs the seam `cross_entropy` to be cut over tp; {kind} has none: compute "
            "the loss in the head as composer3d.models.Head does, or use mesh.tp = 1"
        )
    if own is not cross_entropy and not whole:
        raise PlanError(f"the loss of {kind} is its own and needs whole logits; use parallel.loss_parallel = false")
    columns = head.weight.shape[0]
    first, _ = vocab.own_rows(columns, group)
    if whole:
        head.cross_entropy = lambda logits_NV, labels_N: own(gather_columns(logits_NV, columns, group), labels_N)
    else:
        head.cross_entropy = partial(vocab.cross_entropy, first=first, group=group)
    return type(head).forward


def _kv_column(kv_heads: int, mesh: DeviceMesh) -> Local:
    """Columns of key-value heads: a share of them, or where ranks are more, the one that this rank's queries read.

    Ranks that read the same head each have a part of its gradient, so the parameters stay whole on all of them.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    if kv_heads % size == 0:
        return Local(Shard(0))
    if size % kv_heads:
        raise PlanError(f"{kv_heads} key-value heads go into {size} tp ranks neither way; use mesh.tp = {kv_heads}")
    # Query heads are dealt out in order, and head h reads h // (heads / kv_heads).
    return Local(Replicate(), grad=Partial(), part=lambda p: p.chunk(kv_heads)[rank * kv_heads // size])


def _style(style: Style, plan: Plan, mesh: DeviceMesh, parallel: ParallelTable) -> ParallelStyle:
    """The placements behind one word of a plan. The residual stream is a local tensor between modules."""
    sequence = parallel.sequence_parallel
    enter, leave = (gather_sequence, scatter_sum) if sequence else (sum_gradients, sum_outputs)
    match style:
        case "embedding":
            return Local(Shard(0), leave=leave, compute=_embedding)
        case "norm":
            return Local(Replicate(), grad=Partial() if sequence else None)
        case "head_norm":  # of each head alone: a rank sees its heads only, so its gradient is a part of the sum
            return Local(Replicate(), grad=Partial())
        case "gather":  # one all-gather for all projections that read this input
            return Local(Replicate(), enter=enter)
        case "column":
            return Local(Shard(0))
        case "kv_column":
            assert plan.kv_heads is not None  # Plan.check
            return _kv_column(plan.kv_heads, mesh)
        case "row":
            return Local(Shard(1), leave=leave)
        case "head":
            return Local(Shard(0), enter=enter, compute=partial(_head, not parallel.loss_parallel))


def apply(stage: nn.Module, plan: Plan, mesh: DeviceMesh, parallel: ParallelTable) -> None:
    """Cut the modules of ``stage`` (on the meta device, or all ranks alike) over the 1-D tp ``mesh``, in place.

    Afterwards every parameter is a DTensor on ``mesh``: ``Shard(0)`` for columns, embedding and head, ``Shard(1)`` for
    rows, ``Replicate()`` for norms, and for key-value heads that are fewer than ranks. No collective is run here.

    Raises:
        PlanError: a parameter stayed a plain tensor, which the plan's styles do not cut; a head has no seam; tp and
            key-value heads do not go into each other.
    """
    styles = {name: style for name, _ in stage.named_modules() if (style := plan.style_of(name)) is not None}
    table = {name: _style(style, plan, mesh, parallel) for name, style in styles.items()}
    parallelize_module(stage, mesh, table, src_data_rank=None)
    plain = [name for name, parameter in stage.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise PlanError([f"the plan's tensor table leaves parameter {name!r} uncut" for name in plain])
