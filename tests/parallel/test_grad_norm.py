"""The norm of all gradients."""

from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from composer3d.parallel.grad_norm import local_grad_norm_sq
from composer3d.runtime.mesh import Mesh


def test_the_norm_is_on_the_device_of_the_mesh() -> None:
    """Gradients may be in the host's memory. The sum over ranks needs the device of the mesh."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    mesh = cast(Mesh, SimpleNamespace(device=torch.device("meta"), stage_ranks=1))
    assert local_grad_norm_sq([parameter], mesh).device.type == "meta"
    assert local_grad_norm_sq([], mesh).device.type == "meta"
