"""The parts of a block: rotation and its table, attention through a window."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers import rope as rope_module
from composer3d.models.layers.attention import attend_sdpa
from composer3d.models.layers.rope import Rope, rope_table, rotate, shared_rope_table
from composer3d.models.llama.model import Llama, rope_of
from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.parallel.context.api import attend_over

LLAMA_3_1 = PRESETS["llama3.1-8b"]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def speeds(shape: ModelShape) -> list[float]:
    """Radians that each pair turns in one position, read off the table."""
    cos, sin = rope_table(rope_of(shape), torch.ones(1, 1, dtype=torch.int64), torch.float64)
    half = shape.head_width // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    assert torch.equal(sin[..., :half], -sin[..., half:])
    return torch.atan2(sin[0, 0, 0, half:], cos[0, 0, 0, half:]).tolist()


def test_long_wavelengths_are_stretched_as_in_llama_3_1() -> None:
    """Pairs 0 to 28 turn more than 4 times in 8,192 positions, 35 to 63 less than once: theta^(-i/64) * 8192 / 2 pi."""
    plain = [5e5 ** (-i / 64) for i in range(64)]
    turns = [8192 * each / (2 * math.pi) for each in plain]
    kept, stretched = [i for i in range(64) if turns[i] > 4], [i for i in range(64) if turns[i] < 1]
    assert (kept[-1], stretched[0]) == (28, 35)
    smooth = [(turns[i] - 1) / 3 for i in range(29, 35)]
    expected = [
        *(plain[i] for i in kept),
        *(plain[29 + n] * ((1 - share) / 8 + share) for n, share in enumerate(smooth)),
        *(plain[i] / 8 for i in stretched),
    ]
    assert speeds(LLAMA_3_1) == pytest.approx(expected, rel=1e-12)
    assert speeds(replace(LLAMA_3_1, rope_factor=1.0)) == pytest.approx(plain, rel=1e-12)


def test_far_positions_are_told_apart_in_bfloat16() -> None:
    x_BTHD = random(1, 5, 1, 128, seed=0)
    positions_BT = torch.arange(5)[None] + 8191  # bfloat16 itself would round them to 8192
    turned = rotate(x_BTHD.bfloat16(), rope_table(rope_of(LLAMA_3_1), positions_BT, torch.bfloat16))
    assert turned.dtype == torch.bfloat16
    exact = rotate(x_BTHD, rope_table(rope_of(LLAMA_3_1), positions_BT, torch.float64))
    assert (turned - exact).abs().max().item() < 0.04


def test_blocks_share_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []

    def counted(rope: Rope, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made.append(dtype)
        return rope_table(rope, positions_BT, dtype)

    monkeypatch.setattr(rope_module, "rope_table", counted)
    model = Llama(PRESETS["debug-tiny"], device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    tokens_BT, positions_BT = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).repeat(2, 1)
    model(tokens_BT, tokens_BT, positions_BT)
    model(tokens_BT, tokens_BT, positions_BT)
    assert (
        made == [torch.float32] * 2
    )  # one for each SequenceInfo, of 4 blocks with queries and keys
    seq = SequenceInfo(positions_BT)
    rope = rope_of(LLAMA_3_1)
    first, again = (shared_rope_table(rope, seq, torch.float32) for _ in range(2))
    assert first[0] is again[0]
    for other, dtype in ((rope, torch.float64), (replace(rope, theta=1e4), torch.float32)):
        shared, direct = (
            shared_rope_table(other, seq, dtype),
            rope_table(other, positions_BT, dtype),
        )
        for mine, expected in zip(shared, direct, strict=True):
            assert torch.equal(mine, expected)
            assert mine.dtype == dtype


def test_recomputed_blocks_find_the_table_of_the_first_run() -> None:
    shape = ModelShape(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn=24, vocab=32)
    model = Llama(shape, dtype=torch.float64, device="cpu")
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = random(*parameter.shape, seed=seed)
    positions_BT, h_BTC = torch.arange(6).repeat(2, 1), random(2, 6, 16, seed=99)

    def gradients(*, again: bool) -> list[Tensor]:
        model.zero_grad()
        seq, h = SequenceInfo(positions_BT), h_BTC.clone().requires_grad_()
        out = h
        for block in model.blocks.values():
            out = checkpoint(block, out, seq, use_reentrant=False) if again else block(out, seq)
        out.square().sum().backward()
        return [x.grad.clone() for x in (h, *model.blocks.parameters()) if x.grad is not None]

    kept, recomputed = gradients(again=False), gradients(again=True)
    assert len(kept) == len(recomputed) == 19
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def dense(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int) -> Tensor:
    """Attention with all scores: query q sees key k where 0 <= q - k < window."""
    k_BHTD, v_BHTD = (
        x.repeat_interleave(q_BHTD.shape[1] // x.shape[1], dim=1) for x in (k_BKTD, v_BKTD)
    )
    scores = q_BHTD @ k_BHTD.mT / math.sqrt(q_BHTD.shape[-1])
    places = torch.arange(q_BHTD.shape[2])
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or len(places)))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v_BHTD


@pytest.mark.parametrize(
    ("length", "window"),
    [(12, 0), (12, 1), (12, 4), (13, 4), (15, 4), (5, 4), (7, 6), (12, 12), (4, 9), (1, 1)],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_window_is_exact(length: int, window: int, kv_heads: int) -> None:
    q, k, v = (
        random(2, length, heads, 8, seed=s).transpose(1, 2)
        for s, heads in enumerate((4, kv_heads, kv_heads))
    )
    cotangent = random(2, 4, length, 8, seed=9)
    seq = SequenceInfo(torch.arange(length).repeat(2, 1))

    def run(attend: str) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = (
            dense(*leaves, window)
            if attend == "dense"
            else attend_sdpa(*leaves, seq=seq, window=window)
        )
        return [out, *torch.autograd.grad(out, leaves, cotangent)]

    for mine, expected in zip(run("sdpa"), run("dense"), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_window_runs_in_narrow_dtypes(dtype: torch.dtype, bound: float) -> None:
    q, k, v = (random(1, heads, 19, 8, seed=heads) for heads in (4, 2, 2))
    out = attend_sdpa(
        q.to(dtype), k.to(dtype), v.to(dtype), seq=SequenceInfo(torch.arange(19)[None]), window=5
    )
    assert out.dtype == dtype
    assert (out - dense(q, k, v, 5)).abs().max().item() < bound


def test_window_makes_no_square_of_scores() -> None:
    """A row of 16 windows, as a composed model attends: no tensor of autograd's graph has T x T elements for a head."""
    length, window = 256, 16
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    q = random(1, 1, length, 8, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend_over(None)(q, q, q, seq=SequenceInfo(torch.arange(length)[None]), window=window)
    assert sizes
    assert max(sizes) <= 2 * length * window < length * length
