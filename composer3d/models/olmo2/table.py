"""The parameters of an OLMo 2, one row each. No torch here."""

from composer3d.models.llama.table import (
    NORMAL,
    ONES,
    ffn_rows,
    norm_row,
    projection_rows,
    table_of_blocks,
)
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.table import ParameterTable, Row


def table(shape: Olmo2Shape) -> ParameterTable:
    """Return the parameters of an OLMo 2 with this shape.

    All matrices start alike (arXiv 2501.00656): those into the residual stream need no
    smaller values, because a norm comes after them. That norm reads what they return.
    """
    queries, keys = (heads * shape.head_width for heads in (shape.n_heads, shape.n_kv_heads))
    hf = "model.layers.#"
    q_norm = Row("attn.q_norm.weight", (queries,), "column_norm", ONES)
    k_norm = Row("attn.k_norm.weight", (keys,), "kv_column_norm", ONES)
    ffn_norm = norm_row("ffn_norm", shape.dim, hf=f"{hf}.post_feedforward_layernorm")
    block = (
        *(row._replace(init=NORMAL) for row in projection_rows(shape)),
        q_norm._replace(hf=f"{hf}.self_attn.q_norm.weight"),
        k_norm._replace(hf=f"{hf}.self_attn.k_norm.weight"),
        norm_row("attn_norm", shape.dim, hf=f"{hf}.post_attention_layernorm"),
        *(row._replace(init=NORMAL, is_unread=False) for row in ffn_rows(shape)),
        ffn_norm._replace(is_unread=True),
    )
    return table_of_blocks(shape, block)
