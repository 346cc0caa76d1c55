"""The sharding plan of a gpt-oss, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.gpt_oss.shape import GptOssShape
from composer3d.models.gpt_oss.table import table
from composer3d.models.moe.plan import plan_with_experts


def sharding_plan(shape: GptOssShape) -> ShardingPlan:
    """Return the sharding plan of a gpt-oss with this shape."""
    return plan_with_experts(table(shape), shape)
