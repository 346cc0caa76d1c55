"""The parameters of a Gemma 3, one row each. No torch here."""

from dataclasses import replace

from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.llama.table import (
    NORMAL,
    ffn_rows,
    norm_row,
    projection_rows,
    table_of_blocks,
)
from composer3d.models.table import Constant, ParameterTable, Row

_ZEROS = Constant(0.0)  # of norms, whose factor is 1 + weight


def table(shape: Gemma3Shape) -> ParameterTable:
    """Return the parameters of a Gemma 3 with this shape.

    All matrices start alike: those into the residual stream need no smaller values, because a norm
    comes after them. That norm reads what they return.
    """
    norms = {
        name: _as_offset(norm_row(name, shape.dim, hf=f"model.layers.#.{in_files}"))
        for name, in_files in (
            ("attn_norm", "input_layernorm"),
            ("attn_post_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("ffn_post_norm", "post_feedforward_layernorm"),
        )
    }
    block = (
        norms["attn_norm"],
        *(row._replace(init=NORMAL) for row in projection_rows(shape)),
        *(
            Row(
                f"attn.{name}.weight",
                (shape.head_width,),
                "head_norm",
                _ZEROS,
                hf=f"model.layers.#.self_attn.{name}.weight",
            )
            for name in ("q_norm", "k_norm")
        ),
        norms["attn_post_norm"],
        norms["ffn_norm"],
        *(row._replace(init=NORMAL, is_unread=False) for row in ffn_rows(shape)),
        norms["ffn_post_norm"]._replace(is_unread=True),
    )
    whole = table_of_blocks(shape, block)
    norm, head = whole.last
    return replace(whole, last=(_as_offset(norm), head))


def _as_offset(norm: Row) -> Row:
    """Return the row of a norm whose factor is 1 + weight. Meta's format has no such norm."""
    return norm._replace(init=_ZEROS, meta="")
