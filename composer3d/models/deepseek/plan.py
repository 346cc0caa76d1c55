"""The sharding plan of a DeepSeek-V2 or V3, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.deepseek.shape import DeepseekShape
from composer3d.models.deepseek.table import table
from composer3d.models.moe.plan import plan_with_experts


def sharding_plan(shape: DeepseekShape) -> ShardingPlan:
    """Return the sharding plan of a DeepSeek-V2 or V3 with this shape."""
    return plan_with_experts(table(shape), shape)
