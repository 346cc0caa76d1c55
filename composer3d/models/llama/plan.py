"""The sharding plan of a Llama, which follows from the table of its parameters."""

from composer3d.models.contract import ShardingPlan
from composer3d.models.llama.shape import ModelShape, RotaryShape
from composer3d.models.llama.table import table
from composer3d.models.table import ParameterTable


def sharding_plan(shape: ModelShape) -> ShardingPlan:
    """Return the sharding plan of a Llama with this shape."""
    return plan_of(table(shape), shape)


def plan_of(table: ParameterTable, shape: RotaryShape) -> ShardingPlan:
    """Return the sharding plan of a model with the blocks of a Llama, or similar ones.

    Under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198), every block gathers its
    input twice and reduce-scatters its output twice.
    """
    return ShardingPlan(
        **table.globs()._asdict(),
        kv_heads=shape.n_kv_heads,
        first_only_looks_up=table.first_only_looks_up,
        # Matrix products and attention are expensive. Norms, rotations and the gate are cheap to
        # compute again.
        save=(
            "aten.mm.*",
            "aten.addmm.*",
            "aten._scaled_mm_v2.*",
            "aten._scaled_dot_product_*",
            "composer3d.*",
        ),
    )
