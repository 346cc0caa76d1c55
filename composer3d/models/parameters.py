"""The shape of every parameter of a model, and how tensor parallelism cuts it. No torch here.

``models.*.counts`` has the sums; tests compare both, and these shapes with those of the real
models.
"""

from functools import cache
from math import prod
from typing import Literal, NamedTuple

from composer3d.models.llama.shape import ModelShape
from composer3d.models.moe.shape import MoeShape
from composer3d.models.shape import DecoderShape
from composer3d.spec.errors import PlanError

# How tp cuts a parameter, as the style in the sharding plan says: by rows, by columns, not at all
# (every rank has the whole gradient), not at all (each rank has a part of the gradient's sum), or
# as experts, which tp never cuts.
Cut = Literal["rows", "columns", "whole", "whole_partial", "experts"]


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        name: within its unit: "attn.wq.weight" in a block.
        shape: of the whole parameter.
        cut: what tensor parallelism does with it.
        trains: whether it can have a gradient; the bias of a router cannot.
        is_frozen: whether ``optim.train`` leaves it out, so that it has no gradient.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut
    trains: bool = True
    is_frozen: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.shape)


def known_shape(shape: DecoderShape) -> ModelShape:
    """Return the shape of a model whose parameters are known here: a Llama, with experts or not.

    Raises:
        PlanError: the architecture is a user's own.
    """
    if not isinstance(shape, ModelShape):
        raise PlanError(
            f"{type(shape).__name__} is not an architecture of composer3d: the shapes of its "
            "parameters are unknown here; `composer3d dryrun` counts what its model does"
        )
    return shape


def first_parameters(shape: ModelShape) -> list[Parameter]:
    """Return the parameters before the blocks: the embedding."""
    return [Parameter("embed.weight", (shape.vocab, shape.dim), "rows")]


def last_parameters(shape: ModelShape, *, sequence_parallel: bool) -> list[Parameter]:
    """Return the parameters after the blocks: norm and head. A tied head is listed as well."""
    return [
        Parameter("norm.weight", (shape.dim,), _norm_cut(sequence_parallel)),
        Parameter("head.weight", (shape.vocab, shape.dim), "rows"),
    ]


def block_parameters(
    shape: ModelShape, layer: int, *, tp: int, sequence_parallel: bool
) -> list[Parameter]:
    """Return the parameters of block ``layer``, counted from 0.

    With fewer key-value heads than tp ranks, every rank holds all key-value heads.
    """
    dim, width, norm = shape.dim, shape.head_width, _norm_cut(sequence_parallel)
    kv_cut: Cut = "rows" if shape.n_kv_heads % tp == 0 else "whole_partial"
    found = [Parameter("attn_norm.weight", (dim,), norm)]
    projections: tuple[tuple[str, int, Cut], ...] = (
        ("wq", shape.n_heads, "rows"),
        ("wk", shape.n_kv_heads, kv_cut),
        ("wv", shape.n_kv_heads, kv_cut),
    )
    for name, heads, cut in projections:
        found.append(Parameter(f"attn.{name}.weight", (heads * width, dim), cut))
        if shape.qkv_bias:
            found.append(Parameter(f"attn.{name}.bias", (heads * width,), cut))
    found.append(Parameter("attn.wo.weight", (dim, shape.n_heads * width), "columns"))
    if shape.qk_norm:
        found += [
            Parameter(f"attn.{name}.weight", (width,), "whole_partial")
            for name in ("q_norm", "k_norm")
        ]
    found.append(Parameter("ffn_norm.weight", (dim,), norm))
    if isinstance(shape, MoeShape) and shape.has_experts(layer):
        return found + _moe_parameters(shape)
    return found + _ffn_parameters("ffn", dim, shape.ffn)


@cache
def trainable_names(shape: ModelShape) -> tuple[tuple[str, ...], ...]:
    """Return the global names of the parameters that can have a gradient, in the model's order.

    Returns:
        A tuple for the embedding, one for each block, and one for norm and head. A tied head is the
        embedding, under the embedding's name.
    """
    first = [f"first.{parameter.name}" for parameter in first_parameters(shape)]
    blocks = [
        [
            f"blocks.{layer}.{parameter.name}"
            for parameter in block_parameters(shape, layer, tp=1, sequence_parallel=False)
            if parameter.trains
        ]
        for layer in range(shape.n_layers)
    ]
    last = [
        f"last.{parameter.name}"
        for parameter in last_parameters(shape, sequence_parallel=False)
        if not (shape.tied and parameter.name == "head.weight")
    ]
    return tuple(map(tuple, (first, *blocks, last)))


def _norm_cut(sequence_parallel: bool) -> Cut:
    return "whole_partial" if sequence_parallel else "whole"


def _ffn_parameters(name: str, dim: int, ffn: int) -> list[Parameter]:
    return [
        Parameter(f"{name}.w1.weight", (ffn, dim), "rows"),
        Parameter(f"{name}.w2.weight", (dim, ffn), "columns"),
        Parameter(f"{name}.w3.weight", (ffn, dim), "rows"),
    ]


def _moe_parameters(shape: MoeShape) -> list[Parameter]:
    dim, experts, width = shape.dim, shape.experts, shape.expert_width
    found = [Parameter("moe.router.weight", (experts, dim), "whole_partial")]
    if shape.router_bias:
        found.append(Parameter("moe.router.bias", (experts,), "whole", trains=False))
    found += [
        Parameter("moe.experts.w1", (experts, width, dim), "experts"),
        Parameter("moe.experts.w2", (experts, dim, width), "experts"),
        Parameter("moe.experts.w3", (experts, width, dim), "experts"),
    ]
    if shape.shared_ffn:
        found += _ffn_parameters("moe.shared", dim, shape.shared_ffn)
    return found
