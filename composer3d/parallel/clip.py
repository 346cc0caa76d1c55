"""One norm over all gradients of the job, every element counted once, on every mesh."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.mesh import Mesh


def square_share(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
    """This rank's share of the squared norm of all gradients: summed over the whole world it is the squared norm.

    A stage's parameter is held by world / pp ranks. Of these, a gradient cut into n shards has each element on
    (world / pp) / n ranks, and each of them counts it by the inverse. Plain tensors are one shard: ranks hold them
    alike.

    Returns:
        A float64 scalar on the mesh's device, wherever the gradients are. No collective: ``Mesh.sum_over_world`` sums
        it together with the loss.
    """
    shares = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        shards = 1
        if isinstance(grad, DTensor):
            for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
                assert not placement.is_partial(), "Stages.finish_gradients has reduced every gradient"
                shards *= 1 if placement.is_replicate() else size
            grad = grad.to_local()
        norm = torch.linalg.vector_norm(grad).to(torch.float64)
        shares.append(norm * norm * (shards / mesh.stage_ranks))
    total = torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)
    return total.to(mesh.device)


def scale_gradients(parameters: Iterable[nn.Parameter], *, norm: float, max_norm: float) -> None:
    """Scale all gradients in place so that their global ``norm`` is at most ``max_norm``; 0 leaves them as they are.

    Every rank must pass the same ``norm``. Pascanu et al. 2013 (arXiv 1211.5063).
    """
    if max_norm <= 0 or norm <= max_norm:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)
