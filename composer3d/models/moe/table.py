"""The parameters of a Llama with experts, one row each. No torch here."""

from dataclasses import replace

from composer3d.models.llama.table import attention_rows, feed_forward_rows, into_the_stream
from composer3d.models.llama.table import table as llama_table
from composer3d.models.moe.shape import ExpertsShape, MoeShape
from composer3d.models.table import Constant, Normal, ParameterTable, Row


def table(shape: MoeShape) -> ParameterTable:
    """Return the parameters of a Llama with experts of this shape.

    A block without experts is one of Llama. A block with experts has a router, experts and perhaps
    a shared expert in place of the feed-forward layer.
    """
    dense = llama_table(shape)
    names = _QWEN_3 if shape.qk_norm else _MIXTRAL
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
        shared: the shared expert; "": the family has neither one nor a bias of the router.
    """

    def __init__(self, block: str, *, w1: str, w2: str, w3: str, shared: str = "") -> None:
        hf = f"model.layers.#.{block}"
        projections = {"w1": w1, "w2": w2, "w3": w3}
        self.router = f"{hf}.gate.weight"
        self.bias = f"{hf}.gate.e_score_correction_bias" if shared else ""
        self.experts = {
            name: f"{hf}.experts.@.{in_files}.weight" for name, in_files in projections.items()
        }
        self.shared = {
            name: f"{hf}.{shared}.{in_files}.weight" if shared else ""
            for name, in_files in projections.items()
        }


_MIXTRAL = HuggingFaceNames("block_sparse_moe", w1="w1", w2="w2", w3="w3")
_QWEN_3 = HuggingFaceNames("mlp", w1="gate_proj", w2="down_proj", w3="up_proj")


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
        rows += [
            row._replace(float8=True, hf=hf.shared[row.module.rpartition(".")[2]])
            for row in shared
        ]
    return rows
