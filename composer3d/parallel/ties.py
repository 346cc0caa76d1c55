"""Parameters with several names: one in a stage, and a copy where the pipeline takes its two uses apart.

An embedding that is also the head (Press & Wolf 2017, arXiv 1608.05859) is owned by the first stage. The last stage
holds a follower: it takes the owner's values before anything runs, and gives its gradient to the owner afterwards. So
there is one name, one optimizer state and one term in the gradient norm, on the first stage.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.errors import PlanError
from composer3d.mesh import Mesh


def tied(model: nn.Module) -> dict[str, str]:
    """The further names of shared parameters, each to the name that ``named_parameters`` gives it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def check_ties(ties: Mapping[str, str], mesh: Mesh, *, sharded: bool) -> None:
    """Refuse shared parameters that no one unit of FSDP would own, or that stages other than the ends would share."""
    at_the_ends = all(alias.startswith("last.") and name.startswith("first.") for alias, name in ties.items())
    if (sharded or mesh.table.pp > 1) and not at_the_ends:
        raise PlanError(
            "FSDP and pipeline stages share a parameter between `first` and `last` alone; untie the others, or use "
            "mesh.pp = 1 and mesh.dp_shard = 1"
        )


def tie(stage: nn.Module, ties: Mapping[str, str]) -> None:
    """Make the names of ``ties`` one parameter again, after something has made two of it; followers are left alone."""
    held = dict(stage.named_parameters(remove_duplicate=False))
    for alias, name in ties.items():
        if alias in held and name in held:
            _put(stage, alias, held[name])


def part(stage: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """The names in ``stage`` of parameters that another stage owns, each to its owner's; they become its own copies."""
    held = dict(stage.named_parameters(remove_duplicate=False))
    followers = {alias: name for alias, name in ties.items() if alias in held and name not in held}
    for alias in followers:
        _put(stage, alias, nn.Parameter(torch.empty_like(held[alias]), requires_grad=held[alias].requires_grad))
    return followers


def _put(stage: nn.Module, name: str, parameter: nn.Parameter) -> None:
    holder, _, attribute = name.rpartition(".")
    stage.get_submodule(holder).register_parameter(attribute, parameter)


class Ties:
    """What passes between the first stage's owners and the last stage's followers.

    ``ties``: each follower's name and its owner's, alike on all ranks; ``stages`` of each pipeline rank, of which one
    may hold both ends. A rank's shard of a follower is that of the owner on the first stage's rank with the same other
    coordinates. Each method sends the bytes of the local shards once, over pp.
    """

    def __init__(
        self, ties: Mapping[str, str], modules: Sequence[nn.Module], mesh: Mesh, stages: Sequence[Sequence[int]]
    ) -> None:
        self._mesh = mesh
        last = max(max(held) for held in stages)
        ends = [next(rank for rank, held in enumerate(stages) if end in held) for end in (0, last)]
        self._peer = ends[1] if mesh.at["pp"] == ends[0] else ends[0]
        held = {name: p for module in modules for name, p in module.named_parameters()}
        pairs = [(held.get(name), held.get(alias)) for alias, name in ties.items()] if last else []
        self._pairs = [pair for pair in pairs if any(each is not None for each in pair)]

    def refresh(self) -> None:
        """Give the owners' values to the followers."""
        for owner, follower in self._pairs:
            values = self._pass(owner, follower)
            if follower is not None:
                local(follower).copy_(values)

    def add_gradients(self) -> None:
        """Add the followers' gradients to the owners', and drop them there."""
        for owner, follower in self._pairs:
            values = self._pass(None if follower is None else follower.grad, owner)
            if owner is not None:
                total = local(owner.grad)
                total.add_(values.to(total.device))  # it may be kept on the host
            if follower is not None:
                follower.grad = None

    def _pass(self, source: Tensor | None, target: Tensor | None) -> Tensor:
        """The shard of ``source``, where its like ``target`` is; a rank that has one alone sends it, or receives it."""
        tensor = local(target if source is None else source)
        if source is not None and target is not None:
            return tensor
        if source is not None:
            message = tensor.to(self._mesh.device).contiguous()
        else:
            message = torch.empty_like(tensor, device=self._mesh.device, memory_format=torch.contiguous_format)
        kind = dist.irecv if source is None else dist.isend
        op = dist.P2POp(kind, message, group=self._mesh.pp_group, group_peer=self._peer)
        for request in dist.batch_isend_irecv([op]):
            request.wait()
        return message


def local(tensor: Tensor | None) -> Tensor:
    """This rank's elements of a tensor: live memory."""
    assert tensor is not None
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
