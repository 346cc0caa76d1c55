"""The rotary positions that a shape asks for."""

from composer3d.models.layers.rope import Rope
from composer3d.models.llama.shape import RotaryShape


def rope_of(shape: RotaryShape) -> Rope:
    """Return the settings of the rotary positions of a shape.

    Blocks that are not stretched take ``Rope.unstretched`` of them.
    """
    return Rope(
        head_dim=shape.rotated_width,
        theta=shape.rope_theta,
        scaling=shape.rope_scaling,
        factor=shape.rope_factor,
        low_freq=shape.rope_low_freq,
        high_freq=shape.rope_high_freq,
        context=shape.rope_context,
        beta_fast=shape.rope_beta_fast,
        beta_slow=shape.rope_beta_slow,
        truncate=shape.rope_truncate,
        attention_factor=shape.attention_factor,
    )
