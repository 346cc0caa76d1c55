"""Packed documents on one process: a model sees each of them as it sees it alone."""

import pytest
import torch
from torch import Tensor

from composer3d.data.loader import number_documents
from composer3d.models.contract import SequenceInfo
from composer3d.models.layers.attention import attend_sdpa
from composer3d.models.llama.model import Llama
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel.context.api import attend_over

LENGTHS = [[1, 1, 5, 9, 4], [20], [7, 13]]  # of the documents of three rows
ROWS, LENGTH = 3, 20
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def rows() -> tuple[Tensor, Tensor]:
    """Documents and positions of ``LENGTHS``."""
    ends_BT = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row, lengths in zip(ends_BT, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0) - 1] = True
    return number_documents(ends_BT)


def model_of(window: int) -> Llama:
    shape = ModelShape(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn=16, vocab=32, window=window)
    model = Llama(shape, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return model


def gradients(model: Llama) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("window", [0, 3, 8, LENGTH])
def test_loss_and_gradients_are_those_of_each_document_alone(window: int) -> None:
    model, (documents_BT, positions_BT) = model_of(window), rows()
    generator = torch.Generator().manual_seed(4)
    tokens_BT, labels_BT = torch.randint(32, (2, ROWS, LENGTH), generator=generator)
    packed = model(tokens_BT, labels_BT, positions_BT, documents_BT)
    packed.backward()
    got = [packed.detach(), *gradients(model)]
    model.zero_grad()
    alone = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        for tokens, labels in zip(
            tokens_BT[row].split(lengths), labels_BT[row].split(lengths), strict=True
        ):
            loss = model(tokens[None], labels[None], torch.arange(len(tokens))[None])
            loss.backward()
            alone += loss.detach()
    expected = [alone, *gradients(model)]
    assert len(got) == len(expected) == 22
    for mine, each in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, each, rtol=1e-12, atol=1e-12)
    across = model(tokens_BT, labels_BT, positions_BT)
    assert abs(across - alone) > 1e-3 * alone  # documents do matter here


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
def test_attention_is_that_of_the_tokens_it_may_see(
    device: str, dtype: torch.dtype, bound: float, kv_heads: int, window: int
) -> None:
    documents_BT, positions_BT = rows()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(ROWS, heads, LENGTH, 8, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (4, kv_heads, kv_heads)
    )
    seq = SequenceInfo(positions_BT.to(device), documents_BT)
    tensors = [x.to(device) for x in (q, k, v)]
    out = attend_sdpa(*tensors, seq=seq, window=window).cpu()
    in_tiles = attend_over(None)(*tensors, seq=seq, window=window).cpu()
    assert out.dtype == in_tiles.dtype == dtype
    torch.testing.assert_close(in_tiles, out, rtol=0, atol=bound)
    for row, lengths in enumerate(LENGTHS):
        for t in range(LENGTH):
            start = next(
                s for s in reversed([sum(lengths[:n]) for n in range(len(lengths))]) if s <= t
            )
            seen = slice(max(start, t - window + 1) if window else start, t + 1)
            for head in range(4):
                keys, values = (x[row, head * kv_heads // 4, seen].double() for x in (k, v))
                weights = (keys @ q[row, head, t].double() / 8**0.5).softmax(0)
                assert (out[row, head, t] - weights @ values).abs().max().item() < bound
