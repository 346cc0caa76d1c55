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
    if not (sharded or mesh.table.pp > 1):
        return
    if not all(alias.startswith("last.") and name.startswith("first.") for alias, name in ties.items()):
        raise PlanError(
            "FSDP and pipeline stages share a parameter between `first` and `last` alone; untie the others, or use "
            "mesh.pp = 1 and mesh.dp_shard = 1"
        )


def tie(stage: nn.Module, ties: Mapping[str, str]) -> None:
    """Make the names of ``ties`` one parameter again, after something has made two of it; followers are left alone."""
    for alias, name in ties.items():
        if _holds(stage, alias) and _holds(stage, name):
            holder, _, attribute = alias.rpartition(".")
            stage.get_submodule(holder).register_parameter(attribute, stage.get_parameter(name))


def part(stage: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """The names in ``stage`` of parameters that another stage owns, each to its owner's; they become its own copies."""
    followers = {alias: name for alias, name in ties.items() if _holds(stage, alias) and not _holds(stage, name)}
    for alias in followers:
        holder, _, attribute = alias.rpartition(".")
        shared = stage.get_parameter(alias)
        copy = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
        stage.get_submodule(holder).register_parameter(attribute, copy)
    return followers


class Ties:
    """What passes between the first stage's owners and the last stage's followers.

    Args:
        ties: each follower's name and its owner's, alike on all ranks.
        modules: this rank's stages.
        stages: of each pipeline rank; the first and the last of all may be on one.

    A rank's shard of a follower is that of the owner on the first stage's rank with the same other coordinates. Each
    method sends the bytes of the local shards once, over pp.
    """

    def __init__(
        self, ties: Mapping[str, str], modules: Sequence[nn.Module], mesh: Mesh, stages: Sequence[Sequence[int]]
    ) -> None:
        self._mesh = mesh
        last = max(max(held) for held in stages)
        self._ends = tuple(next(rank for rank, held in enumerate(stages) if end in held) for end in (0, last))
        held = {name: p for module in modules for name, p in module.named_parameters()}
        self._pairs = [(held.get(name), held.get(alias)) for alias, name in ties.items()]

    def refresh(self) -> None:
        """Give the owners' values to the followers."""
        for owner, follower in self._pairs:
            values = self._pass(None if owner is None else _local(owner), follower, *self._ends)
            if follower is not None:
                assert values is not None
                _local(follower).copy_(values)

    def add_gradients(self) -> None:
        """Add the followers' gradients to the owners', and drop them there."""
        for owner, follower in self._pairs:
            grad = None if follower is None or follower.grad is None else _local(follower.grad)
            values = self._pass(grad, owner, *reversed(self._ends))
            if owner is not None:
                assert values is not None
                assert owner.grad is not None
                total = _local(owner.grad)
                total.add_(values.to(total.device))  # it may be kept on the host
            if follower is not None:
                follower.grad = None

    def _pass(self, here: Tensor | None, there: Tensor | None, source: int, target: int) -> Tensor | None:
        """``here`` of pipeline rank ``source``, on rank ``target`` where ``there`` is its like; None on the others."""
        if source == target:
            return here
        group, device = self._mesh.pp_group, self._mesh.device
        if self._mesh.at["pp"] == source:
            assert here is not None
            message = here.to(device).contiguous()
            ops = [dist.P2POp(dist.isend, message, group=group, group_peer=target)]
        elif self._mesh.at["pp"] == target:
            assert there is not None
            message = torch.empty_like(_local(there), device=device, memory_format=torch.contiguous_format)
            ops = [dist.P2POp(dist.irecv, message, group=group, group_peer=source)]
        else:
            return None
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        return message


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _holds(stage: nn.Module, name: str) -> bool:
    try:
        stage.get_parameter(name)
    except AttributeError:
        return False
    return True
