"""Kernels of a block: their results, with and without a mask, and for a block of longer rows.

Those of segments of variable length too; on a CPU, that is the model of the kernel.
"""

from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from composer3d.parallel.context import kernels, packed, segment_kernel
from composer3d.parallel.context.kernels import Kernel
from composer3d.parallel.context.tiles import NOT_CAUSAL, starts_of
from composer3d.verify.segments import KERNEL
from tests.parallel.context.attention import (
    HEADS,
    ON_GPU,
    inputs,
    random_documents,
    reference,
    relative_error,
)
from tests.parallel.context.segments import count_scores


class Results(NamedTuple):
    """Each (out, lse, dq, dk, dv) of one block."""

    actual: list[Tensor]
    expected: list[Tensor]


def run_block_of_longer_rows(
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    causal: bool,
    *,
    tokens: int = 64,
    width: int = 16,
) -> Results:
    """Run the kernels, and plain scores in float64, on a block that is a part of longer rows.

    The rows have twice as many keys as the block has queries. Backward gets the output and the
    logsumexp of the whole rows, cut like the second half of a ring's queries.
    """
    q, k, v, grad = (x.to(device, dtype) for x in inputs(heads, kv_heads, 2 * tokens, width=width))
    q64, k64, v64 = q.double(), k.double(), v.double()
    out, lse = kernels.attend_reference(q64, k64, v64, causal=False)
    late = slice(tokens, None)
    keys = late if causal else slice(None)

    actual = kernels.attend_block(q[:, :, late], k[:, :, keys], v[:, :, keys], causal=causal)
    expected = kernels.attend_reference(
        q64[:, :, late], k64[:, :, keys], v64[:, :, keys], causal=causal
    )
    block = (
        grad[:, :, late],
        q[:, :, late],
        k[:, :, keys],
        v[:, :, keys],
        out.to(dtype)[:, :, late],
        lse.to(kernels.wide(dtype))[:, :, late],
    )
    actual_grads = kernels.attend_block_backward(*block, causal=causal)
    expected_grads = kernels.attend_reference_backward(*(x.double() for x in block), causal=causal)
    return Results([*actual, *actual_grads], [*expected, *expected_grads])


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
    results = run_block_of_longer_rows(device, dtype, heads, kv_heads, causal)
    out, lse, *grads = results.actual
    assert lse.dtype == kernels.wide(dtype)
    assert all(x.dtype == dtype for x in (out, *grads))
    for actual, expected in zip(results.actual, results.expected, strict=True):
        assert relative_error(actual, expected) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_gets_its_arguments_in_order(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of its two operators runs on the CPU, in their place in torch's registry."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        computes_lse: bool,
        dropout: float = 0.0,
        is_causal: bool = False,
    ) -> tuple[Any, ...]:
        assert (bias, computes_lse, dropout) == (None, True, 0.0)
        out, lse = kernels.attend_reference(q, k, v, causal=is_causal)
        state = torch.zeros((), dtype=torch.long)
        return out, lse[..., None], state, state, q.shape[2], k.shape[2], state, state, state

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        grad, q, k, v, out, lse_BHT1, _, _, _, _, _, *lengths, dropout, is_causal = arguments
        assert (*lengths, dropout) == (q.shape[2], k.shape[2], 0.0)
        lse = lse_BHT1.squeeze(-1)
        return kernels.attend_reference_backward(grad, q, k, v, out, lse, causal=is_causal)

    monkeypatch.setattr(kernels, "kernel_of", lambda q: Kernel.CUDNN)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
        results = run_block_of_longer_rows("cpu", torch.float64, 4, 2, causal)
    for actual, expected in zip(results.actual, results.expected, strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("kernel", [Kernel.CUDA_FLASH, Kernel.CUDNN])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_kernels_of_wide_heads_agree_with_plain_scores(
    device: str, kernel: Kernel, width: int, heads: int, kv_heads: int, causal: bool
) -> None:
    if kernel is Kernel.CUDNN and (width > 128 or torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("composer3d does not call it")
    size = {"tokens": 320, "width": width}
    with sdpa_kernel(
        SDPBackend.CUDNN_ATTENTION if kernel is Kernel.CUDNN else SDPBackend.FLASH_ATTENTION
    ):
        assert kernels.kernel_of(torch.empty(1, 1, 320, width, device=device).bfloat16()) is kernel
        results = run_block_of_longer_rows(device, torch.bfloat16, heads, kv_heads, causal, **size)
    for actual, expected in zip(results.actual, results.expected, strict=True):
        assert relative_error(actual, expected) < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_masked_kernels_agree_with_plain_scores(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    """Some queries see no key of the block: their output is 0, with a logsumexp of -inf."""
    q, k, v, grad = (x.to(device, dtype) for x in inputs(heads, kv_heads, 48, width=16))
    generator = torch.Generator().manual_seed(2)
    visible = (torch.rand(2, 1, 48, 48, generator=generator) < 0.2).to(device)
    visible[:, :, 5] = False
    visible[1, :, 40:] = False

    # The output and logsumexp that backward gets are of rows with other keys as well.
    row_out, row_lse = (
        x.to(q) for x in kernels.attend_reference(q.double(), k.double(), v.double(), causal=False)
    )
    block = (grad, q, k, v, row_out, row_lse.to(kernels.wide(dtype)))
    block64 = [x.double() for x in block]
    _, q64, k64, v64, _, _ = block64
    out, lse = kernels.attend_block(q, k, v, causal=True, mask=visible)
    expected_out, expected_lse = plain_scores(q64, k64, v64, visible)

    reference64 = kernels.attend_reference(q64, k64, v64, causal=True, mask=visible)
    for actual, expected in zip(reference64, (expected_out, expected_lse), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(lse.isneginf().cpu(), ~visible.any(-1).expand(2, heads, 48).cpu())
    assert not out[lse.isneginf()].any()

    grads = kernels.attend_block_backward(*block, causal=True, mask=visible)
    expected_grads = kernels.attend_reference_backward(*block64, causal=True, mask=visible)
    for actual, expected in zip(
        (out, lse.exp(), *grads),
        (expected_out, expected_lse.exp(), *expected_grads),
        strict=True,
    ):
        assert relative_error(actual, expected) < 8 * torch.finfo(dtype).eps


def plain_scores(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The output and logsumexp of attention behind a mask, written without a softmax."""
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).mT / q.shape[-1] ** 0.5
    weights = scores.exp() * visible
    total = weights.sum(-1)
    out = weights @ v.repeat_interleave(repeat, 1) / total.clamp(min=1e-30)[..., None]
    return out, total.log()


def test_plain_backward_is_the_gradient() -> None:
    q, k, v, grad = inputs(4, 2, 10)
    out, lse = kernels.attend_reference(q, k, v, causal=True)
    grads = kernels.attend_reference_backward(grad, q, k, v, out, lse, causal=True)
    expected = reference(q, k, v, grad)
    for actual, wanted in zip([out, *grads], expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


class Hops(NamedTuple):
    """The calls of rank 1, or of the only rank.

    Attributes:
        cp: ranks.
        method: as in ``ring_attention``.
        documents: the probability that a token ends one; or a position at which the second one
            starts; or None: there is one.
        window: as in ``tiles``.
    """

    cp: int
    method: str
    documents: float | int | None
    window: int


HOPS = [
    Hops(1, "ring", 0.02, 0),
    Hops(1, "ring", 0.02, 30),
    Hops(1, "ring", 1.0, 0),  # documents of one token
    Hops(1, "ring", 0.02, NOT_CAUSAL),
    Hops(1, "ring", None, 100),
    Hops(4, "ring", 0.005, 0),
    Hops(4, "ring", 0.005, 150),
    Hops(4, "ring", None, 200),
    Hops(4, "allgather", 0.005, 0),
    Hops(4, "allgather", 0.002, 150),
    # Each query has a segment of its own, and other segments have none.
    Hops(4, "allgather", 1.0, 0),
    # Many queries see few keys, of which a part is behind the edge of the window.
    Hops(4, "ring", 77, 20),
]


@pytest.mark.parametrize(("hops", "heads"), list(zip(HOPS, cycle(HEADS), strict=False)))
@pytest.mark.parametrize(
    ("dtype", "device", "width"),
    [
        (torch.float64, "cpu", 16),
        (torch.bfloat16, "cpu", 16),
        # The widest heads of published models: 128, 192 of latent attention, 256 of Gemma.
        *(
            pytest.param(dtype, "cuda", width, marks=ON_GPU)
            for dtype, width in product((torch.bfloat16, torch.float16), (16, 128, 192, 256))
        ),
    ],
)
def test_segments_agree_with_plain_scores(
    dtype: torch.dtype,
    device: str,
    width: int,
    heads: tuple[int, int],
    hops: Hops,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward gets the output and the logsumexp of rows that have other keys as well."""
    if device == "cpu":
        monkeypatch.setitem(segment_kernel.VARIABLE_LENGTH, kernels.Kernel.CPU_FLASH, KERNEL)
    tokens = 160
    length = tokens * hops.cp
    documents = None
    if isinstance(hops.documents, int):
        documents = (torch.arange(length) >= hops.documents).long().expand(2, -1)
    elif hops.documents is not None:
        documents = random_documents(length, hops.documents)
    rank = min(1, hops.cp - 1)
    plan = packed.plan_calls(
        rank, hops.cp, 2, tokens, starts_of(documents), hops.window, hops.method, True
    )
    assert any(plan.rounds)
    for call in (call for calls in plan.rounds for call in calls):
        all_keys = length if hops.method == "allgather" else tokens
        counts = count_scores(plan, call, 2, tokens, all_keys)
        visible = counts[:, None, call.queries, call.keys] > 0
        q, k, v, grad = (x.to(device, dtype) for x in inputs(*heads, all_keys, width=width))
        q, grad = q[:, :, call.queries], grad[:, :, call.queries]
        k, v = k[:, :, call.keys], v[:, :, call.keys]
        segments = call.segments(plan.offsets_on(q))
        out, lse = segment_kernel.attend_segments(q, k, v, segments)

        q64, k64, v64, grad64 = (x.double().cpu() for x in (q, k, v, grad))
        expected_out, expected_lse = kernels.attend_reference(
            q64, k64, v64, causal=False, mask=visible
        )
        sees_none = expected_lse.isneginf()
        assert call.all_see == (not sees_none.any())
        assert lse.dtype == kernels.wide(dtype)
        assert (lse.cpu()[sees_none] == kernels.least(lse.dtype)).all()
        assert not out.cpu()[sees_none].any()
        # Some weight goes to the other keys.
        row_lse = expected_lse.clamp(min=-1.0) + 0.5
        row_out = (0.6 * expected_out + 0.1).to(dtype)
        grads = segment_kernel.attend_segments_backward(
            grad, q, k, v, row_out.to(q), row_lse.to(lse), segments
        )
        assert all(x.dtype == dtype for x in (out, *grads))
        expected_grads = kernels.attend_reference_backward(
            grad64, q64, k64, v64, row_out.double(), row_lse, causal=False, mask=visible
        )
        for actual, expected in zip(
            (out, lse.masked_fill(sees_none.to(device), 0), *grads),
            (expected_out, expected_lse.masked_fill(sees_none, 0), *expected_grads),
            strict=True,
        ):
            assert relative_error(actual.cpu(), expected) < 8 * torch.finfo(dtype).eps
