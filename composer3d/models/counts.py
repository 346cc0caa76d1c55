"""Counts the parameters of a model, and the FLOPs of a training token. No torch here.

The metrics and the benchmarks report these FLOPs. Matrix products are counted, with two operations
for a multiply-add. Norms, activations, RoPE and the softmax are not counted. The recomputation of
activation checkpointing is not counted either: these are FLOPs of the model, so MFU (model FLOPs
utilization) falls if the hardware does more work. Of experts, only those that compute a token are
counted: MFU counts active parameters, memory counts all.
"""

from collections.abc import Callable

from composer3d.models.shape import DecoderShape
from composer3d.models.table import ParameterTable, Row


def parameters(table: ParameterTable) -> int:
    """Count the parameters of the whole model. A tied embedding and head count once."""
    return _sum(table, lambda row: 0 if row.tied_to else row.elements)


def active_parameters(table: ParameterTable, shape: DecoderShape) -> int:
    """Count the parameters that compute a token: ``experts_per_token`` of the experts."""
    return _sum(table, lambda row: 0 if row.tied_to else _active_elements(row, shape))


def keys_seen(seq_len: int, window: int = 0) -> float:
    """Return the mean number of keys that a causal query sees in a sequence.

    Without a window (0) it is (seq_len + 1) / 2.
    """
    width = min(window or seq_len, seq_len)
    # Query i sees ``width`` keys, or only i + 1 keys if i + 1 is smaller.
    missing = width * (width - 1) // 2
    return width - missing / seq_len


def flops_per_token(
    table: ParameterTable, shape: DecoderShape, seq_len: int, *, causal: bool = True
) -> float:
    """Count the FLOPs of one training token, forward and backward.

    6 * (parameters that multiply a token)
    + 6 * n_heads * (head_width + value_width) * (keys of all blocks).

    A parameter costs 2 FLOPs forward, and 4 backward for the gradients of its input and of itself.
    For each key, an element of a query costs 2 FLOPs for the score, and one of a value 2 for the
    weighted sum of values forward, and twice as much backward. So fewer key-value heads save
    memory, but no operations. The head counts even if it is tied, and once more for each depth of
    multi-token prediction; the lookup of the embedding does not.

    Args:
        table: the parameters of the model.
        shape: the shape of the model.
        seq_len: the number of tokens in a sequence.
        causal: True counts only the keys that a query sees, so that a mask does not inflate MFU.
            composer3d reports these FLOPs. False also counts masked scores: ``seq_len`` keys for
            each query. This is the convention of PaLM (Chowdhery et al. 2022, appendix B: 6N +
            12LHQT) and of Megatron-LM (Narayanan et al. 2021, equation 3, without its
            recomputation).
    """
    matmul = _sum(
        table,
        lambda row: (
            _active_elements(row, shape) if row.is_matrix and row.style != "embedding" else 0
        ),
    )
    heads = sum(row.elements for row in table.last if row.style == "head")
    matmul += shape.mtp_layers * heads
    attention, widths = 0.0, shape.head_width + shape.value_width
    for window, blocks in shape.windows.items():
        keys = keys_seen(seq_len, window) if causal else seq_len
        attention += 6.0 * blocks * keys * shape.n_heads * widths
    return 6.0 * matmul + attention


def _active_elements(row: Row, shape: DecoderShape) -> int:
    """Return the elements of a parameter that compute a token."""
    if row.style != "experts":
        return row.elements
    return row.elements // row.shape[0] * shape.experts_per_token


def _sum(table: ParameterTable, count: Callable[[Row], int]) -> int:
    """Add up a number of each parameter."""
    return (
        sum(map(count, table.first))
        + sum(blocks * sum(map(count, rows)) for rows, blocks in table.block_kinds)
        + sum(map(count, table.last))
    )
