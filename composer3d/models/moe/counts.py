"""Counts the parameters of a Llama with experts, and the FLOPs of a training token. No torch here.

The conventions are those of ``models.llama.counts``. A token costs the FLOPs of the experts that
compute it, not of all experts: MFU counts active parameters, memory counts all.
"""

from composer3d.models.llama.counts import keys_seen
from composer3d.models.llama.counts import parts as llama_parts
from composer3d.models.moe.shape import MoeShape


def parameters(shape: MoeShape) -> int:
    """Count the parameters of the whole model. A tied embedding and head count once."""
    return _parameters(shape, shape.experts)


def active_parameters(shape: MoeShape) -> int:
    """Count the parameters that compute a token: ``experts_per_token`` of the experts."""
    return _parameters(shape, shape.experts_per_token)


def _parameters(shape: MoeShape, experts: int) -> int:
    p, moe = llama_parts(shape), shape.moe_layers
    bias = shape.experts if shape.router_bias else 0
    blocks = shape.n_layers * p.block + moe * (_moe_matrices(shape, experts) + bias - p.ffn)
    return p.embedding + blocks + p.last_norm + p.head


def _moe_matrices(shape: MoeShape, experts: int) -> int:
    """The weights of a mixture with this many experts: router, experts and the shared expert."""
    router = shape.experts * shape.dim
    return router + 3 * shape.dim * (experts * shape.expert_width + shape.shared_ffn)


def flops_per_token(shape: MoeShape, seq_len: int, *, causal: bool = True) -> float:
    """Count the FLOPs of one training token, forward and backward.

    As ``models.llama.counts.flops_per_token``, with the router, ``experts_per_token`` experts and
    the shared expert in place of the dense feed-forward layer.
    """
    p, moe = llama_parts(shape), shape.moe_layers
    keys = keys_seen(seq_len, shape.window) if causal else seq_len
    ffn = (shape.n_layers - moe) * p.ffn + moe * _moe_matrices(shape, shape.experts_per_token)
    matmul = shape.n_layers * p.attention + ffn + shape.vocab * shape.dim
    return 6.0 * matmul + 12.0 * shape.n_layers * keys * shape.n_heads * shape.head_width
