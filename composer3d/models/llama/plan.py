"""The sharding plan of a Llama: one table."""

from composer3d.models.contract import Constant, Normal, ShardingPlan
from composer3d.models.llama.shape import ModelShape


def sharding_plan(shape: ModelShape) -> ShardingPlan:
    """Return the sharding plan of a Llama with this shape.

    Under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198), every block gathers its
    input twice and reduce-scatters its output twice. As in GPT-2, the initial weights of the
    projections into the residual stream are smaller in deeper models.
    """
    init: dict[str, Normal | Constant] = {"*norm.weight": Constant(1.0)}
    if shape.qkv_bias:
        init["*.bias"] = Constant(0.0)
    init["blocks.*.w[o2].weight"] = Normal(0.02 / (2 * shape.n_layers) ** 0.5)
    init["*.weight"] = Normal(0.02)
    return ShardingPlan(
        tensor={
            "first.embed": "embedding",
            "blocks.*.attn_norm": "norm",
            "blocks.*.attn": "gather",
            "blocks.*.attn.wq": "column",
            "blocks.*.attn.w[kv]": "kv_column",
            "blocks.*.attn.[qk]_norm": "head_norm",
            "blocks.*.attn.wo": "row",
            "blocks.*.ffn_norm": "norm",
            "blocks.*.ffn": "gather",
            "blocks.*.ffn.w[13]": "column",
            "blocks.*.ffn.w2": "row",
            "last.norm": "norm",
            "last.head": "head",
        },
        init=init,
        kv_heads=shape.n_kv_heads,
        attend="blocks.*.attn",
        # Matrix products and attention are expensive. Norms, rotations and the gate are cheap to
        # compute again.
        save=(
            "aten.mm.*",
            "aten.addmm.*",
            "aten._scaled_mm_v2.*",
            "aten._scaled_dot_product_*",
            "composer3d.*",
        ),
        # The output of the last product is only added to the residual stream.
        unread=("blocks.*.ffn.w2",),
        float8=("blocks.*.attn.w[qkvo]", "blocks.*.ffn.w[123]"),
        first_only_looks_up=True,
    )
