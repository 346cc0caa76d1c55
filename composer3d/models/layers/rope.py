"""Rotary position embedding (RoPE), Su et al. 2021 (RoFormer, arXiv 2104.09864)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from composer3d.models.contract import SequenceInfo


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The settings of rotary positions. All blocks of a model share one object.

    ``factor`` above 1 stretches long wavelengths as in Llama 3.1 (Hugging Face: ``rope_type``
    "llama3"). Count how often a pair of numbers turns in ``context`` tokens, the context length
    before the stretch. With at most ``low_freq`` turns, the pair turns ``factor`` times slower.
    With at least ``high_freq`` turns, it keeps its speed. In between, the speed is interpolated.
    """

    head_dim: int
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    context: int = 8192


Table = tuple[Tensor, Tensor]


def rope_table(rope: Rope, positions_BT: Tensor, dtype: torch.dtype) -> Table:
    """Compute (cos, sin) for ``rotate``, each (B, T, 1, D) in ``dtype``.

    The first half of sin is negated. The angles are computed in float32 or wider, because bfloat16
    cannot tell positions above 256 apart.
    """
    half, wide = rope.head_dim // 2, torch.promote_types(dtype, torch.float32)
    speed_D = rope.theta ** (-torch.arange(half, device=positions_BT.device, dtype=wide) / half)
    if rope.factor != 1:
        turns_D = speed_D * (rope.context / (2 * math.pi))
        kept_D = ((turns_D - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
        speed_D = speed_D * (kept_D + (1 - kept_D) / rope.factor)
    angle_BT1D = positions_BT.to(wide)[:, :, None, None] * speed_D
    cos, sin = angle_BT1D.cos().to(dtype), angle_BT1D.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def shared_rope_table(rope: Rope, seq: SequenceInfo, dtype: torch.dtype) -> Table:
    """Return the ``rope_table`` of the positions in ``seq``; compute it if no block has yet.

    Both tensors are (B, T, 1, D) in ``dtype``.
    """
    if (rope, dtype) not in seq.shared:
        seq.shared[rope, dtype] = rope_table(rope, seq.positions_BT, dtype)
    return seq.shared[rope, dtype]


def rotate(x_BTHD: Tensor, table: Table) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) by a ``rope_table``, as Hugging Face pairs them.

    Returns:
        A tensor of the shape of ``x_BTHD``.
    """
    cos_BT1D, sin_BT1D = table
    rolled_BTHD = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHD * cos_BT1D, rolled_BTHD, sin_BT1D)
