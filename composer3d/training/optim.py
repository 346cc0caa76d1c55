"""AdamW, its parameter groups and its learning rate. Nothing here needs a rank: a DTensor is treated like a tensor."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable


def learning_rate(step: int, table: OptimTable, total_steps: int) -> float:
    """The learning rate of ``step``, counted from 0: a pure function, so that a resumed run needs no scheduler state.

    Linear warmup that reaches ``lr`` in its last step, then ``lr`` for good (constant), or a decay that reaches
    ``min_lr`` in the step that is number ``decay`` (``total_steps`` where it is absent) counted from 1, and stays
    there: cosine and linear from the step after the warmup on; wsd (warmup, stable, decay: Hu et al. 2024, "MiniCPM")
    holds ``lr`` and falls linearly over the last ``decay_steps`` steps (where absent, a tenth of ``decay``, as far as
    the warmup leaves room).
    """
    if step < table.warmup:
        return table.lr * (step + 1) / table.warmup
    start, end = table.warmup, total_steps if table.decay is None else table.decay
    if table.schedule == "wsd":
        start = max(start, end - (table.decay_steps or max(1, end // 10)))
    if table.schedule == "constant" or step < start:
        return table.lr
    progress = min(1.0, (step + 1 - start) / max(1, end - start))
    left = (
        0.5 * (1.0 + math.cos(math.pi * progress)) if table.schedule == "cosine" else 1.0 - progress
    )
    return table.min_lr + (table.lr - table.min_lr) * left


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], table: OptimTable
) -> torch.optim.AdamW:
    """AdamW over the parameters of this rank: matrices are decayed, vectors (norms) are not.

    A DTensor counts its global dimensions. There is one group with decay and one without, and as many again for each
    further mesh that holds parameters: the fused kernel takes no mixture of tensors and DTensors.

    Raises ValueError where there is no parameter.
    """
    groups: dict[tuple[float, object], list[nn.Parameter]] = {}
    for _, parameter in named:
        if not parameter.requires_grad:
            continue
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((table.weight_decay if parameter.ndim >= 2 else 0.0, mesh), []).append(
            parameter
        )
    rows = [
        {"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()
    ]
    return torch.optim.AdamW(rows, lr=table.lr, betas=table.betas, eps=table.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
