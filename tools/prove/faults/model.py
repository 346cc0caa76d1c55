"""Faults of a single process: the rotation of positions, and the first weights.

``verify`` runs the same model on both of its sides and cannot see them; ``checks.model`` and
``checks.weights`` do.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from composer3d.models.contract import Constant, Normal, ShardingPlan
from composer3d.models.layers import attention
from composer3d.models.layers import rope as rope_module
from composer3d.models.layers.rope import Rope
from composer3d.parallel import init

Table = tuple[Tensor, Tensor]


def _change_table(change: Callable[[Rope, Tensor, torch.dtype], Any]) -> None:
    """Make the rotary table of other arguments, or of another dtype."""
    right = rope_module.rope_table
    rope_module.rope_table = lambda rope, positions, dtype: right(*change(rope, positions, dtype))


def turn_by_another_base() -> None:
    """rope_theta is 10,000, whatever the shape says."""
    _change_table(lambda rope, positions, dtype: (replace(rope, theta=1e4), positions, dtype))


def forget_the_stretch_of_positions() -> None:
    """rope_factor is 1, whatever the shape says."""
    _change_table(lambda rope, positions, dtype: (replace(rope, factor=1.0), positions, dtype))


def swap_the_bounds_of_the_stretch() -> None:
    """rope_low_freq and rope_high_freq have changed places."""
    _change_table(
        lambda rope, positions, dtype: (
            replace(rope, low_freq=rope.high_freq, high_freq=rope.low_freq),
            positions,
            dtype,
        )
    )


def stretch_by_the_context_of_another_model() -> None:
    """rope_context is 8,192, whatever the shape says."""
    _change_table(lambda rope, positions, dtype: (replace(rope, context=8192), positions, dtype))


def round_angles() -> None:
    """Angles are computed in bfloat16."""
    right = rope_module.rope_table

    def wrong(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Table:
        cos, sin = right(rope, positions.to(torch.bfloat16), torch.bfloat16)
        return cos.to(dtype), sin.to(dtype)

    rope_module.rope_table = wrong


def turn_neighbours() -> None:
    """The pairs that are turned are neighbours, as in Meta's weights, and not halves."""

    def wrong(x: Tensor, table: Table) -> Tensor:
        half = x.shape[-1] // 2
        cos, sin = table[0][..., :half], table[1][..., half:]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    attention.rotate = wrong


def turn_halves_apart() -> None:
    """Both halves are added what the other is turned by, with one sign."""
    attention.rotate = lambda x, table: torch.addcmul(
        x * table[0], x.roll(x.shape[-1] // 2, dims=-1), table[1].abs()
    )


def turn_the_other_way() -> None:
    """Pairs are turned clockwise: scores of a query and a key before it see the mirrored distance."""
    right = attention.rotate
    attention.rotate = lambda x, table: right(x, (table[0], -table[1]))


def norm_after_the_rotation() -> None:
    """The norm of a head's query and key comes after the rotation (its weights then meet other numbers)."""
    right = attention.Attention.forward

    def wrong(self: Any, x: Tensor, *, seq: Any) -> Tensor:
        norms, rotate = (self.q_norm, self.k_norm), attention.rotate
        given = iter(norms)
        self.q_norm = self.k_norm = torch.nn.Identity()
        attention.rotate = lambda y, table: next(given)(rotate(y, table))
        try:
            return right(self, x, seq=seq)
        finally:
            (self.q_norm, self.k_norm), attention.rotate = norms, rotate

    attention.Attention.forward = wrong


def _change_key(change: Callable[[int, str], tuple[int, str]]) -> None:
    right = init._key
    init._key = lambda seed, name: right(*change(seed, name))


def start_every_block_alike() -> None:
    """First weights do not depend on the number of the block."""
    _change_key(lambda seed, name: (seed, name.translate(str.maketrans("", "", "0123456789"))))


def start_every_run_alike() -> None:
    """First weights do not depend on the seed."""
    _change_key(lambda seed, name: (0, name))


def _change_plan(change: Callable[[str, Normal | Constant], Normal | Constant]) -> None:
    right = ShardingPlan.init_of
    ShardingPlan.init_of = lambda self, name: change(name, right(self, name))


def start_projections_too_wide() -> None:
    """Projections into the residual stream start like all others."""
    _change_plan(lambda _, how: Normal(0.02) if isinstance(how, Normal) else how)


def start_norms_at_zero() -> None:
    """The weights of norms are 0."""
    _change_plan(lambda name, how: Constant(0.0) if name.endswith("norm.weight") else how)


def draw_weights_from_a_box() -> None:
    """First weights are uniform, of the right standard deviation."""
    init.normal_of = lambda index, key: (
        ((((init._splitmix64(index, key) >> 38) & 0x3FFFFFF).double() + 0.5) * 2.0**-26 - 0.5)
        * 12**0.5
    )
