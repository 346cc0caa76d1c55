"""Gemma 3 as recipes name it: ``[model] architecture = "gemma3"``."""

from composer3d.models.gemma3.shape import PRESETS, Gemma3Shape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=Gemma3Shape,
    presets=PRESETS,
    model="composer3d.models.gemma3.model:Gemma3",
    plan="composer3d.models.gemma3.plan:sharding_plan",
    table="composer3d.models.gemma3.table:table",
    huggingface="composer3d.models.gemma3.huggingface",
)
