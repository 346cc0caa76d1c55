"""The plan of each architecture: one table."""

from composer3d.parallel.plan import Constant, Normal, Plan
from composer3d.shape import ModelShape


def llama_plan(shape: ModelShape) -> Plan:
    """Llama. Every block gathers its input twice and reduce-scatters its output twice under sequence parallelism.

    Korthikanti et al. 2022 (arXiv 2205.05198). Projections into the residual stream start smaller with depth, as in
    GPT-2.
    """
    return Plan(
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
        init={
            "*norm.weight": Constant(1.0),
            **({"*.bias": Constant(0.0)} if shape.qkv_bias else {}),
            "blocks.*.w[o2].weight": Normal(0.02 / (2 * shape.n_layers) ** 0.5),
            "*.weight": Normal(0.02),
        },
        kv_heads=shape.n_kv_heads,
        attend="blocks.*.attn",
        # Products of matrices and attention cost; norms, rotations and the gate of the ffn are cheap to compute again.
        save=("aten.mm.*", "aten.addmm.*", "aten._scaled_dot_product_*", "composer3d.*"),
    )
