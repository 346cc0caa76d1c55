"""The parameters of a Llama, one row each. No torch here."""

from composer3d.models.llama.shape import ModelShape
from composer3d.models.table import Constant, Normal, ParameterTable, Row

# The initial values of GPT-2.
_NORMAL = Normal(0.02)
_ONES = Constant(1.0)
_ZEROS = Constant(0.0)


def table(shape: ModelShape) -> ParameterTable:
    """Return the parameters of a Llama with this shape."""
    hf, meta = "model.layers.#.mlp", "layers.#.feed_forward"
    feed_forward = [
        row._replace(float8=True, hf=f"{hf}.{in_hf}.weight", meta=f"{meta}.{in_meta}.weight")
        for row, in_hf, in_meta in zip(
            feed_forward_rows(shape, "ffn", shape.ffn),
            ("gate_proj", "down_proj", "up_proj"),
            ("w1", "w2", "w3"),
            strict=True,
        )
    ]
    block = (*attention_rows(shape), *feed_forward)
    embedding = "first.embed.weight"
    return ParameterTable(
        first=(
            Row(
                "embed.weight",
                (shape.vocab, shape.dim),
                "embedding",
                _NORMAL,
                hf="model.embed_tokens.weight",
                meta="tok_embeddings.weight",
            ),
        ),
        blocks=(block,) * shape.n_layers,
        last=(
            _norm("norm", shape.dim, hf="model.norm", meta="norm"),
            Row(
                "head.weight",
                (shape.vocab, shape.dim),
                "head",
                _NORMAL,
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
    dim, width = shape.dim, shape.head_width
    queries, keys = shape.n_heads * width, shape.n_kv_heads * width
    hf, meta = "model.layers.#.self_attn", "layers.#.attention"
    wq = Row("attn.wq.weight", (queries, dim), "column", _NORMAL, float8=True, is_rotary=True)
    wk = Row("attn.wk.weight", (keys, dim), "kv_column", _NORMAL, float8=True, is_rotary=True)
    wv = Row("attn.wv.weight", (keys, dim), "kv_column", _NORMAL, float8=True)
    rows = [
        _norm(
            "attn_norm",
            dim,
            hf="model.layers.#.input_layernorm",
            meta="layers.#.attention_norm",
        )
    ]
    for letter, weight in (("q", wq), ("k", wk), ("v", wv)):
        rows.append(
            weight._replace(hf=f"{hf}.{letter}_proj.weight", meta=f"{meta}.w{letter}.weight")
        )
        if shape.qkv_bias:
            bias = weight._replace(
                name=f"attn.w{letter}.bias", shape=weight.shape[:1], init=_ZEROS, is_rotary=False
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
    if shape.qk_norm:
        rows += [
            Row(f"attn.{name}.weight", (width,), "head_norm", _ONES, hf=f"{hf}.{name}.weight")
            for name in ("q_norm", "k_norm")
        ]
    after = "model.layers.#.post_attention_layernorm"
    return [*rows, _norm("ffn_norm", dim, hf=after, meta="layers.#.ffn_norm")]


def feed_forward_rows(shape: ModelShape, module: str, width: int) -> list[Row]:
    """Return the three matrices of a gated feed-forward layer, ``w1``, ``w2`` and ``w3``.

    It is the last of its block, so what ``w2`` returns is only added to the residual stream.
    """
    w1 = Row(f"{module}.w1.weight", (width, shape.dim), "column", _NORMAL)
    w2 = Row(
        f"{module}.w2.weight", (shape.dim, width), "row", into_the_stream(shape), is_unread=True
    )
    return [w1, w2, w1._replace(name=f"{module}.w3.weight")]


def into_the_stream(shape: ModelShape) -> Normal:
    """Return the initial values of a projection into the residual stream.

    As in GPT-2, they are smaller in deeper models.
    """
    return Normal(0.02 / (2 * shape.n_layers) ** 0.5)


def _norm(module: str, dim: int, *, hf: str, meta: str) -> Row:
    return Row(f"{module}.weight", (dim,), "norm", _ONES, hf=f"{hf}.weight", meta=f"{meta}.weight")
