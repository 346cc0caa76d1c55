"""The norm of all gradients."""

from types import SimpleNamespace
from typing import cast

import pytest
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


@pytest.mark.parametrize("shape", [(40, 50), (64, 64), (3000, 1501)])
def test_the_norm_of_large_gradients_in_host_memory_is_right(shape: tuple[int, ...]) -> None:
    """A CPU adds up float32 numbers one after the other: of many, it loses a part."""
    generator = torch.Generator().manual_seed(0)
    gradient = 1e-3 * torch.randn(shape, generator=generator)
    mesh = cast(Mesh, SimpleNamespace(device=torch.device("cpu"), stage_ranks=1))
    for grad in (gradient, gradient.T.contiguous().T):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = grad
        norm_sq = local_grad_norm_sq([parameter], mesh)
        expected = gradient.double().square().sum()
        assert norm_sq.dtype == torch.float64
        assert abs(norm_sq / expected - 1) < 1e-7
