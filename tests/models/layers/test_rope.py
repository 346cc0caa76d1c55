"""Rotary positions: the speeds of the pairs, their precision, and the table that blocks share."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.layers import rope as rope_module
from composer3d.models.layers.rope import Rope, rope_table, rotate, shared_rope_table
from composer3d.models.llama.model import Llama
from composer3d.models.llama.rope import rope_of
from composer3d.models.llama.shape import PRESETS, ModelShape
from tests.models.layers.labels import random
from tests.reference import rotation

LLAMA_3_1 = PRESETS["llama3.1-8b"]


def speeds(shape: ModelShape) -> list[float]:
    """Radians that each pair turns in one position, read from the table."""
    cos, sin = rope_table(rope_of(shape), torch.ones(1, 1, dtype=torch.int64), torch.float64)
    half = shape.head_width // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    assert torch.equal(sin[..., :half], -sin[..., half:])
    return torch.atan2(sin[0, 0, 0, half:], cos[0, 0, 0, half:]).tolist()


def test_long_wavelengths_are_stretched_as_in_llama_3_1() -> None:
    """Pair i turns theta^(-i / 64) * 8192 / (2 pi) times in 8,192 positions.

    That is more than 4 times for pairs 0 to 28, and less than once for pairs 35 to 63.
    """
    plain = [5e5 ** (-i / 64) for i in range(64)]
    expected = rotation.speeds(LLAMA_3_1)
    assert [i for i in range(64) if expected[i] == plain[i]] == [*range(29)]
    assert [i for i in range(64) if expected[i] == plain[i] / 8] == [*range(35, 64)]
    assert speeds(LLAMA_3_1) == pytest.approx(expected, rel=1e-12)
    assert speeds(replace(LLAMA_3_1, rope_factor=1.0)) == pytest.approx(plain, rel=1e-12)


def test_far_positions_are_distinct_in_bfloat16() -> None:
    x_BTHD = random(1, 5, 1, 128, seed=0)
    positions_BT = torch.arange(5)[None] + 8191  # bfloat16 itself would round them to 8192
    rope = rope_of(LLAMA_3_1)
    rotated = rotate(x_BTHD.bfloat16(), rope_table(rope, positions_BT, torch.bfloat16))
    assert rotated.dtype == torch.bfloat16
    exact = rotate(x_BTHD, rope_table(rope, positions_BT, torch.float64))
    assert (rotated - exact).abs().max().item() < 0.04


def test_blocks_share_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    computed_dtypes: list[torch.dtype] = []

    def counted(rope: Rope, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        computed_dtypes.append(dtype)
        return rope_table(rope, positions_BT, dtype)

    monkeypatch.setattr(rope_module, "rope_table", counted)
    model = Llama(PRESETS["debug-tiny"], device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    tokens_BT, positions_BT = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).repeat(2, 1)
    model(tokens_BT, tokens_BT, positions_BT)
    model(tokens_BT, tokens_BT, positions_BT)
    # One for each forward pass, in which 4 blocks rotate queries and keys.
    assert computed_dtypes == [torch.float32] * 2

    seq = SequenceInfo(positions_BT)
    rope = rope_of(LLAMA_3_1)
    first, again = (shared_rope_table(rope, seq, torch.float32) for _ in range(2))
    assert first[0] is again[0]
    for other, dtype in ((rope, torch.float64), (replace(rope, theta=1e4), torch.float32)):
        shared = shared_rope_table(other, seq, dtype)
        direct = rope_table(other, positions_BT, dtype)
        for actual, expected in zip(shared, direct, strict=True):
            assert torch.equal(actual, expected)
            assert actual.dtype == dtype
