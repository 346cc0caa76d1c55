"""The parameters of a Llama, one row each. No torch here."""

from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.table import Constant, Normal, ParameterTable, Row

# The initial values of GPT-2, and of norms.
NORMAL = Normal(0.02)
ONES = Constant(1.0)
ZEROS = Constant(0.0)


def table(shape: ModelShape) -> ParameterTable:
    """Return the parameters of a Llama with this shape."""
    return table_of_blocks(shape, (*attention_rows(shape), *ffn_rows(shape)))


def table_of_blocks(shape: RotaryShape, block: tuple[Row, ...]) -> ParameterTable:
    """Return the parameters of a model whose blocks all have the rows ``block``.

    It has Llama's embedding, last norm and head around them.
    """
    embedding = "first.embed.weight"
    return ParameterTable(
        first=(
            Row(
                "embed.weight",
                (shape.vocab, shape.dim),
                "embedding",
                NORMAL,
                hf="model.embed_tokens.weight",
                meta="tok_embeddings.weight",
            ),
        ),
        blocks=(block,) * shape.n_layers,
        last=(
            norm_row("norm", shape.dim, hf="model.norm", meta="norm"),
            Row(
                "head.weight",
                (shape.vocab, shape.dim),
                "head",
                NORMAL,
                tied_to=embedding if shape.tied else "",
                hf="lm_head.weight",
                meta="output.weight",
            ),
        ),
        attention="attn",
        first_only_looks_up=True,
    )


def attention_rows(shape: ModelShape) -> list[Row]:
    """Return the parameters of a block's attention, and the norms before it and after it."""
    before, after = "model.layers.#.input_layernorm", "model.layers.#.post_attention_layernorm"
    rows = [
        norm_row("attn_norm", shape.dim, hf=before, meta="layers.#.attention_norm"),
        *projection_rows(shape, has_bias=shape.qkv_bias),
    ]
    if shape.qk_norm:
        rows += [
            Row(
                f"attn.{name}.weight",
                (shape.head_width,),
                "head_norm",
                ONES,
                hf=f"model.layers.#.self_attn.{name}.weight",
            )
            for name in ("q_norm", "k_norm")
        ]
    return [*rows, norm_row("ffn_norm", shape.dim, hf=after, meta="layers.#.ffn_norm")]


def projection_rows(shape: RotaryShape, *, has_bias: bool = False) -> list[Row]:
    """Return the projections of a block's attention, ``wq``, ``wk``, ``wv`` and ``wo``.

    Args:
        shape: the shape of the model.
        has_bias: whether all but ``wo`` have biases.
    """
    dim, width = shape.dim, shape.head_width
    queries, keys = shape.n_heads * width, shape.n_kv_heads * width
    hf, meta = "model.layers.#.self_attn", "layers.#.attention"
    wq = Row("attn.wq.weight", (queries, dim), "column", NORMAL, float8=True, is_rotary=True)
    wk = Row("attn.wk.weight", (keys, dim), "kv_column", NORMAL, float8=True, is_rotary=True)
    wv = Row("attn.wv.weight", (keys, dim), "kv_column", NORMAL, float8=True)
    rows = []
    for letter, weight in (("q", wq), ("k", wk), ("v", wv)):
        rows.append(
            weight._replace(hf=f"{hf}.{letter}_proj.weight", meta=f"{meta}.w{letter}.weight")
        )
        if has_bias:
            bias = weight._replace(
                name=f"attn.w{letter}.bias", shape=weight.shape[:1], init=ZEROS, is_rotary=False
            )
            rows.append(bias._replace(hf=f"{hf}.{letter}_proj.bias"))
    rows.append(
        Row(
            "attn.wo.weight",
            (dim, queries),
            "row",
            into_the_stream(shape),
            float8=True,
            hf=f"{hf}.o_proj.weight",
            meta=f"{meta}.wo.weight",
        )
    )
    return rows


def ffn_rows(shape: RotaryShape) -> list[Row]:
    """Return the parameters of a block's feed-forward layer, with their names in files."""
    hf, meta = "model.layers.#.mlp", "layers.#.feed_forward"
    return [
        row._replace(float8=True, hf=f"{hf}.{in_hf}.weight", meta=f"{meta}.{in_meta}.weight")
        for row, in_hf, in_meta in zip(
            feed_forward_rows(shape, "ffn", shape.ffn),
            ("gate_proj", "down_proj", "up_proj"),
            ("w1", "w2", "w3"),
            strict=True,
        )
    ]


def feed_forward_rows(shape: RotaryShape, module: str, width: int) -> list[Row]:
    """Return the three matrices of a gated feed-forward layer, ``w1``, ``w2`` and ``w3``.

    It is the last of its block, so what ``w2`` returns is only added to the residual stream.
    """
    w1 = Row(f"{module}.w1.weight", (width, shape.dim), "column", NORMAL)
    w2 = Row(
        f"{module}.w2.weight", (shape.dim, width), "row", into_the_stream(shape), is_unread=True
    )
    return [w1, w2, w1._replace(name=f"{module}.w3.weight")]


def into_the_stream(shape: RotaryShape) -> Normal:
    """Return the initial values of a projection into the residual stream.

    As in GPT-2, they are smaller in deeper models.
    """
    return Normal(0.02 / (2 * shape.n_layers) ** 0.5)


def norm_row(module: str, dim: int, *, hf: str, meta: str = "") -> Row:
    """Return the weight of a norm of the residual stream.

    ``hf`` and ``meta`` name its module in files; empty: Meta's format has no such model.
    """
    in_meta = f"{meta}.weight" if meta else ""
    return Row(f"{module}.weight", (dim,), "norm", ONES, hf=f"{hf}.weight", meta=in_meta)
