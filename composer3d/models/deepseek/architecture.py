"""DeepSeek-V2 and V3 as recipes name them: ``[model] architecture = "deepseek"``."""

from composer3d.models.deepseek.shape import PRESETS, DeepseekShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=DeepseekShape,
    presets=PRESETS,
    model="composer3d.models.deepseek.model:Deepseek",
    plan="composer3d.models.deepseek.plan:sharding_plan",
    table="composer3d.models.deepseek.table:table",
    huggingface="composer3d.models.deepseek.huggingface",
    names="composer3d.models.deepseek.names",
)
