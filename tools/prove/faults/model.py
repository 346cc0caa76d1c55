"""Faults of a single process: in rotary positions, and in the initial weights.

``verify`` runs the same model on both of its sides and cannot see them. ``checks.model``,
``checks.generation`` and ``checks.weights`` can.
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
from composer3d.models.llama import model as llama_model
from composer3d.parallel import init
from tools.prove.faults.places import found_by
from tools.prove.faults.plant import fault_by, fault_of

Table = tuple[Tensor, Tensor]

_PLAIN = "^logits of the plain model"
_STRETCHED = "^logits of the stretched model"
_YARN = "^logits of the yarn, other bounds model"


def _change_table(change: Callable[[Rope, Tensor, torch.dtype], Any]) -> None:
    """Call ``rope_table`` with the arguments that ``change`` returns for its arguments."""
    right = rope_module.rope_table
    rope_module.rope_table = lambda rope, positions, dtype: right(*change(rope, positions, dtype))


@found_by("model", _PLAIN)
def turn_by_another_base() -> None:
    """Rotary positions: rope_theta is 10,000, whatever the shape sets."""
    _change_table(lambda rope, positions, dtype: (replace(rope, theta=1e4), positions, dtype))


@found_by("model", _STRETCHED)
def forget_the_stretch_of_positions() -> None:
    """Rotary positions: rope_factor is 1, whatever the shape sets."""
    _change_table(lambda rope, positions, dtype: (replace(rope, factor=1.0), positions, dtype))


@found_by("model", _STRETCHED)
@fault_by(_change_table)
def swap_the_bounds_of_the_stretch(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Any:
    """Rotary positions: rope_low_freq and rope_high_freq are swapped."""
    return replace(rope, low_freq=rope.high_freq, high_freq=rope.low_freq), positions, dtype


@found_by("model", _STRETCHED)
def stretch_by_the_context_of_another_model() -> None:
    """Rotary positions: rope_context is 8,192, whatever the shape sets."""
    _change_table(lambda rope, positions, dtype: (replace(rope, context=8192), positions, dtype))


@found_by("model", "^logits of the linear model")
@fault_by(_change_table)
def multiply_linear_positions(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Any:
    """Rotary positions: those that are linear are multiplied by the factor, not divided."""
    wrong = replace(rope, factor=1 / rope.factor)
    return (wrong if rope.scaling == "linear" else rope), positions, dtype


@found_by("model", _YARN)
@fault_by(_change_table)
def stretch_between_other_turns(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Any:
    """YaRN: the bounds of the stretch are those of 32 turns and of one, whatever the shape sets."""
    return replace(rope, beta_fast=32.0, beta_slow=1.0), positions, dtype


@found_by("model", "^logits of the yarn model")
@fault_by(_change_table)
def apply_the_attention_factor_twice(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Any:
    """YaRN: what is rotated is multiplied by the attention factor twice."""
    return replace(rope, attention_factor=rope.attention_factor**2), positions, dtype


@found_by("model", _STRETCHED)
@fault_of(llama_model.Llama, llama_model.Llama.make_block)
def stretch_all_blocks_but_the_first(right: Any, self: Any, layer: int, rope: Rope) -> Any:
    """Rotary positions: the first block does not stretch them."""
    return right(self, layer, rope.unstretched() if layer == 0 else rope)


@found_by("generation", "^tokens of the yarn, other bounds model")
@fault_by(_change_table)
def forget_the_attention_factor_of_new_tokens(
    rope: Rope, positions: Tensor, dtype: torch.dtype
) -> Any:
    """YaRN: tokens that are generated one by one have no attention factor."""
    is_new = positions.shape[1] == 1
    return (replace(rope, attention_factor=1.0) if is_new else rope), positions, dtype


@found_by("model", _PLAIN)
@fault_of(rope_module, rope_module.rope_table)
def round_angles(right: Any, rope: Rope, positions: Tensor, dtype: torch.dtype) -> Table:
    """Rotary positions: angles are computed in bfloat16."""
    cos, sin = right(rope, positions.to(torch.bfloat16), torch.bfloat16)
    return cos.to(dtype), sin.to(dtype)


@found_by("model", _PLAIN)
@fault_of(attention, attention.rotate)
def turn_neighbours(_: Any, x: Tensor, table: Table) -> Tensor:
    """Rotary positions: pairs are neighbours, as in Meta's weights, instead of halves."""
    width = table[0].shape[-1]
    half = width // 2
    cos, sin = table[0][..., :half], table[1][..., half:]
    a, b = x[..., :width:2], x[..., 1:width:2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned, x[..., width:]), -1)


