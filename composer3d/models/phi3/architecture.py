"""Phi-3 and Phi-4 as recipes name them: ``[model] architecture = "phi3"``."""

from composer3d.models.phi3.shape import PRESETS, Phi3Shape
from composer3d.models.registry import Architecture

ARCHITECTURE = Architecture(
    shape=Phi3Shape,
    presets=PRESETS,
    model="composer3d.models.llama.model:Llama",
    plan="composer3d.models.llama.plan:sharding_plan",
    table="composer3d.models.phi3.table:table",
    huggingface="composer3d.models.phi3.huggingface",
)
