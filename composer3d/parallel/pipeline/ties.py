"""Tied parameters: one parameter with two names, and its copy on another pipeline stage.

An embedding that is also the head (Press & Wolf 2017, arXiv 1608.05859), or that multi-token
prediction reads, is owned by the first stage. The last stage holds a copy. The copy gets the
owner's values before each step or evaluation, and sends its gradient to the owner afterwards. So
there is one name, one optimizer state and one term in the gradient norm, all on the first stage.

Here, ``ties`` maps the second name of a tied parameter (the alias) to its first name (the owner).
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.facts.errors import PlanError
from composer3d.runtime.mesh import Mesh


def find_ties(model: nn.Module) -> dict[str, str]:
    """Find the tied parameters of ``model``.

    Returns:
        A mapping from each further name of a parameter to the name in ``named_parameters``.
    """
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first_name[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first_name[id(parameter)] != name
    }


def check_ties(ties: Mapping[str, str], mesh: Mesh, *, sharded: bool) -> None:
    """Check that FSDP and the pipeline can handle the ties.

    Raises PlanError if FSDP or the pipeline cuts the model, and parameters other than those of
    ``first`` and ``last`` are tied.
    """
    at_the_ends = all(
        alias.startswith("last.") and owner.startswith("first.") for alias, owner in ties.items()
    )
    if (sharded or mesh.sizes.pp > 1) and not at_the_ends:
        raise PlanError(
            "FSDP and pipeline stages can tie parameters of `first` and `last` only; untie the "
            "others, or use mesh.pp = 1 and mesh.dp_shard = 1"
        )


def tie(stage: nn.Module, ties: Mapping[str, str]) -> None:
    """Make all names of a tie one parameter again, after ``compose`` has replaced any of them.

    A tie is skipped if ``stage`` has only one of its names.
    """
    held = dict(stage.named_parameters(remove_duplicate=False))
    for alias, owner in ties.items():
        if alias in held:
            _set_parameter(stage, alias, held[_held_name(owner, ties, held)])


def split_ties(stage: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """Give ``stage`` a copy of each tied parameter that another stage owns.

    Returns:
        A mapping from the name of each copy to the name of its owner. A copy with several names has
        the first of them.
    """
    held = dict(stage.named_parameters(remove_duplicate=False))
    copies = {}
    for alias, owner in ties.items():
        if alias in held and alias == _held_name(owner, ties, held):
            parameter = held[alias]
            copy = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
            _set_parameter(stage, alias, copy)
            copies[alias] = owner
    tie(stage, ties)
    return copies


def _held_name(owner: str, ties: Mapping[str, str], held: Mapping[str, nn.Parameter]) -> str:
    """Return the first name of the parameter ``owner`` that a stage with names ``held`` has."""
    names = (owner, *(alias for alias in ties if ties[alias] == owner))
    return next(name for name in names if name in held)


def _set_parameter(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    stage.get_submodule(module).register_parameter(attribute, parameter)


class Ties:
    """The exchange between owners on the first stage and their copies on the last stage.

    Both stages shard a tied parameter in the same way. So a rank exchanges its shards with one
    peer: the rank of the other stage that has the same coordinates except pp. ``refresh`` and
    ``add_gradients`` each send a shard once, over pp. Nothing is sent if one rank holds both
    stages.

    Args:
        ties: from each alias to its owner, the same on all ranks.
        modules: this rank's stages.
        mesh: the mesh of the job.
        stages: the stage numbers of each pipeline rank.
    """

    def __init__(
        self,
        ties: Mapping[str, str],
        modules: Sequence[nn.Module],
        mesh: Mesh,
        stages: Sequence[Sequence[int]],
    ) -> None:
        self._mesh = mesh
        last = max(max(held) for held in stages)
        first_rank = next(rank for rank, held in enumerate(stages) if 0 in held)
        last_rank = next(rank for rank, held in enumerate(stages) if last in held)
        self._peer = last_rank if mesh.coords["pp"] == first_rank else first_rank

        # (owner, copy) of each tie, if this rank holds at least one. None: the peer holds it.
        self._pairs: list[tuple[nn.Parameter | None, nn.Parameter | None]] = []
        if last > 0:
            held_here = {
                name: parameter
                for module in modules
                for name, parameter in module.named_parameters()
            }
            # The copy of several aliases has the name of the first of them.
            first_alias = {owner: alias for alias, owner in reversed([*ties.items()])}
            for owner, alias in first_alias.items():
                pair = held_here.get(owner), held_here.get(alias)
                if any(parameter is not None for parameter in pair):
                    self._pairs.append(pair)

    def refresh(self) -> None:
        """Copy the owners' values into the copies. A send and a receive over pp for each tie."""
        for owner, copy in self._pairs:
            values = self._transfer(owner, copy)
            if copy is not None:
                local_shard(copy).copy_(values)

    def add_gradients(self) -> None:
        """Add the copies' gradients to those of their owners, and drop them on the copies.

        A send and a receive over pp for each tie, except for frozen parameters, which have no
        gradient.
        """
        for owner, copy in self._pairs:
            held = copy if owner is None else owner
            if held is None or not held.requires_grad:
                continue
            values = self._transfer(None if copy is None else copy.grad, owner)
            if owner is not None:
                total = local_shard(owner.grad)
                # With CPU offload, the owner's gradient is in host memory.
                total.add_(values.to(total.device))
            if copy is not None:
                copy.grad = None

    def _transfer(self, source: Tensor | None, target: Tensor | None) -> Tensor:
        """Return the local shard of ``source``.

        If this rank has only ``target``, it receives the shard from the peer. If it has only
        ``source``, it sends the shard.
        """
        if source is not None and target is not None:
            return local_shard(source)
        shard = local_shard(target if source is None else source)
        group, device = self._mesh.pp_group, self._mesh.device
        if source is not None:
            message = shard.to(device).contiguous()
            transfer = dist.P2POp(dist.isend, message, group=group, group_peer=self._peer)
        else:
            message = torch.empty_like(shard, device=device, memory_format=torch.contiguous_format)
            transfer = dist.P2POp(dist.irecv, message, group=group, group_peer=self._peer)
        for request in dist.batch_isend_irecv([transfer]):
            request.wait()
        return message


def local_shard(tensor: Tensor | None) -> Tensor:
    """Return this rank's elements of ``tensor``, detached. Writing to them changes ``tensor``.

    A DTensor gives a plain tensor of its shard's shape; a plain tensor gives all its elements.
    """
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
