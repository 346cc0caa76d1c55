"""Attention of a whole sequence on one process, and from the shards of all ranks.

The tests of kernels, tiles and context parallelism compare with it.
"""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.data.loader import number_documents
from composer3d.parallel.context import api, ownership
from tests.reference.attention import attend, visible_keys

# Query and key-value heads: a key-value head for each query head, for several, and one for all.
HEADS = [(4, 4), (4, 2), (3, 1)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def random(*shape: int, seed: int) -> Tensor:
    """Random (B, heads, T, D), in memory (B, T, heads, D), as a projection leaves it."""
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(seed)
    x_BTHD = torch.randn(batch, tokens, heads, width, generator=generator, dtype=torch.float64)
    return x_BTHD.transpose(1, 2)


def inputs(heads: int, kv_heads: int, tokens: int, batch: int = 2, width: int = 8) -> list[Tensor]:
    """The whole q, k and v, and the gradient of the output."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [random(batch, count, tokens, width, seed=seed) for seed, count in enumerate(counts)]


def random_documents(tokens: int, end_probability: float) -> Tensor:
    """The document of each token in two rows. A token ends one with ``end_probability``."""
    numbers_BT = torch.rand(2, tokens, generator=torch.Generator().manual_seed(5))
    return number_documents(numbers_BT < end_probability)[0]


class Mask(NamedTuple):
    """Which keys a query sees; the arguments of ``ring_attention`` with these meanings."""

    documents: Tensor | None = None
    window: int = 0
    causal: bool = True
    sinks_H: Tensor | None = None


PLAIN = Mask()


def reference(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask = PLAIN) -> list[Tensor]:
    """The output, and the gradients of q, k, v and sinks, of the softmax of all scores."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, mask.sinks_H) if x is not None]
    visible = visible_keys(
        q.shape[2], documents_BT=mask.documents, window=mask.window, is_causal=mask.causal
    )
    out = attend(*leaves[:3], visible, *leaves[3:])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    mask: Mask = PLAIN,
    *,
    dtype: torch.dtype = torch.float64,
    method: str = "ring",
    balanced: bool = True,
) -> list[Tensor]:
    """The results of ``reference``, computed from shards by all ranks and gathered again."""
    group, length = group_of_all(), q.shape[2]
    *shards, grad_shard = [
        ownership.shard_sequence(x, 2, group, balanced=balanced, fill=0).to(dtype)
        for x in (q, k, v, grad)
    ]
    leaves = [x.requires_grad_() for x in shards]
    sinks_H = None
    if mask.sinks_H is not None:
        sinks_H = mask.sinks_H.detach().to(dtype).requires_grad_()
    documents = mask.documents
    if documents is not None:
        # The padding belongs to the last document.
        padded_length = grad_shard.shape[2] * group.size()
        documents = documents[:, torch.arange(padded_length).clamp(max=length - 1)]
    out = api.ring_attention(
        *leaves,
        group=group,
        causal=mask.causal,
        documents=documents,
        window=mask.window,
        sinks_H=sinks_H,
        method=method,
        balanced=balanced,
    )
    assert out.dtype == dtype
    sinks = [] if sinks_H is None else [sinks_H]
    gradients = torch.autograd.grad(out, [*leaves, *sinks], grad_shard)
    whole = [
        ownership.unshard_sequence(shard, 2, group, balanced=balanced, length=length)
        for shard in (out.detach(), *gradients[:3])
    ]
    for gradient in gradients[3:]:
        dist.all_reduce(gradient, group=group)
    return [*whole, *gradients[3:]]


def group_of_all() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()
