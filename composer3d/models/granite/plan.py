"""The sharding plan of a Granite 3, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.granite.shape import GraniteShape
from composer3d.models.granite.table import table
from composer3d.models.llama.plan import plan_of


def sharding_plan(shape: GraniteShape) -> ShardingPlan:
    """Return the sharding plan of a Granite 3 with this shape."""
    return plan_of(table(shape), shape)
