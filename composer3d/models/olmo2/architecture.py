"""OLMo 2 and 3 as recipes name them: ``[model] architecture = "olmo2"``."""

from composer3d.models.olmo2.shape import PRESETS, Olmo2Shape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=Olmo2Shape,
    presets=PRESETS,
    model="composer3d.models.olmo2.model:Olmo2",
    plan="composer3d.models.olmo2.plan:sharding_plan",
    table="composer3d.models.olmo2.table:table",
    huggingface="composer3d.models.olmo2.huggingface",
)
