"""Activation checkpointing: a block keeps its input, and backward computes the rest again.

Chen et al. 2016 (arXiv 1604.06174); selective: Korthikanti et al. 2022 (arXiv 2205.05198). Only the
non-reentrant form works with FSDP's hooks and pipeline schedules.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from composer3d.models.contract import ShardingPlan
from composer3d.recipe.schema import MemoryTable

# The reduce-scatter of a compiled graph with ``parallel.async_tp``.
FUSIBLE_SUM = "_c10d_functional.reduce_scatter_tensor.*"


def apply(
    blocks: Iterable[nn.Module],
    plan: ShardingPlan,
    memory: MemoryTable,
    *,
    async_tp: bool = False,
) -> None:
    """Checkpoint each of ``blocks``, in place. Parameters keep their names.

    "full" keeps only a block's input; "selective" also keeps the outputs of the operators in the
    plan's ``save``. The collectives inside a block run once more in backward, unless ``save``
    names them.

    With ``async_tp``, "selective" also keeps the results of reduce-scatters in compiled blocks.
    Without it, the plan's ``save`` would keep the product before a reduce-scatter: the fused
    operator does not return that product, so it would be computed twice.
    """
    if memory.activation_checkpoint == "none":
        return
    # "full" passes no ``context_fn``: torch.compile cannot trace a context that does nothing.
    options: dict[str, Any] = {}
    if memory.activation_checkpoint == "selective":
        policy = save_policy((*plan.save, FUSIBLE_SUM) if async_tp else plan.save)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    for block in blocks:
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # no block draws random numbers in forward
            **options,
        )


def save_policy(globs: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return a policy that saves the outputs of operators matching ``globs``, and no others."""

    @cache
    def is_saved(operator: Any) -> bool:
        return any(fnmatchcase(str(operator), glob) for glob in globs)

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if is_saved(operator):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy
