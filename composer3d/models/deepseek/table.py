"""The parameters of a DeepSeek-V2 or V3, one row each. No torch here."""

from dataclasses import replace

from composer3d.models.deepseek.shape import DeepseekShape, PredictingShape
from composer3d.models.llama.table import (
    NORMAL,
    ffn_rows,
    into_the_stream,
    norm_row,
    table_of_blocks,
)
from composer3d.models.moe.table import HuggingFaceNames, expert_rows, with_experts
from composer3d.models.table import ParameterTable, Row

EXPERTS_IN_FILES = HuggingFaceNames(
    "mlp", w1="gate_proj", w2="down_proj", w3="up_proj", shared="shared_experts"
)
_ATTENTION = "model.layers.#.self_attn"


def table(shape: DeepseekShape) -> ParameterTable:
    """Return the parameters of a DeepSeek-V2 or V3 with this shape."""
    attention = _attention_rows(shape)
    dense = table_of_blocks(shape, (*attention, *ffn_rows(shape)))
    return with_prediction(dense, shape, (*attention, *expert_rows(shape, EXPERTS_IN_FILES)))


def with_prediction(
    dense: ParameterTable, shape: PredictingShape, of_experts: tuple[Row, ...]
) -> ParameterTable:
    """Return ``dense`` with the rows ``of_experts`` in the blocks that have experts.

    Those of multi-token prediction follow, each with what it has besides.
    """
    main = with_experts(dense, shape, of_experts)
    if not shape.mtp_layers:
        return main
    return replace(
        main,
        blocks=main.blocks + ((*of_experts, *_merge_rows(shape)),) * shape.mtp_layers,
        last=(*main.last, *_prediction_rows(shape)),
    )


def _merge_rows(shape: PredictingShape) -> list[Row]:
    """Return what a depth of multi-token prediction has besides a block with experts."""
    dim, layer = shape.dim, "model.layers.#"
    return [
        norm_row("embed_norm", dim, hf=f"{layer}.enorm"),
        norm_row("hidden_norm", dim, hf=f"{layer}.hnorm"),
        Row("project.weight", (dim, 2 * dim), "whole", NORMAL, hf=f"{layer}.eh_proj.weight"),
    ]


def _prediction_rows(shape: PredictingShape) -> list[Row]:
    """Return what multi-token prediction has after the blocks: the embedding, and a norm a depth.

    The files have a copy of the embedding and of the head in each of its layers (``names``).
    """
    embedding = Row(
        "embed.weight",
        (shape.vocab, shape.dim),
        "embedding",
        NORMAL,
        tied_to="first.embed.weight",
    )
    return [
        embedding,
        *(
            norm_row(f"mtp_norm.{depth}", shape.dim, hf=f"model.layers.{layer}.shared_head.norm")
            for depth, layer in enumerate(range(shape.n_layers, shape.all_layers))
        ),
    ]


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
