"""Activation checkpointing: blocks keep their input and compute the rest again in backward.

Chen et al. 2016 (arXiv 1604.06174); selective: Korthikanti et al. 2022 (arXiv 2205.05198). Only the non-reentrant form
is legal with FSDP hooks and pipeline schedules.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from composer3d.parallel.plan import Plan
from composer3d.recipe.schema import MemoryTable


def apply(blocks: Iterable[nn.Module], plan: Plan, memory: MemoryTable) -> None:
    """Checkpoint each of ``blocks``, in place; parameters keep their names.

    "full" keeps a block's input alone; "selective" also keeps the outputs of the operators that the plan's ``save``
    names. Collectives inside a block run once more in backward, on all ranks alike, unless ``save`` names them.
    """
    if memory.activation_checkpoint == "none":
        return
    more: dict[str, Any] = {}
    if memory.activation_checkpoint == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, saving(plan.save))
    for block in blocks:
        # preserve_rng_state: a Llama draws no random numbers in forward.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)


def saving(globs: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """The policy that keeps what the operators named by ``globs`` return, and computes everything else again."""

    @cache
    def is_saved(operator: Any) -> bool:
        return any(fnmatchcase(str(operator), glob) for glob in globs)

    def policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_saved(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
