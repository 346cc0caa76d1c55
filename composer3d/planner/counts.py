"""How many parameters a model has, and how many floating-point operations a training token costs. No torch here.

Every number that claims a FLOP (metrics, planner, benchmarks) comes from here. Products of matrices are counted, one
multiply-add as two operations; norms, activations, RoPE and the softmax are not. Recomputation of activation
checkpointing is not counted either: these are FLOPs of the model, so MFU falls where the hardware does more.
"""

from dataclasses import dataclass

from composer3d.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parameters of one shape, by the module that holds them."""

    embedding: int  # first.embed: a lookup, no product
    attention: int  # wq, wk, wv and wo of one block
    ffn: int  # w1, w2 and w3 of one block
    norms: int  # the two norms of one block
    last_norm: int
    head: int

    @property
    def block(self) -> int:
        return self.attention + self.ffn + self.norms

    @property
    def block_matmul(self) -> int:
        """Parameters of one block that multiply every token."""
        return self.attention + self.ffn


def parts(shape: ModelShape) -> Parts:
    """Parameters by part; ``embedding + n_layers * block + last_norm + head`` is the whole model."""
    kv_dim = shape.n_kv_heads * shape.head_width
    return Parts(
        embedding=shape.vocab * shape.dim,
        attention=2 * shape.dim * shape.dim + 2 * shape.dim * kv_dim,
        ffn=3 * shape.dim * shape.ffn,
        norms=2 * shape.dim,
        last_norm=shape.dim,
        head=shape.vocab * shape.dim,
    )


def parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; embedding and head are two."""
    p = parts(shape)
    return p.embedding + shape.n_layers * p.block + p.last_norm + p.head


def attention_flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    """Forward FLOPs of the scores and of the weighted values of one block, for one token of a sequence of ``seq_len``.

    The query of all heads together has ``dim`` numbers. Its products with ``seq_len`` keys take 2 * seq_len * dim, and
    the weighted sum of as many values the same again: 4 * seq_len * dim. A causal token sees half of the sequence on
    average ((T + 1) / 2 is taken as T / 2). Fewer key-value heads save memory, no operation.
    """
    return 4.0 * seq_len * shape.dim * (0.5 if causal else 1.0)


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one training token, forward and backward.

    6 * (parameters that multiply a token) + 12 * n_layers * seq_len * dim, and 6 instead of 12 if causal. A parameter
    costs 2 FLOPs forward and 4 backward, for the gradients of its input and of itself; attention's two products have
    two gradients each. The head counts, the lookup of the embedding does not.

    ``causal=False`` is the convention of PaLM (Chowdhery et al. 2022, appendix B: 6N + 12LHQT) and of Megatron-LM
    (Narayanan et al. 2021, equation 3, less its recomputation), which count masked scores too. ``causal=True``, what
    composer3d reports, counts what a causal kernel has to do, so that no mask flatters MFU.
    """
    p = parts(shape)
    matmul = shape.n_layers * p.block_matmul + p.head
    return 6.0 * matmul + 3.0 * shape.n_layers * attention_flops_per_token(shape, seq_len, causal=causal)
