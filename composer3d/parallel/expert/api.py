"""Expert parallelism: each rank of ep holds some of the experts of every layer.

The ranks of dp_shard x cp x tp hold different tokens: with sequence parallelism, those of tp too.
So ep takes any of them, and an expert computes the tokens of its ep group. Each expert is whole on
one rank of ep, and FSDP shards it over the ranks that are left (efsdp). Its gradients then lack the
tokens of the other ep groups only: FSDP sums them over efsdp and dp_replicate, and nothing divides
them (a gradient that is ep times too large was a bug of PyTorch, issue 160285).
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from composer3d.facts.errors import PlanError
from composer3d.models.contract import ShardingPlan
from composer3d.models.layers.moe import Exchange, Experts, Router
from composer3d.parallel.context.ownership import shard_sequence
from composer3d.parallel.expert.dispatch import exchange_over, sum_counts, sum_over
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.torch_private import part_of_this_rank


def form_groups(plan: ShardingPlan, mesh: Mesh) -> None:
    """Form the process groups that ``apply`` needs. Collective over all ranks.

    A pipeline rank may have no block with experts. If it formed groups only for those that it has,
    the other ranks would wait for it.
    """
    if plan.experts is not None:
        _ = mesh.sparse, mesh.sequence_group


def apply(stage: nn.Module, plan: ShardingPlan, mesh: Mesh, parallel: ParallelTable) -> None:
    """Put the experts of ``stage`` on the ranks of ep, in place, and let routers see whole
    sequences.

    ``stage`` is on the meta device. With ep > 1, the parameters of experts become DTensors,
    ``Shard(0)`` over ep. No collective after ``form_groups``.

    Raises:
        PlanError: ep > 1 and the plan names no experts; ep does not divide them; or tp > 1 without
            sequence parallelism.
    """
    sizes = mesh.sizes
    if plan.experts is None:
        if sizes.ep > 1:
            raise PlanError(
                f"mesh.ep = {sizes.ep}, but the plan names no module with experts; use mesh.ep = 1"
            )
        return
    if sizes.tp > 1 and not parallel.sequence_parallel:
        raise PlanError(
            f"mesh.tp = {sizes.tp} with experts needs parallel.sequence_parallel = true: without "
            "it, every tp rank would send the same tokens"
        )

    for name, module in stage.named_modules():
        if plan.holds_experts(name) and sizes.ep > 1:
            _cut_experts(name, cast(Experts, module), mesh, exchange_over)
        if isinstance(module, Router):
            _show_whole_sequences(module, mesh, parallel)


def apply_to_same_tokens(stage: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    """Put the experts of ``stage`` on the ranks of ep, which all hold the same tokens.

    This is for a forward without sequence parallelism, such as that of a single new token. There
    is no backward: the gradients of what all ranks hold would count ep times. ``stage`` is on the
    meta device. With ep > 1, the parameters of experts become DTensors, ``Shard(0)`` over ep.
    Collective over all ranks: it forms groups.

    Raises:
        PlanError: ep does not divide the experts.
    """
    for name, module in stage.named_modules():
        if plan.holds_experts(name) and mesh.sizes.ep > 1:
            _cut_experts(name, cast(Experts, module), mesh, sum_over)


def _cut_experts(
    name: str,
    module: Experts,
    mesh: Mesh,
    exchange_of: Callable[[dist.ProcessGroup], Exchange],
) -> None:
    ep = mesh.sparse["ep"]
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] % ep.size():
            raise PlanError(
                f"mesh.ep = {ep.size()} must divide the {parameter.shape[0]} experts of "
                f"{name}.{leaf}"
            )
        value = distribute_tensor(parameter, ep, [Shard(0)], src_data_rank=None)
        cut = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(leaf, cut)
    module.own_part = part_of_this_rank
    module.exchange = exchange_of(ep.get_group())


def _show_whole_sequences(router: Router, mesh: Mesh, parallel: ParallelTable) -> None:
    """Let the balance loss count the experts of whole sequences, which cp and tp cut."""
    group = mesh.sequence_group
    if group is None:
        return
    router.sequence_ranks = group.size()
    router.sum_over_sequence = partial(_sum_over, group)
    router.own_documents = partial(_own_documents, mesh=mesh, parallel=parallel)


def _sum_over(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    return sum_counts(counts, group.group_name)


def _own_documents(documents_BT: Tensor, mesh: Mesh, parallel: ParallelTable) -> Tensor:
    """The documents of the tokens that this rank routes: its cp part, and its tp part of that."""
    if mesh.cp_group is not None:
        documents_BT = shard_sequence(documents_BT, 1, mesh.cp_group, balanced=parallel.is_balanced)
    return documents_BT.chunk(mesh.sizes.tp, 1)[mesh.coords["tp"]]
