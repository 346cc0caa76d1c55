"""How many parameters a model has, and how many floating-point operations a training token costs. No torch here.

Every number that claims a FLOP (metrics, planner, benchmarks) comes from here. Products of matrices are counted, one
multiply-add as two operations; norms, activations, RoPE and the softmax are not. Recomputation of activation
checkpointing is not counted either: these are FLOPs of the model, so MFU falls where the hardware does more.
"""

from dataclasses import dataclass

from composer3d.models.llama.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parameters of one shape, by the module that holds them."""

    embedding: int  # first.embed: a lookup, no product
    attention: int  # weights of wq, wk, wv and wo of one block
    biases: int  # of wq, wk and wv of one block
    ffn: int  # w1, w2 and w3 of one block
    norms: int  # of one block: its two norms, and those of queries and keys
    last_norm: int
    head: int  # last.head; 0 where it is the embedding

    @property
    def block(self) -> int:
        return self.attention + self.biases + self.ffn + self.norms


def parts(shape: ModelShape) -> Parts:
    """Parameters by part; ``embedding + n_layers * block + last_norm + head`` is the whole model."""
    width = shape.head_width
    heads = shape.n_heads + 2 * shape.n_kv_heads  # of wq, wk and wv
    return Parts(
        embedding=shape.vocab * shape.dim,
        attention=shape.dim * width * (heads + shape.n_heads),
        biases=heads * width if shape.qkv_bias else 0,
        ffn=3 * shape.dim * shape.ffn,
        norms=2 * shape.dim + (2 * width if shape.qk_norm else 0),
        last_norm=shape.dim,
        head=0 if shape.tied else shape.vocab * shape.dim,
    )


def parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; embedding and head are two, and one if they are tied."""
    p = parts(shape)
    return p.embedding + shape.n_layers * p.block + p.last_norm + p.head


def keys_seen(seq_len: int, window: int = 0) -> float:
    """Keys that a causal query sees, the mean over a sequence of ``seq_len``: (T + 1) / 2, and less with a window."""
    width = min(window or seq_len, seq_len)
    return width - width * (width - 1) / (
        2 * seq_len
    )  # all see ``width`` keys, but the first queries lack some


def flops_per_token(shape: ModelShape, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs of one training token, forward and backward.

    6 * (parameters that multiply a token) + 12 * n_layers * keys * n_heads * head_width. A parameter costs 2 FLOPs
    forward and 4 backward, for the gradients of its input and of itself. A number of the query takes 2 for its product
    with a key and 2 for the weighted sum of the values, and twice that backward: fewer key-value heads save memory, no
    operation. The head counts, tied or not; the lookup of the embedding does not.

    ``causal=False`` is the convention of PaLM (Chowdhery et al. 2022, appendix B: 6N + 12LHQT) and of Megatron-LM
    (Narayanan et al. 2021, equation 3, less its recomputation), which count masked scores too: all ``seq_len`` keys.
    ``causal=True``, what composer3d reports, counts the keys that are seen, so that no mask flatters MFU.
    """
    p, keys = parts(shape), keys_seen(seq_len, shape.window) if causal else seq_len
    matmul = shape.n_layers * (p.attention + p.ffn) + shape.vocab * shape.dim
    return 6.0 * matmul + 12.0 * shape.n_layers * keys * shape.n_heads * shape.head_width
