"""Counts the parameters of a Llama, and the FLOPs of a training token. No torch here.

The metrics and the benchmarks report these FLOPs. Matrix products are counted, with two operations
for a multiply-add. Norms, activations, RoPE and the softmax are not counted. The recomputation of
activation checkpointing is not counted either: these are FLOPs of the model, so MFU (model FLOPs
utilization) falls if the hardware does more work.
"""

from dataclasses import dataclass

from composer3d.models.llama.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The numbers of parameters of one shape, by the module that holds them.

    Attributes:
        embedding: first.embed, which is a lookup and not a matrix product.
        attention: the weights wq, wk, wv and wo of one block.
        biases: the biases of wq, wk and wv of one block.
        ffn: w1, w2 and w3 of one block.
        norms: the two norms of one block, and the norms of its queries and keys.
        last_norm: last.norm.
        head: last.head, or 0 if it is the embedding.
    """

    embedding: int
    attention: int
    biases: int
    ffn: int
    norms: int
    last_norm: int
    head: int

    @property
    def block(self) -> int:
        """The number of parameters of one block."""
        return self.attention + self.biases + self.ffn + self.norms


def parts(shape: ModelShape) -> Parts:
    """Count parameters by part.

    ``embedding + n_layers * block + last_norm + head`` is the whole model.
    """
    width = shape.head_width
    qkv_heads = shape.n_heads + 2 * shape.n_kv_heads
    return Parts(
        embedding=shape.vocab * shape.dim,
        attention=shape.dim * width * (qkv_heads + shape.n_heads),
        biases=qkv_heads * width if shape.qkv_bias else 0,
        ffn=3 * shape.dim * shape.ffn,
        norms=2 * shape.dim + (2 * width if shape.qk_norm else 0),
        last_norm=shape.dim,
        head=0 if shape.tied else shape.vocab * shape.dim,
    )


def parameters(shape: ModelShape) -> int:
    """Count the parameters of the whole model. A tied embedding and head count once."""
    p = parts(shape)
    return p.embedding + shape.n_layers * p.block + p.last_norm + p.head


def keys_seen(seq_len: int, window: int = 0) -> float:
    """Return the mean number of keys that a causal query sees in a sequence.

    Without a window (0) it is (seq_len + 1) / 2.
    """
    width = min(window or seq_len, seq_len)
    # Query i sees ``width`` keys, or only i + 1 keys if i + 1 is smaller.
    missing = width * (width - 1) // 2
    return width - missing / seq_len


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    """Count the FLOPs of one training token, forward and backward.

    6 * (parameters that multiply a token) + 12 * n_layers * keys * n_heads * head_width.

    A parameter costs 2 FLOPs forward, and 4 backward for the gradients of its input and of itself.
    For each key, an element of a query costs 2 FLOPs for the score and 2 for the weighted sum of
    values forward, and twice as much backward. So fewer key-value heads save memory, but no
    operations. The head counts even if it is tied; the lookup of the embedding does not.

    Args:
        shape: the model.
        seq_len: the number of tokens in a sequence.
        causal: True counts only the keys that a query sees, so that a mask does not inflate MFU.
            composer3d reports these FLOPs. False also counts masked scores: ``seq_len`` keys for
            each query. This is the convention of PaLM (Chowdhery et al. 2022, appendix B: 6N +
            12LHQT) and of Megatron-LM (Narayanan et al. 2021, equation 3, without its
            recomputation).
    """
    p = parts(shape)
    keys = keys_seen(seq_len, shape.window) if causal else seq_len
    matmul = shape.n_layers * (p.attention + p.ffn) + shape.vocab * shape.dim
    return 6.0 * matmul + 12.0 * shape.n_layers * keys * shape.n_heads * shape.head_width
