"""Sharded data parallelism: FSDP2 and HSDP, set up so that gradients are summed and never averaged.

Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), Zhao et al. 2023 (FSDP, arXiv 2304.11277). The
loss is already divided by the number of valid tokens of the whole step; FSDP's own division by the
number of ranks would divide it a second time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from composer3d.facts.units import units_of_blocks
from composer3d.models.contract import ShardingPlan
from composer3d.models.layers.moe import Router
from composer3d.parallel.data.reduce_scatter import SendNarrow
from composer3d.parallel.pipeline.ties import find_ties
from composer3d.recipe.schema import MemoryTable, ParallelTable, PrecisionTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import (
    ReduceScatter,
    accumulate_unsharded_grads,
    modules_of_unit,
    shard_over,
)


class ShardMeshes(NamedTuple):
    """The meshes that FSDP shards over (last dim) and replicates over (first of two dims).

    Attributes:
        dense: for all parameters but those of experts.
        experts: for experts; None: there are none.
    """

    dense: DeviceMesh
    experts: DeviceMesh | None


def meshes_of(
    mesh: Mesh,
    plan: ShardingPlan,
    parallel: ParallelTable,
    precision: PrecisionTable,
    memory: MemoryTable,
) -> ShardMeshes | None:
    """Return the meshes of FSDP. Collective over all ranks, as it may form groups.

    Even a single rank needs FSDP for mixed precision and for CPU offload: FSDP holds the parameters
    in ``precision.params``, and casts or copies them when it gathers them.

    Returns:
        None if FSDP has nothing to do.
    """
    sizes = mesh.sizes
    shares_experts = plan.experts is not None and sizes.dp_replicate * sizes.efsdp > 1
    is_needed = precision.compute is not None or memory.cpu_offload
    if mesh.fsdp is None and not shares_experts and not is_needed:
        return None

    dense = mesh.device_mesh["fsdp"] if mesh.fsdp is None else mesh.fsdp
    if parallel.zero == 0 and mesh.fsdp is not None:
        dense = mesh.replicas()
    if plan.experts is None:
        return ShardMeshes(dense, None)
    if parallel.zero == 0 and shares_experts:
        return ShardMeshes(dense, mesh.expert_replicas())
    if sizes.dp_replicate > 1:
        return ShardMeshes(dense, mesh.sparse["dp_replicate", "efsdp"])
    return ShardMeshes(dense, mesh.sparse["efsdp"])


def apply(
    stage: nn.Module,
    plan: ShardingPlan,
    meshes: ShardMeshes,
    parallel: ParallelTable,
    precision: PrecisionTable,
    memory: MemoryTable,
) -> None:
    """Shard ``stage`` in place over the last dims of ``meshes``, and replicate it over the first.

    FSDP gathers and reduces one unit at a time. Units are ``first``, every
    ``parallel.fsdp_blocks`` consecutive blocks, and ``last``. The last unit of blocks may have
    fewer. Each block of multi-token prediction, which ``last`` calls, is a unit. If ``first`` and
    ``last`` share a parameter, the stage itself is the unit of both. The experts of a unit have
    collectives of their own, unless they are shared by the same ranks as the other parameters. The
    biases of routers belong to no unit: every rank holds them whole, in their own dtype.

    Parameters become DTensors in ``precision.params``: ``Shard(0)`` over the last dim, before
    their tp placement. It is ``Shard(1)`` if tp cuts the rows unevenly, and for experts, because a
    rank may have fewer experts than there are shards. Parameters are gathered in
    ``precision.compute``. Gradients are summed over micro-batches and over ranks in
    ``precision.params``. With ``precision.reduce``, a rank's contribution is rounded once to it
    before it is sent to the ranks that shard (``SendNarrow``). Recipes with experts do not have
    that key: FSDP takes no such reduce-scatter for a unit with two meshes.

    Collectives of a unit in a step, each of all its parameters at once:
        all-gather of parameters: one. With ``zero = 3``, two for each micro-batch: in forward and
            in backward. ``last``, and a stage that is itself a unit, keep their parameters for
            backward, and so have one. So has ``first``, if the plan says that its backward reads
            no parameter.
        reduce-scatter of gradients: one; with ``zero`` 2 and 3, one for each micro-batch. With
            ``precision.reduce``, an all-to-all has its place.
        all-reduce of gradients over the replicating dim: one, of the sum over micro-batches,
            always in ``precision.params``: FSDP lets nobody replace it.

    Memory: a unit is gathered before the forward of its first block, and before the backward of its
    last one. In backward, the unit before it is gathered at the same time, one unit ahead. The
    gradients of a unit stay whole until the backward of its first block ends.

    Under pp, torch reduces gradients only after the last micro-batch, and does not drop gathered
    parameters after a backward, whatever ``zero`` is. With ``zero = 3``, the next forward of a
    unit drops its parameters.

    With ``memory.cpu_offload``, shards stay in host memory (pinned for a GPU). Parameters are
    copied to the device before each all-gather, and gradients to the host after each
    reduce-scatter.
    """
    compute_dtype = reduce_dtype = None
    if precision.compute is not None:
        compute_dtype = getattr(torch, precision.compute)
        reduce_dtype = getattr(torch, precision.params)
    mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    offload_policy = OffloadPolicy()
    if memory.cpu_offload:
        offload_policy = CPUOffloadPolicy(pin_memory=meshes.dense.device_type == "cuda")

    first, in_order, last = _units_in_forward(stage, parallel.fsdp_blocks)
    place = _placements(stage, plan, meshes)
    router_biases = {
        module.bias
        for module in stage.modules()
        if isinstance(module, Router) and module.bias is not None
    }
    for modules in (*in_order, [stage]):
        # Backward starts with `last`. If its forward dropped its parameters, they would be gathered
        # again at once.
        reshard = parallel.zero == 3 and modules[0] is not last and modules[0] is not stage
        fully_shard(
            modules,
            mesh=meshes.dense,
            reshard_after_forward=reshard,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            shard_placement_fn=place,
            ignored_params=router_biases,
        )

    _name_what_to_prefetch([cast(FSDPModule, modules[0]) for modules in in_order])
    if first is not None and plan.first_only_looks_up:
        cast(FSDPModule, first).set_unshard_in_backward(False)
    has_other_ranks = any(mesh.size() > 1 for mesh in meshes if mesh is not None)
    for unit in units(stage):
        # One rank divides by 1 anyway. If the factor is set, torch before 2.15 divides all
        # gradients by it in a kernel of its own, even by 1.
        if has_other_ranks:
            unit.set_gradient_divide_factor(1.0)
        # FSDP would multiply by 1 in the collective (PREMUL_SUM), which gloo cannot do.
        unit.set_force_sum_reduction_for_comms(True)
    if precision.reduces_in != precision.params:
        set_reduce_scatter(stage, SendNarrow(getattr(torch, precision.reduces_in)))


class _InForward(NamedTuple):
    """The units of a stage in the order of forward, each a list of modules.

    ``first`` and ``last`` are None if the stage lacks them, or if they share a parameter: then the
    stage itself is their unit, which ``units`` leaves out.
    """

    first: nn.Module | None
    units: list[list[nn.Module]]
    last: nn.Module | None


def _units_in_forward(stage: nn.Module, fsdp_blocks: int) -> _InForward:
    children = dict(stage.named_children())
    units = units_of_blocks(
        list(children["blocks"].children()), fsdp_blocks, alone=getattr(stage, "mtp_layers", 0)
    )
    if find_ties(stage):
        return _InForward(None, units, None)
    first, last = children.get("first"), children.get("last")
    if first is not None:
        units.insert(0, [first])
    if last is not None:
        units.append([last])
    return _InForward(first, units, last)


def _placements(
    stage: nn.Module, plan: ShardingPlan, meshes: ShardMeshes
) -> Callable[[nn.Parameter], Any]:
    """Return the function that tells FSDP how to shard a parameter; None is ``Shard(0)``."""
    experts = {
        parameter
        for name, parameter in stage.named_parameters()
        if plan.holds_experts(name.rpartition(".")[0])
    }
    # The rows of each expert are sharded; the first dim is the expert.
    of_experts: Any = None
    if meshes.experts is not None:
        # FSDP has collectives for each mesh of a unit. Experts that ep does not cut may lie on the
        # ranks of the other parameters: with the same mesh, one collective serves both.
        is_cut = any(isinstance(parameter, DTensor) for parameter in experts)
        is_dense = not is_cut and _ranks_of(meshes.experts) == _ranks_of(meshes.dense)
        of_experts = Shard(1) if is_dense else shard_over(meshes.experts, 1)

    def place(parameter: nn.Parameter) -> Any:
        return of_experts if parameter in experts else _columns_if_rows_are_uneven(parameter)

    return place


def _ranks_of(mesh: DeviceMesh) -> list[list[int]]:
    """Return the ranks of the group of this rank on each dim of a mesh."""
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]


def _name_what_to_prefetch(in_forward: Sequence[FSDPModule]) -> None:
    """Tell each unit, by its first module, which one to gather ahead in backward.

    ``in_forward`` has the first modules of all units, in the order of forward.
    """
    # In backward, FSDP prefetches the unit that ran before in forward. For the first unit that is
    # the `last` of the previous micro-batch: a useless all-gather. So every unit is told which
    # unit to prefetch. The first unit prefetches itself, which costs nothing: it is gathered.
    for previous, unit in zip((in_forward[0], *in_forward), in_forward, strict=False):
        unit.set_modules_to_backward_prefetch([previous])


def _columns_if_rows_are_uneven(parameter: nn.Parameter) -> Shard | None:
    """Shard the columns of a matrix whose rows tp cuts unevenly, such as a vocabulary.

    Two cuts of one dim make a ``_StridedShard``. With uneven rows it gives wrong offsets: of 259
    rows over tp 2 and fsdp 3, the last rank holds rows 216 to 258, and torch 2.13 says 217 to 258.
    """
    whole: Tensor = parameter
    if not isinstance(whole, DTensor) or not whole.placements[0].is_shard(0):
        return None
    return Shard(1) if whole.shape[0] % whole.device_mesh.size() else None


def units(stage: nn.Module) -> list[FSDPModule]:
    """Return the first module of each unit of ``stage``. The stage itself is first.

    All modules of a unit share its state, so what is set on one of them holds for the unit. Without
    FSDP there are no units.
    """
    return [
        module
        for module in stage.modules()
        if isinstance(module, FSDPModule) and modules_of_unit(module)[0] is module
    ]


def set_reduce_scatter(stage: nn.Module, reduce_scatter: ReduceScatter) -> None:
    """Let FSDP call ``reduce_scatter`` wherever a unit of ``stage`` sums gradients over its shards.

    A unit that one rank alone shards calls nothing.
    """
    for unit in units(stage):
        unit.set_custom_reduce_scatter(reduce_scatter)


def begin_micro_batch(units: Sequence[FSDPModule], parallel: ParallelTable, *, last: bool) -> None:
    """Tell FSDP whether the next backward is the last of the step. Under pp, torch does this.

    With ``zero`` 0 and 1, gathered parameters and whole gradients are kept until the last backward.
    With 2, only gathered parameters are kept. With 2 and 3, each rank adds up its shards of
    gradients, and replicas sum them after the last backward. Every unit must have gradients then:
    so experts without rows have zeros (``models.layers.moe``).

    Args:
        units: the ``units`` of a stage; the first is the stage itself. To search the stage for them
            here would visit all its modules in every micro-batch, four times.
        parallel: the recipe's ``[parallel]``.
        last: whether it is the last micro-batch.
    """
    for unit in units:
        unit.set_requires_gradient_sync(last or parallel.zero >= 2, recurse=False)
        # This sets a part of what the line above has set, so it must come second.
        unit.set_requires_all_reduce(last, recurse=False)
        unit.set_reshard_after_backward(last or parallel.zero == 3, recurse=False)
    for stage in units[:1]:
        stage.set_is_last_backward(last)


def flush_deferred_grads(stage: nn.Module) -> None:
    """Add gradients that were computed outside of a backward to FSDP's sum over micro-batches.

    In mixed precision, FSDP keeps that sum in ``precision.params``, apart from ``.grad``. Otherwise
    ``.grad`` is the sum, and nothing is moved.
    """
    for unit in units(stage):
        accumulate_unsharded_grads(unit)


def reshard(stage: nn.Module) -> None:
    """Drop gathered parameters after an evaluation, which has no backward that would drop them.

    The optimizer changes the shards, and a later forward would use the old gathered values.
    """
    for unit in units(stage):
        unit.reshard()
