"""Activation checkpointing: a block keeps its input, and backward computes the rest again.

Chen et al. 2016 (arXiv 1604.06174); selective: Korthikanti et al. 2022 (arXiv 2205.05198). Only the
non-reentrant form works with FSDP's hooks and pipeline schedules. The loss in parts is the same
idea for the logits.
"""

from collections.abc import Callable
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from composer3d.facts.errors import PlanError
from composer3d.models.contract import ShardingPlan
from composer3d.recipe.schema import MemoryTable

# The reduce-scatter of a compiled graph with ``parallel.async_tp``.
_FUSIBLE_SUM = "_c10d_functional.reduce_scatter_tensor.*"

# Whether the module that runs is one whose output backward does not read.
_is_unread = ContextVar("is_unread", default=False)


def apply(
    blocks: nn.ModuleDict,
    plan: ShardingPlan,
    memory: MemoryTable,
    *,
    stage: int = 0,
    async_tp: bool = False,
) -> None:
    """Checkpoint the blocks of one stage, in place. Parameters keep their names.

    "full" keeps only a block's input; "selective" also keeps the outputs of the operators in the
    plan's ``save``, but for those in its ``unread`` modules. "every N blocks" is "full" for the
    first of every N blocks. With "in the first M stages", no block of another stage is changed.
    The collectives inside a checkpointed block run once more in backward, unless ``save`` names
    them.

    With ``async_tp``, "selective" also keeps the results of reduce-scatters in compiled blocks.
    Without it, the plan's ``save`` would keep the product before a reduce-scatter: the fused
    operator does not return that product, so it would be computed twice.

    Args:
        blocks: all blocks of the stage, in order, by number.
        plan: the plan of the model.
        memory: the recipe's ``[memory]``.
        stage: the number of the stage in the pipeline.
        async_tp: the recipe's ``parallel.async_tp``.
    """
    checkpointing = memory.checkpointing
    # "full" passes no ``context_fn``: torch.compile cannot trace a context that does nothing.
    options: dict[str, Any] = {}
    if checkpointing.mode == "selective":
        policy = save_policy((*plan.save, _FUSIBLE_SUM) if async_tp else plan.save)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for place, (number, block) in enumerate(blocks.items()):
        mode = checkpointing.mode_of(place, stage)
        if mode == "none":
            continue
        if mode == "selective":
            for name, module in block.named_modules():
                if plan.is_unread(f"blocks.{number}.{name}"):
                    module.forward = _as_unread(module.forward)
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # no block draws random numbers in forward
            **options,
        )


def save_policy(globs: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return a policy that saves the outputs of operators matching ``globs``, and no others.

    It saves nothing in a module that backward does not read.
    """

    @cache
    def is_saved(operator: Any) -> bool:
        return any(fnmatchcase(str(operator), glob) for glob in globs)

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if is_saved(operator) and not _is_unread.get():
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _as_unread(module_forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a forward in which ``save_policy`` saves nothing."""

    def forward(*inputs: Any, **keywords: Any) -> Tensor:
        # A graph keeps only what its backward reads, and cannot hold a context variable.
        if torch.compiler.is_compiling():
            return module_forward(*inputs, **keywords)
        token = _is_unread.set(True)
        try:
            return module_forward(*inputs, **keywords)
        finally:
            _is_unread.reset(token)

    return forward


def set_loss_chunks(
    model: nn.Module, plan: ShardingPlan, chunks: int, *, keeps_gradients: bool
) -> None:
    """Make the heads of ``model`` compute the loss in ``chunks`` parts of a micro-batch's tokens.

    Only one part's logits are in memory at a time. The gradient of the head's weight is summed in
    float32 or wider, in memory that is allocated for it.

    Args:
        model: the whole model.
        plan: its plan.
        chunks: the number of parts.
        keeps_gradients: forward computes the gradients with the loss. Otherwise backward computes
            the logits again, with the collectives of ``vocab.cross_entropy``.

    Raises:
        PlanError: ``chunks`` is above 1, and the model has no head with the attribute ``chunks``.
    """
    if chunks == 1:
        return
    heads = [module for name, module in model.named_modules() if plan.style_of(name) == "head"]
    if not heads or not all(hasattr(head, "chunks") for head in heads):
        raise PlanError(
            f"memory.loss_chunks = {chunks}: {type(model).__name__} has no head with the attribute "
            "`chunks`; use memory.loss_chunks = 1"
        )
    for head in heads:
        head.chunks, head.keeps_gradients = chunks, keeps_gradients
