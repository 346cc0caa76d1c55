"""The sharding plan of an OLMo 2, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.llama.plan import plan_of
from composer3d.models.olmo2.shape import Olmo2Shape
from composer3d.models.olmo2.table import table


def sharding_plan(shape: Olmo2Shape) -> ShardingPlan:
    """Return the sharding plan of an OLMo 2 with this shape."""
    return plan_of(table(shape), shape)
