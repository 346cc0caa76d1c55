"""Attention of a whole sequence on one process, which the tests of kernels, tiles and cp hold theirs against."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from composer3d.data.loader import number_documents

HEADS = [
    (4, 4),
    (4, 2),
    (3, 1),
]  # query and key-value heads: all of their own, grouped, one for all
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def random(*shape: int, seed: int) -> Tensor:
    """As a projection leaves it: (B, heads, T, D), in memory (B, T, heads, D)."""
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        batch, tokens, heads, width, generator=generator, dtype=torch.float64
    ).transpose(1, 2)


def inputs(heads: int, kv_heads: int, tokens: int, batch: int = 2, width: int = 8) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(batch, count, tokens, width, seed=seed) for seed, count in enumerate(counts)]


def documents_of(tokens: int, often: float) -> Tensor:
    """For two rows, to which document each token belongs; about one token in 1 / ``often`` ends one."""
    ends_BT = torch.rand(2, tokens, generator=torch.Generator().manual_seed(5)) < often
    return number_documents(ends_BT)[0]


class Mask(NamedTuple):
    documents: Tensor | None = None
    window: int = 0
    causal: bool = True


PLAIN = Mask()


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask = PLAIN) -> list[Tensor]:
    """Output and the gradients of q, k, v on one process, written down as softmax over a mask."""
    documents, window, causal = mask
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    repeat, tokens = q.shape[1] // k.shape[1], q.shape[2]
    scores = q @ k.repeat_interleave(repeat, 1).mT / q.shape[-1] ** 0.5
    seen = torch.ones(tokens, tokens, dtype=torch.bool)
    seen = (seen.tril() if causal else seen).triu(1 - window if window else -tokens)[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None])
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(repeat, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()
