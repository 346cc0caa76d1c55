"""The smallest job that a store can save, on any number of ranks."""

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer3d.checkpoint.manifest import Manifest
from composer3d.parallel import Stages
from composer3d.recipe.schema import OptimTable
from composer3d.training.optimizers import Optimizer, build_optimizer

SHAPE = (5, 3)


def make_job(seed: int, shape: tuple[int, int] = SHAPE) -> tuple[Stages, Optimizer]:
    """Make a model of one matrix, sharded by rows over the ranks, and an optimizer after one step.

    The model stands in for ``Stages``: a store uses only its named parameters.
    """
    torch.manual_seed(seed)
    module = nn.Module()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight, grad = (distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for _ in range(2))
    module.weight = nn.Parameter(weight)
    optimizer = build_optimizer(module.named_parameters(), OptimTable())
    module.weight.grad = grad
    optimizer.step()
    return cast(Stages, module), optimizer


def full_state(stages: Stages, optimizer: Optimizer) -> dict[str, list[float]]:
    """Return the whole state as numbers, the same on every rank."""
    ((_, parameter),) = stages.named_parameters()
    tensors = {"weight": parameter.detach(), **optimizer.state[parameter]}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist()
        for name, t in tensors.items()
    }


def make_manifest(step: int) -> Manifest:
    return Manifest(
        step=step,
        world_size=dist.get_world_size(),
        model={"model.dim": 3},
        data={"at": step},
        lr=0.1,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Read the data files of a checkpoint: those without an identity of the save."""
    return {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
