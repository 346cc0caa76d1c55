"""Parallelism. ``compose`` puts the techniques together; each has a folder or a file here."""

from composer3d.models.contract import ShardingPlan
from composer3d.parallel.compose import compose
from composer3d.parallel.executor import StepShape
from composer3d.parallel.generation import compose_for_generation
from composer3d.parallel.stages import Stages

__all__ = ["ShardingPlan", "Stages", "StepShape", "compose", "compose_for_generation"]
