"""The sharding plan of a Llama with experts: that of Llama, and the modules of experts."""

from dataclasses import replace

from composer3d.models.contract import Constant, Normal, ShardingPlan, Style
from composer3d.models.llama.plan import sharding_plan as llama_plan
from composer3d.models.moe.shape import MoeShape


def sharding_plan(shape: MoeShape) -> ShardingPlan:
    """The plan of a Llama with experts of this shape.

    A glob that matches nothing is an error, so the modules of dense layers are named only if there
    is one. Like projections into the residual stream, the down projections of experts start
    smaller in deeper models.
    """
    plan = llama_plan(shape)
    tensor: dict[str, Style] = dict(plan.tensor)
    init: dict[str, Normal | Constant] = {}
    if shape.moe_layers == shape.n_layers:
        for glob in [
            glob for glob in tensor if glob.startswith("blocks.*.ffn") and "norm" not in glob
        ]:
            del tensor[glob]
    experts = None
    unread = () if shape.moe_layers == shape.n_layers else plan.unread
    if shape.moe_layers:
        experts = "blocks.*.moe.experts"
        tensor["blocks.*.moe.router"] = "router"
        if shape.shared_ffn:
            tensor["blocks.*.moe.shared"] = "gather"
            tensor["blocks.*.moe.shared.w[13]"] = "column"
            tensor["blocks.*.moe.shared.w2"] = "row"
            unread += ("blocks.*.moe.shared.w2",)
        if shape.router_bias:
            init["blocks.*.router.bias"] = Constant(0.0)
        init["blocks.*.experts.w2"] = Normal(0.02 / (2 * shape.n_layers) ** 0.5)
        init["blocks.*.experts.w[13]"] = Normal(0.02)
    return replace(
        plan,
        tensor=tensor,
        init={**init, **plan.init},
        experts=experts,
        save=(*plan.save, "aten._grouped_mm.*"),  # the products of experts
        unread=unread,
        float8=(),  # recipes refuse float8 with experts
    )
