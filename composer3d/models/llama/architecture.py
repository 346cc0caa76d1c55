"""The Llama architecture as recipes name it: ``[model] architecture = "llama"``, the default."""

from composer3d.models.llama.shape import PRESETS, ModelShape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=ModelShape,
    presets=PRESETS,
    model="composer3d.models.llama.model:Llama",
    plan="composer3d.models.llama.plan:sharding_plan",
    parameters="composer3d.models.llama.counts:parameters",
    flops_per_token="composer3d.models.llama.counts:flops_per_token",
    huggingface="composer3d.models.llama.huggingface",
    names="composer3d.models.llama.names",
)
