"""AdamW, its parameter groups and its learning rate.

Nothing here depends on the rank: DTensors are used like tensors.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer3d.recipe.schema import OptimTable
from composer3d.runtime.torch_private import AdamWOfShards


def learning_rate(step: int, table: OptimTable, total_steps: int) -> float:
    """Compute the learning rate of a step.

    It is a pure function of the step, so a resumed run needs no scheduler state.

    The rate rises linearly during the warmup and reaches ``lr`` in its last step. After that:

    - "constant" stays at ``lr``.
    - "cosine" and "linear" decay from the step after the warmup.
    - "wsd" (warmup, stable, decay: Hu et al. 2024, "MiniCPM") stays at ``lr``, and decays linearly
      over ``decay_steps`` steps, of which step ``decay`` is the last. By default they are a tenth
      of ``decay``. The decay never starts before the warmup has ended.

    A decay reaches ``min_lr`` in step ``decay``, counted from 1 (default: ``total_steps``), and
    stays there.

    Args:
        step: the number of the step, counted from 0.
        table: the recipe's ``[optim]``.
        total_steps: ``run.steps``.
    """
    if step < table.warmup:
        return table.lr * (step + 1) / table.warmup

    start = table.warmup
    end = total_steps if table.decay is None else table.decay
    if table.schedule == "wsd":
        decay_steps = table.decay_steps or max(1, end // 10)
        start = max(start, end - decay_steps)
    if table.schedule == "constant" or step < start:
        return table.lr

    progress = min(1.0, (step + 1 - start) / max(1, end - start))
    if table.schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - progress
    return table.min_lr + (table.lr - table.min_lr) * remaining


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], table: OptimTable
) -> torch.optim.AdamW:
    """Build AdamW over the parameters of this rank.

    Parameters with two dims or more have weight decay. Vectors, such as norm weights and biases,
    have none: there is one group of each. Parameters that do not require a gradient are left out.

    Args:
        named_parameters: from ``Stages.named_parameters``.
        table: the recipe's ``[optim]``.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = ((matrices, table.weight_decay), (vectors, 0.0))
    param_groups = [
        {"params": parameters, "weight_decay": weight_decay}
        for parameters, weight_decay in groups
        if parameters
    ]
    return AdamWOfShards(param_groups, lr=table.lr, betas=table.betas, eps=table.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def apply_gradients(optimizer: torch.optim.AdamW, *, divisor: Tensor, is_good: Tensor) -> None:
    """Divide all gradients by ``divisor`` and update the weights; nothing if not ``is_good``.

    The kernel of fused AdamW reads both scalars on the device and divides ``.grad`` in place.
    In host memory (``memory.cpu_offload``) the update has to wait for them.

    Args:
        optimizer: from ``build_optimizer``.
        divisor: float64 scalar of at least 1.
        is_good: bool scalar.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    divisor, is_good = divisor.to(device), is_good.to(device)
    if parameters[0].dtype == torch.float64:
        # The kernel takes the divisor in float32, which is not exact enough for gradients in
        # float64.
        torch._foreach_div_([_local(p.grad) for p in parameters if p.grad is not None], divisor)
        divisor = torch.ones_like(divisor)
    # These attributes are how torch.amp.GradScaler passes them.
    scaled: Any = optimizer
    scaled.grad_scale = divisor.to(torch.float32)
    scaled.found_inf = (~is_good).to(torch.float32)
    optimizer.step()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
