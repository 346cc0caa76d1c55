"""Kernels of a block: what they return, and the gradients of a block within longer rows."""

import pytest
import torch
from torch import Tensor

from composer3d.parallel.context import kernels
from tests.parallel.context.attention import HEADS, ON_GPU, error, inputs, reference


def one_block(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, causal: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """(out, lse, dq, dk, dv) of the kernels and of plain scores in float64, of a block within longer rows.

    Twice as many keys belong to the rows: the backward is given the whole rows' output and logsumexp, cut like a ring's
    second half of queries.
    """
    tokens, width = 64, 16
    q, k, v, grad = (x.to(device, dtype) for x in inputs(heads, kv_heads, 2 * tokens, width=width))
    late, wide = slice(tokens, None), [x.double() for x in (q, k, v)]
    out, lse = kernels.attend_reference(*wide, causal=False)
    keys = late if causal else slice(None)
    got = kernels.attend_block(q[:, :, late], k[:, :, keys], v[:, :, keys], causal=causal)
    expected = kernels.attend_reference(
        wide[0][:, :, late], wide[1][:, :, keys], wide[2][:, :, keys], causal=causal
    )
    rows = (out.to(dtype)[:, :, late], lse.to(kernels.wide(dtype))[:, :, late])
    block = (grad[:, :, late], q[:, :, late], k[:, :, keys], v[:, :, keys], *rows)
    grads = kernels.attend_block_backward(*block, causal=causal)
    wanted = kernels.attend_reference_backward(*(x.double() for x in block), causal=causal)
    return [*got, *grads], [*expected, *wanted]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float64, "cpu"),
        (torch.float32, "cpu"),
        (torch.bfloat16, "cpu"),
        pytest.param(torch.float64, "cuda", marks=ON_GPU),
        pytest.param(torch.float32, "cuda", marks=ON_GPU),
        pytest.param(torch.bfloat16, "cuda", marks=ON_GPU),
        pytest.param(torch.float16, "cuda", marks=ON_GPU),
    ],
)
def test_kernels_agree_with_plain_scores(
    dtype: torch.dtype, device: str, heads: int, kv_heads: int, causal: bool
) -> None:
    got, expected = one_block(device, dtype, heads, kv_heads, causal)
    assert got[1].dtype == kernels.wide(dtype)
    assert all(each.dtype == dtype for each in (got[0], *got[2:]))
    for a, b in zip(got, expected, strict=True):
        assert error(a, b) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_masked_kernels_agree_with_plain_scores(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    """Of a block with queries that see none of its keys: they return nothing, with a logsumexp that weighs nothing."""
    q, k, v, grad = (x.to(device, dtype) for x in inputs(heads, kv_heads, 48, width=16))
    seen = (torch.rand(2, 1, 48, 48, generator=torch.Generator().manual_seed(2)) < 0.2).to(device)
    seen[:, :, 5], seen[1, :, 40:] = False, False
    # The whole rows hold other keys as well.
    out, lse = (
        x.to(q) for x in kernels.attend_reference(q.double(), k.double(), v.double(), causal=False)
    )
    block = (grad, q, k, v, out, lse.to(kernels.wide(dtype)))
    wide = [x.double() for x in block]
    got, expected = (
        kernels.attend_block(q, k, v, causal=True, mask=seen),
        plain_scores(*wide[1:4], seen),
    )
    for mine, plain in zip(
        kernels.attend_reference(*wide[1:4], causal=True, mask=seen), expected, strict=True
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[1].isneginf().cpu(), ~seen.any(-1).expand(2, heads, 48).cpu())
    assert not got[0][got[1].isneginf()].any()
    grads = kernels.attend_block_backward(*block, causal=True, mask=seen)
    wanted = kernels.attend_reference_backward(*wide, causal=True, mask=seen)
    for a, b in zip(
        (got[0], got[1].exp(), *grads), (expected[0], expected[1].exp(), *wanted), strict=True
    ):
        assert error(a, b) < 8 * torch.finfo(dtype).eps


def plain_scores(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    repeat = q.shape[1] // k.shape[1]
    weights = (q @ k.repeat_interleave(repeat, 1).mT / q.shape[-1] ** 0.5).exp() * seen
    total = weights.sum(-1)
    return weights @ v.repeat_interleave(repeat, 1) / total.clamp(min=1e-30)[..., None], total.log()


def test_plain_backward_is_the_gradient() -> None:
    q, k, v, grad = inputs(4, 2, 10)
    out, lse = kernels.attend_reference(q, k, v, causal=True)
    got = [out, *kernels.attend_reference_backward(grad, q, k, v, out, lse, causal=True)]
    for a, b in zip(got, reference(q, k, v, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
