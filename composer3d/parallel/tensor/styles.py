"""Tensor parallelism, with or without sequence parallelism: cut modules by the plan's styles.

Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), Korthikanti et al. 2022 (arXiv 2205.05198).

Collectives over tp for a micro-batch, of the residual stream, in a model of dense Llama blocks.
(Latent attention gathers two latents in place of its input, and experts have none.)

- With sequence parallelism, the forward of a block has two all-gathers and two reduce-scatters,
  that of the embedding one reduce-scatter, and that of the head one all-gather. Backward has the
  transposes of these.
- Without it, a block has two all-reduces in forward and two in backward; the embedding has one in
  forward only, and the head one in backward only.

A norm over all heads also has an all-reduce of a number for each token, and its transpose. The loss
has those of ``vocab.cross_entropy``, or without loss parallelism an all-gather of the logits. After
the last backward, an all-reduce sums gradients that are partial (``Stages.finish_gradients``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from composer3d.facts.errors import PlanError
from composer3d.models.contract import ShardingPlan, Style
from composer3d.parallel.tensor import forwards, fusible
from composer3d.parallel.tensor.collectives import (
    Collective,
    gather_sequence,
    no_collective,
    scatter_sum,
    sum_gradients,
    sum_outputs,
)
from composer3d.parallel.tensor.forwards import Forward
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.torch_private import own_parameters, part_of_this_rank


def apply(stage: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, parallel: ParallelTable) -> "Cut":
    """Cut the modules of ``stage`` over the 1-D tp ``mesh``, in place. No collective.

    ``stage`` is on the meta device, or holds the same values on all ranks. Afterwards every
    parameter is a DTensor on ``mesh``: ``Shard(0)`` for columns, embedding and head, ``Shard(1)``
    for rows, ``Replicate()`` for whole linear layers, norms of the stream or of one head, routers,
    and key-value projections with fewer heads than ranks. A norm over all heads is cut like the
    columns that it normalises. Experts are left as they are.

    Raises:
        PlanError: the plan leaves a parameter uncut; a head lacks its seam; neither of tp and the
            number of key-value heads divides the other; a norm over all heads is no
            ``torch.nn.RMSNorm``; or the vocabulary leaves no row for the last rank.
    """
    styles = {}
    for name, _ in stage.named_modules():
        style = plan.style_of(name)
        if style is not None:
            styles[name] = _style(style, plan, mesh, parallel)
    parallelize_module(stage, mesh, dict(styles), src_data_rank=None)

    uncut = [
        name
        for name, parameter in stage.named_parameters()
        if not isinstance(parameter, DTensor) and not plan.holds_experts(name.rpartition(".")[0])
    ]
    if uncut:
        raise PlanError(
            [f"the plan's tensor table leaves parameter {name!r} uncut" for name in uncut]
        )
    return Cut(
        refreshes={name: style.refresh for name, style in styles.items()},
        partial_gradients=frozenset(
            f"{name}.{parameter}"
            for name, style in styles.items()
            if style.sums_gradients
            for parameter, _ in stage.get_submodule(name).named_parameters(recurse=False)
        ),
    )


@dataclass(frozen=True)
class Cut:
    """What others must know of modules that are cut.

    Attributes:
        refreshes: a function for each cut module, by module name. Before each call of a compiled
            block, the functions of its modules must be called: the block's graph reads the shards
            that they store.
        partial_gradients: names of the parameters whose gradients are still to be summed over tp
            after backward.
    """

    refreshes: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    partial_gradients: frozenset[str] = frozenset()


@dataclass
class Local(ParallelStyle):
    """Run a module's own forward on this rank's shards as plain tensors, between two collectives.

    The parameters are DTensors, so that FSDP, the gradient norm, the optimizer and checkpoints know
    their place in the whole tensor. Forward and backward use plain tensors, which avoids the cost
    of DTensor's dispatch.

    Attributes:
        placement: placement of every parameter over tp.
        sums_gradients: whether the ranks see different tokens or heads, so that the gradient of
            each rank is a part of the sum. ``Stages.finish_gradients`` adds the parts up.
        pre_collective, post_collective: applied to the input and to the output.
        select: takes this rank's shard of a parameter, a plain tensor of the shard's shape, and
            returns the part that the module computes with; None: all of it.
        make_forward: called once with the module before it is cut, and with the tp ranks. It
            returns the forward to run; None: the forward of the module's class.
    """

    placement: Placement
    sums_gradients: bool = False
    pre_collective: Collective = no_collective
    post_collective: Collective = no_collective
    select: Callable[[Tensor], Tensor] | None = None
    make_forward: Callable[[nn.Module, dist.ProcessGroup], Forward] | None = None
    _module: nn.Module | None = field(default=None, init=False)
    _prepared: dict[str, Tensor | None] | None = field(default=None, init=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        forward_locally: Forward = type(module).forward
        if self.make_forward is not None:
            forward_locally = self.make_forward(module, group)
        self._module = module

        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, device_mesh, [self.placement], src_data_rank=None)
            cut = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(name, cut)

        def forward(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            with_shards = module
            shards = self._local_shards() if self._prepared is None else self._prepared
            if shards:
                # A shallow copy of the module with the shards as its parameters, new in each call:
                # FSDP replaces the DTensors between calls, and those must stay in the module
                # itself.
                with_shards = object.__new__(type(module))
                with_shards.__dict__ = {**module.__dict__, "_parameters": shards}
            out = forward_locally(
                with_shards, self.pre_collective(x, group), *arguments, **keywords
            )
            return self.post_collective(out, group)

        module.forward = forward
        return module

    def refresh(self) -> None:
        """Store this rank's shards as plain tensors, which ``forward`` uses in a compiled block.

        The graph cannot read them from the DTensors: torch 2.13 loses the mesh of a DTensor in the
        graph's backward. Call it before every forward, because FSDP replaces the parameters.
        """
        self._prepared = self._local_shards()

    def _local_shards(self) -> dict[str, Tensor | None]:
        """Return this rank's shards of the module's own parameters, as plain tensors."""
        assert self._module is not None
        shards: dict[str, Tensor | None] = {}
        for name, parameter in own_parameters(self._module).items():
            if parameter is None:
                shards[name] = None
                continue
            shard = part_of_this_rank(parameter)
            shards[name] = shard if self.select is None else self.select(shard)
        return shards


def _style(style: Style, plan: ShardingPlan, mesh: DeviceMesh, parallel: ParallelTable) -> Local:
    """Return how a module of ``style`` is cut, and the collectives around its forward."""
    sequence_parallel = parallel.sequence_parallel
    # The collectives before column layers and after row layers.
    if sequence_parallel and parallel.async_tp:
        before_columns, after_rows = fusible.gather_sequence, fusible.scatter_sum
    elif sequence_parallel:
        before_columns, after_rows = gather_sequence, scatter_sum
    else:
        before_columns, after_rows = sum_gradients, sum_outputs
    match style:
        case "embedding":
            return Local(
                Shard(0), post_collective=after_rows, make_forward=forwards.embedding_forward
            )
        case "norm" | "whole":
            return Local(Replicate(), sums_gradients=sequence_parallel)
        case "router" | "head_norm":
            # A rank sees only some of the tokens or of the heads: its gradient is a part of a sum.
            return Local(Replicate(), sums_gradients=True)
        case "column_norm" | "kv_column_norm":
            columns: Style = "column" if style == "column_norm" else "kv_column"
            cut = _style(columns, plan, mesh, parallel)
            return replace(cut, make_forward=forwards.norm_forward)
        case "gather":
            # One all-gather serves all projections that read this input. The module itself has no
            # parameters: the placement is not used.
            return Local(Replicate(), pre_collective=before_columns)
        case "column":
            return Local(Shard(0))
        case "kv_column":
            # ``models.fit.check`` refuses a plan without it.
            assert plan.kv_heads is not None
            return _kv_column(plan.kv_heads, mesh)
        case "row":
            return Local(Shard(1), post_collective=after_rows)
        case "head":
            return Local(
                Shard(0),
                pre_collective=before_columns,
                make_forward=partial(forwards.head_forward, loss_parallel=parallel.loss_parallel),
            )


def _kv_column(kv_heads: int, mesh: DeviceMesh) -> Local:
    """Return the style of a key-value projection, whose heads are cut over the ranks.

    With fewer heads than ranks, every rank holds all parameters, and computes the one head that its
    query heads read. Each rank's gradient is then a part of the sum.
    """
    tp, rank = mesh.size(), mesh.get_local_rank()
    if kv_heads % tp == 0:
        return Local(Shard(0))
    if tp % kv_heads:
        raise PlanError(
            f"mesh.tp = {tp} and {kv_heads} key-value heads: one must divide the other; "
            f"use mesh.tp = {kv_heads}"
        )
    # Rank r holds consecutive query heads, and query head h reads key-value head h // (heads /
    # kv_heads).
    head = rank * kv_heads // tp
    return Local(
        Replicate(),
        sums_gradients=True,
        select=lambda parameter: parameter.chunk(kv_heads)[head],
    )
