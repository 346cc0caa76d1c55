"""The norm over all gradients of a job. Every element counts once, on every mesh."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.runtime.mesh import Mesh


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
    shares = []
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
        norm = torch.linalg.vector_norm(grad).to(torch.float64)
        shares.append(norm * norm * (shards / mesh.stage_ranks))
    total = torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
    return total.to(mesh.device)


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their norm is at most ``max_norm``.

    Pascanu et al. 2013 (arXiv 1211.5063). No collective.

    Args:
        parameters: their ``.grad`` is scaled.
        norm: the norm of all gradients of the job, the same on every rank.
        max_norm: the largest norm; 0 leaves the gradients as they are.
    """
    if max_norm <= 0 or norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)
