"""The sharding plan of a GLM-4.5, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.glm.shape import GlmShape
from composer3d.models.glm.table import table
from composer3d.models.moe.plan import plan_with_experts


def sharding_plan(shape: GlmShape) -> ShardingPlan:
    """Return the sharding plan of a GLM-4.5 with this shape."""
    return plan_with_experts(table(shape), shape)
