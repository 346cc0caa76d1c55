"""The norm over all gradients of a job. Every element counts once, on every mesh."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.facts.limits import JOB
from composer3d.runtime.mesh import Mesh

# The parts of a model whose norms are reported, and how the name of a parameter tells its part: the
# first pattern that is found in it. Of our models, "other" has only the projections of multi-token
# prediction. A part of their own would make the message with the loss longer, and so change bits.
PARTS: Mapping[str, str] = {
    "norms": r"norm\.",
    "embedding": r"^first\.",
    "head": r"^last\.",
    "attention": r"\.attn\.",
    "routers": r"\.router\.",
    "experts": r"\.experts\.",
    "ffn": r"\.(ffn|shared|moe)\.",
    "other": "",
}


# As many squares of gradients in host memory are added up in their own dtype.
ROW = JOB.row


@cache
def part_of(name: str) -> str:
    """Return the part of the model to which the parameter ``name`` belongs, a key of ``PARTS``."""
    return next(part for part, pattern in PARTS.items() if re.search(pattern, name))


def local_grad_norm_sq_by_part(
    named_parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh
) -> list[Tensor]:
    """Compute ``local_grad_norm_sq`` of each of ``PARTS``, in their order; 0 for an absent part.

    Each is a float64 scalar on the mesh's device. No collective.
    """
    members: dict[str, list[nn.Parameter]] = {part: [] for part in PARTS}
    for name, parameter in named_parameters:
        members[part_of(name)].append(parameter)
    return [local_grad_norm_sq(parameters, mesh) for parameters in members.values()]


@torch.no_grad()  # with gradients, ``to_local`` would make nodes of a graph
def local_grad_norm_sq(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """Compute this rank's share of the squared norm. The shares of all ranks add up to it.

    The parameters of a pipeline stage are on world / pp ranks. If a gradient is cut into n shards,
    each element is on (world / pp) / n of these ranks, so each rank weights it by n / (world / pp).
    A plain tensor counts as one shard, held by all of these ranks. Parameters without a gradient
    are skipped.

    Returns:
        A float64 scalar on the mesh's device, even if the gradients are in host memory.

    No collective: ``Mesh.sum_over_world`` can sum the share together with the loss.
    """
    by_shards: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        shards = 1
        if isinstance(grad, DTensor):
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
                assert not placement.is_partial(), "Stages.finish_gradients reduces every gradient"
                if not placement.is_replicate():
                    shards *= size
            grad = grad.to_local()
        by_shards[shards].append(grad)

    shares = [_norm_sq(grads) * (shards / mesh.stage_ranks) for shards, grads in by_shards.items()]
    if not shares:
        # Made on the device: a copy would wait for it.
        return torch.zeros((), dtype=torch.float64, device=mesh.device)
    return torch.stack(shares).sum().to(mesh.device)


def _norm_sq(grads: list[Tensor]) -> Tensor:
    """Return the sum of all squares of at least one gradient, a float64 scalar on their device.

    A GPU adds up the squares of a gradient in a tree. A CPU adds them one after the other, and the
    more it has added, the more of the next one is rounded away: the norm of 10^8 numbers in float32
    is 1% too small. So it adds up short rows, and float64 what is left.
    """
    if grads[0].device.type != "cpu":
        # One kernel for many gradients.
        return torch.stack(torch._foreach_norm(grads)).to(torch.float64).square().sum()
    squares, short = [], []
    for grad in grads:
        if grad.numel() < ROW:
            short.append(grad)
            continue
        flat = grad.flatten()
        end_of_rows = flat.numel() // ROW * ROW
        norms = torch.linalg.vector_norm(flat[:end_of_rows].view(-1, ROW), dim=1)
        squares.append(norms.to(torch.float64).square().sum())
        short.append(flat[end_of_rows:])
    norms = torch.stack(torch._foreach_norm(short, 2, torch.float64))
    return torch.stack([*squares, norms.square().sum()]).sum()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the number by which all gradients are divided, so that their norm is ``max_norm``.

    Pascanu et al. 2013 (arXiv 1211.5063). No collective, and the host waits for nothing.

    Args:
        norm: the norm of all gradients of the job, a float64 scalar, the same on every rank.
        max_norm: the largest norm; 0 means none.

    Returns:
        A float64 scalar on the device of ``norm``: at least 1, and 1 if the norm is small enough.
    """
    return (norm / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
