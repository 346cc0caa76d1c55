"""The parameters of a DeepSeek-V2 or V3, one row each. No torch here."""

from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.llama.table import (
    NORMAL,
    ffn_rows,
    into_the_stream,
    norm_row,
    table_of_blocks,
)
from composer3d.models.moe.table import HuggingFaceNames, expert_rows, with_experts
from composer3d.models.table import ParameterTable, Row

_EXPERTS = HuggingFaceNames(
    "mlp", w1="gate_proj", w2="down_proj", w3="up_proj", shared="shared_experts"
)
_ATTENTION = "model.layers.#.self_attn"


def table(shape: DeepseekShape) -> ParameterTable:
    """Return the parameters of a DeepSeek-V2 or V3 with this shape."""
    attention = _attention_rows(shape)
    dense = table_of_blocks(shape, (*attention, *ffn_rows(shape)))
    return with_experts(dense, shape, (*attention, *expert_rows(shape, _EXPERTS)))


def _attention_rows(shape: DeepseekShape) -> list[Row]:
    """Return the parameters of a block's attention, and the norms before it and after it."""
    dim = shape.dim
    rows = [norm_row("attn_norm", dim, hf="model.layers.#.input_layernorm")]
    if shape.query_rank:
        rows += [
            _down_row("wq_a", shape.query_rank, dim, hf="q_a_proj"),
            norm_row("attn.q_norm", shape.query_rank, hf=f"{_ATTENTION}.q_a_layernorm"),
        ]
    of_keys = shape.kv_rank + shape.rope_dim
    return [
        *rows,
        Row(
            "attn.queries.wq.weight",
            (shape.n_heads * shape.head_width, shape.query_rank or dim),
            "column",
            NORMAL,
            float8=True,
            hf=f"{_ATTENTION}.{'q_b_proj' if shape.query_rank else 'q_proj'}.weight",
        ),
        _down_row("wkv_a", of_keys, dim, hf="kv_a_proj_with_mqa"),
        norm_row("attn.kv_norm", shape.kv_rank, hf=f"{_ATTENTION}.kv_a_layernorm"),
        Row(
            "attn.keys.wkv_b.weight",
            (shape.n_heads * (shape.plain_dim + shape.value_dim), shape.kv_rank),
            "column",
            NORMAL,
            gathered=of_keys,
            float8=True,
            hf=f"{_ATTENTION}.kv_b_proj.weight",
        ),
        Row(
            "attn.wo.weight",
            (dim, shape.n_heads * shape.value_dim),
            "row",
            into_the_stream(shape),
            float8=True,
            hf=f"{_ATTENTION}.o_proj.weight",
        ),
        norm_row("ffn_norm", dim, hf="model.layers.#.post_attention_layernorm"),
    ]


def _down_row(name: str, width: int, dim: int, *, hf: str) -> Row:
    """Return the projection of the stream to a latent."""
    return Row(f"attn.{name}.weight", (width, dim), "whole", NORMAL, hf=f"{_ATTENTION}.{hf}.weight")
