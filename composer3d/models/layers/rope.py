"""Rotary position embedding (RoPE), Su et al. 2021 (RoFormer, arXiv 2104.09864)."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from composer3d.models.contract import SequenceInfo
from composer3d.models.rotary import RopeScaling, yarn_ramp


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The settings of rotary positions. All blocks of a model that are alike share one object.

    ``models/rotary.py`` describes each ``scaling``. A ``factor`` of 1 stretches nothing. "llama3"
    counts how often a pair of numbers turns in ``context`` tokens, the context length before the
    stretch. With at most ``low_freq`` turns, the pair turns ``factor`` times slower. With at least
    ``high_freq`` turns, it keeps its speed. In between, the speed is interpolated. "yarn" has
    ``beta_slow``, ``beta_fast`` and ``truncate`` for the same. ``attention_factor`` multiplies all
    rotated queries and keys. ``head_dim`` is the number of rotated elements of a head.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: RopeScaling = "llama3"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def unstretched(self) -> "Rope":
        """Return the same positions without a stretch, for blocks that have none."""
        return replace(self, factor=1.0, attention_factor=1.0)


Table = tuple[Tensor, Tensor]


def rope_table(rope: Rope, positions_BT: Tensor, dtype: torch.dtype) -> Table:
    """Compute (cos, sin) for ``rotate``, each (B, T, 1, D) in ``dtype``.

    The first half of sin is negated. The angles are computed in float32 or wider, because bfloat16
    cannot tell positions above 256 apart.
    """
    half, wide = rope.head_dim // 2, torch.promote_types(dtype, torch.float32)
    pair_D = torch.arange(half, device=positions_BT.device, dtype=wide)
    speed_D = rope.theta ** (-pair_D / half)
    if rope.factor != 1:
        kept_D = _kept_share(rope, pair_D, speed_D)
        speed_D = speed_D * (kept_D + (1 - kept_D) / rope.factor)
    angle_BT1D = positions_BT.to(wide)[:, :, None, None] * speed_D
    cos, sin = angle_BT1D.cos(), angle_BT1D.sin()
    if rope.attention_factor != 1:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _kept_share(rope: Rope, pair_D: Tensor, speed_D: Tensor) -> Tensor:
    """Return the share of each pair's speed that is not divided by ``rope.factor``: 0 to 1."""
    if rope.scaling == "linear":
        return torch.zeros_like(pair_D)
    if rope.scaling == "dynamic":
        return torch.ones_like(pair_D)
    if rope.scaling == "llama3":
        turns_D = speed_D * (rope.context / (2 * math.pi))
        return ((turns_D - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    ramp = yarn_ramp(
        head_dim=rope.head_dim,
        theta=rope.theta,
        context=rope.context,
        beta_fast=rope.beta_fast,
        beta_slow=rope.beta_slow,
        truncate=rope.truncate,
    )
    assert ramp is not None  # a rule refuses other settings
    return 1 - ((pair_D - ramp.first) / (ramp.last - ramp.first)).clamp(0, 1)


def shared_rope_table(rope: Rope, seq: SequenceInfo, dtype: torch.dtype) -> Table:
    """Return the ``rope_table`` of the positions in ``seq``; compute it if no block has yet.

    Both tensors are (B, T, 1, D) in ``dtype``.
    """
    if (rope, dtype) not in seq.shared:
        seq.shared[rope, dtype] = rope_table(rope, seq.positions_BT, dtype)
    return seq.shared[rope, dtype]


def rotate(x_BTHD: Tensor, table: Table) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by a ``rope_table``, as Hugging Face pairs them.

    Where a head is wider than the table, only its first D numbers are rotated.

    Returns:
        A tensor of the shape of ``x_BTHD``.
    """
    cos_BT1D, sin_BT1D = table
    width, rotated_width = x_BTHD.shape[-1], cos_BT1D.shape[-1]
    if rotated_width < width:
        rotated, plain = x_BTHD.split((rotated_width, width - rotated_width), -1)
        return torch.cat((rotate(rotated, table), plain), -1)
    rolled_BTHD = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHD * cos_BT1D, rolled_BTHD, sin_BT1D)
