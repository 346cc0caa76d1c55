"""The parameters of a gpt-oss, one row each. No torch here."""

from composer3d.models.gpt_oss.shape import GptOssShape
from composer3d.models.llama.table import (
    NORMAL,
    ZEROS,
    into_the_stream,
    norm_row,
    projection_rows,
    table_of_blocks,
)
from composer3d.models.table import ParameterTable, Row

_ATTENTION = "model.layers.#.self_attn"
_MIXTURE = "model.layers.#.mlp"


def table(shape: GptOssShape) -> ParameterTable:
    """Return the parameters of a gpt-oss with this shape. All blocks have the same."""
    block = (
        norm_row("attn_norm", shape.dim, hf="model.layers.#.input_layernorm"),
        *projection_rows(shape, has_bias=True),
        Row("attn.out_bias.weight", (shape.dim,), "norm", ZEROS, hf=f"{_ATTENTION}.o_proj.bias"),
        Row("attn.sinks.weight", (shape.n_heads,), "column", NORMAL, hf=f"{_ATTENTION}.sinks"),
        norm_row("ffn_norm", shape.dim, hf="model.layers.#.post_attention_layernorm"),
        *_mixture_rows(shape),
    )
    return table_of_blocks(shape, block)


def _mixture_rows(shape: GptOssShape) -> list[Row]:
    """Return the parameters of a router and its experts, each with a bias."""
    dim, experts, width = shape.dim, shape.experts, shape.ffn
    router = Row("moe.router.weight", (experts, dim), "router", NORMAL)
    w1 = Row("moe.experts.w1", (experts, 2 * width, dim), "experts", NORMAL, float8=True)
    w2 = Row(
        "moe.experts.w2", (experts, dim, width), "experts", into_the_stream(shape), float8=True
    )
    pairs = (
        (router, "moe.router.logit_bias", "router.weight", "router.bias"),
        (w1, "moe.experts.b1", "experts.gate_up_proj", "experts.gate_up_proj_bias"),
        (w2, "moe.experts.b2", "experts.down_proj", "experts.down_proj_bias"),
    )
    weights, biases = [], []
    for weight, bias, weight_in_files, bias_in_files in pairs:
        weights.append(weight._replace(hf=f"{_MIXTURE}.{weight_in_files}"))
        biases.append(
            weight._replace(
                name=bias,
                shape=weight.shape[:-1],
                init=ZEROS,
                hf=f"{_MIXTURE}.{bias_in_files}",
            )
        )
    # The order of the modules.
    return [weights[0], biases[0], *weights[1:], *biases[1:]]
