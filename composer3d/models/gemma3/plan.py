"""The sharding plan of a Gemma 3, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.gemma3.shape import Gemma3Shape
from composer3d.models.gemma3.table import table
from composer3d.models.llama.plan import plan_of


def sharding_plan(shape: Gemma3Shape) -> ShardingPlan:
    """Return the sharding plan of a Gemma 3 with this shape."""
    return plan_of(table(shape), shape)
