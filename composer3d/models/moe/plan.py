"""The sharding plan of a Llama with experts, which follows from the table of its parameters."""

from dataclasses import replace

from composer3d.models.contract import ShardingPlan
from composer3d.models.llama.plan import plan_of
from composer3d.models.moe.shape import MoeShape, RoutedShape
from composer3d.models.moe.table import table
from composer3d.models.table import ParameterTable


def sharding_plan(shape: MoeShape) -> ShardingPlan:
    """Return the plan of a Llama with experts of this shape."""
    return plan_with_experts(table(shape), shape)


def plan_with_experts(table: ParameterTable, shape: RoutedShape) -> ShardingPlan:
    """Return the plan of a model with experts, of the parameters ``table``."""
    plan = plan_of(table, shape)
    products_of_experts = ("aten._grouped_mm.*", "aten._scaled_grouped_mm_v2.*")
    return replace(plan, save=(*plan.save, *products_of_experts))
