"""Attention on one process: sliding windows, and packed documents, each as if it were alone."""

import pytest
import torch
from torch import Tensor

from composer3d.data.loader import number_documents
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.attention import attend_sdpa
from composer3d.parallel.context.api import make_attend
from tests.models.layers.labels import random
from tests.reference.attention import attend, visible_keys

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


# --- packed documents ---

LENGTHS = [[1, 1, 5, 9, 4], [20], [7, 13]]  # of the documents of three rows
ROWS, LENGTH = 3, 20


def documents_and_positions() -> tuple[Tensor, Tensor]:
    """The documents and positions of rows with ``LENGTHS``, each (B, T)."""
    ends_BT = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row, lengths in zip(ends_BT, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0) - 1] = True
    return number_documents(ends_BT)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [0, 6])
def test_sinks_take_a_part_of_each_softmax(window: int, has_documents: bool) -> None:
    documents_BT, positions_BT = documents_and_positions()
    if not has_documents:
        documents_BT = None
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(ROWS, heads, LENGTH, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    leaves = [x.requires_grad_() for x in (q, k, v, torch.tensor([-1.0, 0.0, 2.0, 9.0]).double())]
    visible = visible_keys(LENGTH, documents_BT=documents_BT, window=window)
    seq = SequenceInfo(positions_BT, documents_BT)
    outputs = [
        attend(*leaves[:3], visible, leaves[3]),
        attend_sdpa(*leaves[:3], seq=seq, window=window, sinks_H=leaves[3]),
        make_attend(None)(*leaves[:3], seq=seq, window=window, sinks_H=leaves[3]),
    ]
    expected, *others = ([out, *torch.autograd.grad(out.sin().sum(), leaves)] for out in outputs)
    for results in others:
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.05),
        pytest.param("cuda", torch.float32, 1e-4, marks=ON_GPU),
        pytest.param("cuda", torch.bfloat16, 0.05, marks=ON_GPU),
    ],
)
def test_packed_attention_reads_the_visible_tokens_only(
    device: str, dtype: torch.dtype, bound: float, kv_heads: int, window: int
) -> None:
    documents_BT, positions_BT = documents_and_positions()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(ROWS, heads, LENGTH, 8, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, kv_heads, kv_heads)
    )
    seq = SequenceInfo(positions_BT.to(device), documents_BT)
    inputs = [x.to(device) for x in (q, k, v)]
    out = attend_sdpa(*inputs, seq=seq, window=window).cpu()
    out_in_tiles = make_attend(None)(*inputs, seq=seq, window=window).cpu()
    assert out.dtype == out_in_tiles.dtype == dtype
    torch.testing.assert_close(out_in_tiles, out, rtol=0, atol=bound)

    for row, lengths in enumerate(LENGTHS):
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        for t in range(LENGTH):
            first = max(start for start in starts if start <= t)
            if window:
                first = max(first, t - window + 1)
            visible = slice(first, t + 1)
            for head in range(4):
                kv_head = head * kv_heads // 4
                keys = k[row, kv_head, visible].double()
                values = v[row, kv_head, visible].double()
                weights = (keys @ q[row, head, t].double() / 8**0.5).softmax(0)
                assert (out[row, head, t] - weights @ values).abs().max().item() < bound


# --- sliding windows ---


@pytest.mark.parametrize(
    ("length", "window"),
    [(12, 0), (12, 1), (12, 4), (13, 4), (15, 4), (5, 4), (7, 6), (12, 12), (4, 9), (1, 1)],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_window_is_exact(length: int, window: int, kv_heads: int) -> None:
    inputs = [
        random(2, length, heads, 8, seed=seed).transpose(1, 2)
        for seed, heads in enumerate((4, kv_heads, kv_heads))
    ]
    cotangent = random(2, 4, length, 8, seed=9)
    seq = SequenceInfo(torch.arange(length).repeat(2, 1))

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend_sdpa(*leaves, seq=seq, window=window)
    results = [out, *torch.autograd.grad(out, leaves, cotangent)]

    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, visible_keys(length, window=window))
    expected_results = [out, *torch.autograd.grad(out, leaves, cotangent)]
    for actual, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_window_runs_in_narrow_dtypes(dtype: torch.dtype, bound: float) -> None:
    q, k, v = (random(1, heads, 19, 8, seed=heads) for heads in (4, 2, 2))
    seq = SequenceInfo(torch.arange(19)[None])
    out = attend_sdpa(q.to(dtype), k.to(dtype), v.to(dtype), seq=seq, window=5)
    assert out.dtype == dtype
    assert (out - attend(q, k, v, visible_keys(19, window=5))).abs().max().item() < bound


def test_window_saves_no_square_of_scores() -> None:
    """Backward saves no tensor of T x T elements, for a row of 16 windows in a composed model."""
    length, window = 256, 16
    sizes: list[int] = []

    def note_size(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    q = random(1, 1, length, 8, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note_size, lambda x: x):
        make_attend(None)(q, q, q, seq=SequenceInfo(torch.arange(length)[None]), window=window)
    assert sizes
    assert max(sizes) <= 2 * length * window < length * length