@found_by("model", _PLAIN)
def turn_halves_apart() -> None:
    """Rotary positions: the sine of both halves is added with the same sign."""
    right = attention.rotate
    attention.rotate = lambda x, table: right(x, (table[0], table[1].abs()))


@found_by("model", _PLAIN)
def turn_the_other_way() -> None:
    """Rotary positions: pairs are rotated the other way, so that scores see negative distances."""
    right = attention.rotate
    attention.rotate = lambda x, table: right(x, (table[0], -table[1]))


@found_by("model", "^logits of the yarn model")
@fault_of(attention.Attention, attention.Attention.forward)
def norm_after_the_rotation(right: Any, self: Any, x: Tensor, *, seq: Any) -> Tensor:
    """The norms of queries and keys are applied after the rotation, to other elements of a head."""
    q_norm, k_norm, rotate = self.q_norm, self.k_norm, attention.rotate
    # The query is rotated first, then the key.
    norms = iter((q_norm, k_norm))
    self.q_norm = self.k_norm = torch.nn.Identity()
    attention.rotate = lambda y, table: next(norms)(rotate(y, table))
    try:
        return right(self, x, seq=seq)
    finally:
        self.q_norm, self.k_norm, attention.rotate = q_norm, k_norm, rotate


def _change_key(change: Callable[[int, str], tuple[int, str]]) -> None:
    """Make the key of initial weights from the seed and name that ``change`` returns for them."""
    right = init._key
    init._key = lambda seed, name: right(*change(seed, name))


@found_by("weights", r"initial weights of blocks\.0\.attn\.wq")
def start_every_block_alike() -> None:
    """Initial weights do not depend on the number of the block."""
    _change_key(lambda seed, name: (seed, name.translate(str.maketrans("", "", "0123456789"))))


@found_by("weights", "with seed 7")
def start_every_run_alike() -> None:
    """Initial weights do not depend on the seed."""
    _change_key(lambda seed, name: (0, name))


def _change_plan(change: Callable[[str, Normal | Constant], Normal | Constant]) -> None:
    """Replace the plan's rule for the initial weights of a parameter by ``change(name, rule)``."""
    right = ShardingPlan.init_of
    ShardingPlan.init_of = lambda self, name: change(name, right(self, name))


@found_by("weights", r"initial weights of blocks\.0\.ffn\.w2")
def start_projections_too_wide() -> None:
    """Projections into the residual stream start with the deviation of all other matrices."""
    _change_plan(lambda _, rule: Normal(0.02) if isinstance(rule, Normal) else rule)


@found_by("weights", r"initial weights of last\.norm")
def start_norms_at_zero() -> None:
    """The weights of norms start at 0."""
    _change_plan(lambda name, rule: Constant(0.0) if name.endswith("norm.weight") else rule)


@found_by("weights", r"initial weights of blocks\.0\.attn\.wq")
@fault_of(init, init.normal_of)
def draw_weights_from_a_box(_: Any, index: Tensor, key: int) -> Tensor:
    """Initial weights are uniform, with the right standard deviation."""
    bits = (init._splitmix64(index, key) >> 38) & 0x3FFFFFF
    between_0_and_1 = (bits.double() + 0.5) * 2.0**-26
    return (between_0_and_1 - 0.5) * 12**0.5
