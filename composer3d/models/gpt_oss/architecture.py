"""gpt-oss as recipes name it: ``[model] architecture = "gpt_oss"``."""

from composer3d.models.gpt_oss.shape import PRESETS, GptOssShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=GptOssShape,
    presets=PRESETS,
    model="composer3d.models.gpt_oss.model:GptOss",
    plan="composer3d.models.gpt_oss.plan:sharding_plan",
    table="composer3d.models.gpt_oss.table:table",
    huggingface="composer3d.models.gpt_oss.huggingface",
    names="composer3d.models.gpt_oss.names",
)
