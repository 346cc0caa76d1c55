"""The parameters of a Llama with experts, one row each. No torch here."""

from dataclasses import replace

from composer3d.models.llama.table import attention_rows, feed_forward_rows, into_the_stream
from composer3d.models.llama.table import table as llama_table
from composer3d.models.moe.shape import ExpertsShape, MoeShape
from composer3d.models.table import Constant, Normal, ParameterTable, Row


def table(shape: MoeShape) -> ParameterTable:
    """Return the parameters of a Llama with experts of this shape.

    A block without experts is one of Llama. A block with experts has a router, experts and perhaps
    a shared expert, with or without a gate, in place of the feed-forward layer.
    """
    dense = llama_table(shape)
    names = _MIXTRAL if shape.model_type == "mixtral" else _QWEN
    return with_experts(dense, shape, (*attention_rows(shape), *expert_rows(shape, names)))


def with_experts(
    dense: ParameterTable, shape: ExpertsShape, of_experts: tuple[Row, ...]
) -> ParameterTable:
    """Return ``dense`` with the rows ``of_experts`` in the blocks that have experts."""
    blocks = tuple(
        of_experts if shape.has_experts(layer) else dense.blocks[layer]
        for layer in range(shape.n_layers)
    )
    return replace(dense, blocks=blocks)


class HuggingFaceNames:
    """The names of one family's mixture in published files.

    Args:
        block: the module with the mixture.
        w1, w2, w3: the projections of an expert.
        shared: the module with the shared expert.

    Attributes:
        router, bias: of the router and its bias.
        experts, shared: of each matrix of the experts and of the shared expert.
        shared_gate: of the shared expert's gate.
    """

    def __init__(
        self, block: str, *, w1: str, w2: str, w3: str, shared: str = "shared_expert"
    ) -> None:
        hf = f"model.layers.#.{block}"
        matrices = {"w1": w1, "w2": w2, "w3": w3}
        self.router = f"{hf}.gate.weight"
        self.bias = f"{hf}.gate.e_score_correction_bias"
        self.experts = {w: f"{hf}.experts.@.{name}.weight" for w, name in matrices.items()}
        self.shared = {w: f"{hf}.{shared}.{name}.weight" for w, name in matrices.items()}
        self.shared_gate = f"{hf}.shared_expert_gate.weight"


_MIXTRAL = HuggingFaceNames("block_sparse_moe", w1="w1", w2="w2", w3="w3")
_QWEN = HuggingFaceNames("mlp", w1="gate_proj", w2="down_proj", w3="up_proj")


def expert_rows(shape: ExpertsShape, hf: HuggingFaceNames) -> list[Row]:
    """Return the parameters of a mixture of experts, and of its shared expert."""
    dim, experts, width = shape.dim, shape.experts, shape.expert_width
    normal = Normal(0.02)
    rows = [Row("moe.router.weight", (experts, dim), "router", normal, hf=hf.router)]
    if shape.router_bias:
        bias = Row("moe.router.bias", (experts,), "router", Constant(0.0), trains=False)
        rows.append(bias._replace(hf=hf.bias))
    matrices: tuple[tuple[str, tuple[int, ...], Normal], ...] = (
        ("w1", (experts, width, dim), normal),
        ("w2", (experts, dim, width), into_the_stream(shape)),
        ("w3", (experts, width, dim), normal),
    )
    rows += [
        Row(f"moe.experts.{name}", size, "experts", init, float8=True, hf=hf.experts[name])
        for name, size, init in matrices
    ]
    if shape.shared_ffn:
        shared = feed_forward_rows(shape, "moe.shared", shape.shared_ffn)
        for name, row in zip(("w1", "w2", "w3"), shared, strict=True):
            # Backward reads what a gate weighs.
            is_unread = row.is_unread and not shape.shared_gate
            rows.append(row._replace(float8=True, is_unread=is_unread, hf=hf.shared[name]))
    if shape.shared_gate:  # of the same tokens as the router
        rows.append(Row("moe.shared_gate.weight", (1, dim), "router", normal, hf=hf.shared_gate))
    return rows
