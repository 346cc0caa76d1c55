"""The head: a loss that is computed in parts."""

import torch
from torch import Tensor, nn

from composer3d.models.layers.head import Head
from tests.models.layers.labels import random, random_labels


def head_gradients(chunks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the weight and of the input, in float64.

    2,048 tokens of width 64 go through a head of 512 words.
    """
    head = Head(512, 64)
    head.weight = nn.Parameter(random(512, 64, seed=2, dtype=torch.bfloat16).mul(0.1).to(dtype))
    head.chunks = chunks
    h = random(1, 2048, 64, seed=1, dtype=torch.bfloat16).to(dtype).requires_grad_()
    loss = head(h, random_labels(2048, 512).view(1, -1))
    (loss / 1000).backward()
    assert head.weight.grad is not None
    assert h.grad is not None
    assert head.weight.grad.dtype == h.grad.dtype == dtype
    return head.weight.grad.double(), h.grad.double()


def test_more_parts_of_the_loss_do_not_round_more() -> None:
    exact = head_gradients(1, torch.float64)
    errors: dict[int, list[float]] = {}
    for chunks in (1, 4, 64, 512):
        gradients = head_gradients(chunks, torch.bfloat16)
        errors[chunks] = [
            ((actual - expected).norm() / expected.norm()).item()
            for actual, expected in zip(gradients, exact, strict=True)
        ]
    # The product of each part is rounded once, and then their sum: two roundings of 1.7e-3 at
    # most, with any number of parts.
    for weight_error, input_error in errors.values():
        assert weight_error <= 1.25 * errors[1][0], errors
        assert weight_error <= 1.02 * errors[4][0], errors
        assert input_error <= 1.02 * errors[1][1], errors


def test_loss_in_parts_gives_no_gradient_to_a_frozen_weight_or_input() -> None:
    head, labels = Head(40, 4), random_labels(30, 40).view(2, 15)
    head.weight = nn.Parameter(random(40, 4, seed=2), requires_grad=False)
    h = random(2, 15, 4, seed=1).requires_grad_()
    (whole_grad,) = torch.autograd.grad(head(h, labels), h)
    head.chunks = 7
    (grad_in_parts,) = torch.autograd.grad(head(h, labels), h)
    torch.testing.assert_close(grad_in_parts, whole_grad, rtol=1e-12, atol=1e-12)
    head.weight.requires_grad_()
    head(h.detach(), labels).backward()
    assert head.weight.grad is not None
