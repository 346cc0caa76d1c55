"""Deferred weight gradients of linear layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from composer3d.parallel.pipeline import zero_bubble


class Three(nn.Module):
    """Two linear layers, one with a bias, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(torch.tanh(self.a(x))))


@pytest.mark.parametrize("recompute", [False, True])
def test_weight_gradients_are_computed_when_the_deferred_work_runs(recompute: bool) -> None:
    torch.manual_seed(0)
    deferring = nn.ModuleList([Three()]).to(torch.float64)
    plain = nn.ModuleList([Three()]).to(torch.float64)
    plain.load_state_dict(deferring.state_dict())
    inputs = [torch.randn(2, 5, 3, dtype=torch.float64) for _ in range(3)]

    def input_gradient(module: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
        out.pow(3).sum().backward()
        assert x.grad is not None
        return x.grad

    dw_builder = zero_bubble.defer_weight_grads(deferring, deferring)
    works = []
    for x in inputs:
        assert torch.equal(input_gradient(deferring[0], x), input_gradient(plain[0], x))
        works.append(dw_builder())
        assert deferring[0].a.weight.grad is None
        assert deferring[0].a.bias.grad is None
        assert deferring[0].b.weight.grad is None
    # Only linear layers defer.
    assert deferring[0].norm.weight.grad is not None

    for work in reversed(works):
        work()
    for (name, a), b in zip(deferring.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-13, atol=1e-13, msg=name)

    # No work is left: nothing is added a second time.
    dw_builder()()
    torch.testing.assert_close(
        deferring[0].b.weight.grad, plain[0].b.weight.grad, rtol=1e-13, atol=1e-13
    )


def test_the_deferred_work_adds_nothing_to_the_graph_of_its_inputs() -> None:
    deferring = nn.ModuleList([Three()])
    requires_grad: list[bool] = []

    def look(grad: Tensor | None) -> None:
        # The first backward comes without a gradient.
        if grad is not None:
            requires_grad.append(grad.requires_grad)

    for parameter in (deferring[0].a.weight, deferring[0].a.bias, deferring[0].b.weight):
        parameter.register_hook(look)
    dw_builder = zero_bubble.defer_weight_grads(deferring, deferring)
    deferring[0](torch.randn(2, 3, requires_grad=True)).sum().backward()
    dw_builder()()
    assert requires_grad == [False] * 3
