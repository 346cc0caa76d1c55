"""The Llama architecture as recipes name it: ``[model] architecture = "llama"``, the default."""

from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=ModelShape,
    presets=PRESETS,
    model="composer3d.models.llama.model:Llama",
    plan="composer3d.models.llama.plan:sharding_plan",
    table="composer3d.models.llama.table:table",
    huggingface="composer3d.models.llama.huggingface",
)
