"""The collectives of tensor parallelism: each backward is the transpose of its forward."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.parallel.tensor.collectives import gather_sequence, scatter_sum
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world
from tests.models.layers.labels import random


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def check_gather_and_scatter() -> tuple[float, float]:
    """Compare values and gradients of the two collectives with one process.

    Returns this rank's <G x, y> and <x, S y>, where G gathers and S sums and scatters.
    """
    with pool_world():
        rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        assert group is not None
        y_of_ranks = [random(2, 3 * size, 5, seed=seed) for seed in range(size)]  # (B, T, C) each
        y_sum = torch.stack(y_of_ranks).sum(0)
        whole_x = random(2, 3 * size, 5, seed=99)
        own = slice(3 * rank, 3 * rank + 3)

        x = whole_x[:, own].clone().requires_grad_()
        gathered = gather_sequence(x, group)
        torch.testing.assert_close(gathered, whole_x, rtol=0, atol=0)
        gathered.backward(y_of_ranks[rank])
        assert_close(x.grad, y_sum[:, own])

        # In memory T comes before B: the collective must send the values in the order of (B, T, C).
        y = y_of_ranks[rank].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        scattered = scatter_sum(y, group)
        assert_close(scattered, y_sum[:, own])
        scattered.backward(whole_x[:, own])
        torch.testing.assert_close(y.grad, whole_x, rtol=0, atol=0)
        return (gathered * y).sum().item(), (x * scattered).sum().item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_and_scatter_are_transposes(pool: Pool, world_size: int) -> None:
    products = pool.run(check_gather_and_scatter, {}, world_size=world_size)
    gather_product = sum(product for product, _ in products)
    scatter_product = sum(product for _, product in products)
    assert abs(gather_product) > 1
    assert gather_product == pytest.approx(scatter_product, rel=1e-12)
