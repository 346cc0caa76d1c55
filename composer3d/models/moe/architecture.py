"""Llama with experts as recipes name it: ``[model] architecture = "moe"``."""

from composer3d.models.moe.shape import PRESETS, MoeShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=MoeShape,
    presets=PRESETS,
    model="composer3d.models.moe.model:MoeLlama",
    plan="composer3d.models.moe.plan:sharding_plan",
    table="composer3d.models.moe.table:table",
    huggingface="composer3d.models.moe.huggingface",
    names="composer3d.models.moe.names",
)
