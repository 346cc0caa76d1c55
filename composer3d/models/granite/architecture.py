"""Granite 3 as recipes name it: ``[model] architecture = "granite"``."""

from composer3d.models.granite.shape import PRESETS, GraniteShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=GraniteShape,
    presets=PRESETS,
    model="composer3d.models.granite.model:Granite",
    plan="composer3d.models.granite.plan:sharding_plan",
    table="composer3d.models.granite.table:table",
    huggingface="composer3d.models.granite.huggingface",
)
