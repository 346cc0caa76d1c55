"""A Llama of three blocks, composed on a mesh, and a step of it, for several tests."""

from typing import Any

import torch

from composer3d.models.llama.model import Llama
from composer3d.models.llama.plan import sharding_plan
from composer3d.models.llama.shape import ModelShape
from composer3d.parallel import ShardingPlan, Stages, StepShape, compose
from composer3d.recipe.schema import ParallelTable
from composer3d.runtime.mesh import Mesh

SHAPE = ModelShape(dim=16, n_layers=3, n_heads=4, n_kv_heads=2, ffn=24, vocab=32, rope_theta=100.0)
MICRO_BATCHES = 4


def compose_small(mesh: Mesh, *, plan: ShardingPlan | None = None, **tables: Any) -> Stages:
    """Compose the model on ``mesh``. ``tables`` are keyword arguments of ``compose``."""
    step = StepShape(micro_batch=1, micro_batches=MICRO_BATCHES, seq_len=8)
    tables.setdefault("parallel", ParallelTable())
    return compose(Llama(SHAPE), plan or sharding_plan(SHAPE), mesh, step=step, seed=0, **tables)


def take_a_step(stages: Stages) -> None:
    """Compute the gradients of one step, of the same rows on every rank."""
    tokens = torch.arange(8 * MICRO_BATCHES).view(MICRO_BATCHES, 8) % SHAPE.vocab
    stages.forward_backward(tokens, tokens, torch.arange(8).expand_as(tokens), torch.tensor(32.0))
