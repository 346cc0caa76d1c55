"""GLM-4.5 as recipes name it: ``[model] architecture = "glm"``."""

from composer3d.models.glm.shape import PRESETS, GlmShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=GlmShape,
    presets=PRESETS,
    model="composer3d.models.glm.model:Glm",
    plan="composer3d.models.glm.plan:sharding_plan",
    table="composer3d.models.glm.table:table",
    huggingface="composer3d.models.glm.huggingface",
    names="composer3d.models.glm.names",
)
