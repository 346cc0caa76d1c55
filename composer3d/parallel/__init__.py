"""Parallelism: what a model may be cut into (``plan``), each technique, and the one place that composes them."""

from composer3d.parallel.compose import StepShape, compose
from composer3d.parallel.plan import Plan
from composer3d.parallel.stages import Stages

__all__ = ["Plan", "Stages", "StepShape", "compose"]
