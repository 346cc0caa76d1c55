"""One optimizer step: gradients, clipping and the update."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.data import Batch
from composer3d.facts.flags import StepFlags
from composer3d.parallel import Stages, grad_norm
from composer3d.recipe.schema import Recipe
from composer3d.reliability.bad_steps import NO_LIMITS, Limits
from composer3d.training.batches import move_to_device, require_step
from composer3d.training.optim import learning_rate
from composer3d.training.optimizers import Optimizer
from composer3d.training.step_values import StepSums, StepValues


def compute_gradients(
    stages: Stages,
    batch: Batch,
    own_flags: Callable[[], StepFlags] = StepFlags,
    *,
    by_part: bool = False,
) -> StepSums:
    """Compute the gradients of one step into ``.grad``, in place of those that were there.

    The host waits only with ``mesh.ep`` (for numbers of rows) and with ``memory.cpu_offload``.

    Args:
        stages: this rank's stages.
        batch: this rank's part of the global batch.
        own_flags: returns the flags of this rank, which travel with the loss. It is called after
            backward has been launched.
        by_part: whether to compute the norm of each part of the model as well, the same on every
            rank. It travels with the loss.

    Returns:
        The loss, the norm of all gradients, and the flags, summed over all ranks.

    Collectives: those of ``Stages.forward_backward``, and two all-reduces of scalars over all
    ranks.
    """
    mesh = stages.mesh
    require_step(stages, batch)
    inputs = move_to_device(stages, batch)
    valid_tokens = mesh.start_sum_over_world(*inputs.valid_tokens)
    tokens_BT, labels_BT, positions_BT, documents_BT, ahead_B2KT, _ = inputs
    # A step in which no label counts has the loss 0, not NaN.
    divisor = valid_tokens.clamp(min=1.0)
    loss, *mtp_losses = stages.forward_backward(
        tokens_BT, labels_BT, positions_BT, divisor, documents_BT, ahead_B2KT
    ).unbind()
    norm_sq = grad_norm.local_grad_norm_sq(stages.parameters(), mesh)
    # The order in which a ring adds a number up depends on its place and the message's length. So
    # the length is always the same: what is logged must change no bit of the training.
    parts: Sequence[Tensor]
    if by_part:
        parts = grad_norm.local_grad_norm_sq_by_part(stages.named_parameters(), mesh)
    else:
        n_parts = len(grad_norm.PARTS)
        parts = torch.zeros(n_parts, dtype=torch.float64, device=mesh.device).unbind()
    sums = mesh.start_sum_over_world(loss, norm_sq, *own_flags().pack(), *parts, *mtp_losses)
    return StepSums(sums)


class UpdateRule(NamedTuple):
    """How a step of a recipe changes the weights: arguments of ``update``."""

    max_norm: float
    lr: float
    limits: Limits


def update_rule(recipe: Recipe, step: int, limits: Limits = NO_LIMITS) -> UpdateRule:
    """Return the rule of ``step``, counted from 0. Training follows it, and so do proofs of it."""
    lr = learning_rate(step, recipe.optim, recipe.run.steps)
    return UpdateRule(recipe.optim.clip, lr, limits)


def update(
    stages: Stages,
    optimizer: Optimizer,
    sums: StepSums,
    *,
    max_norm: float,
    lr: float,
    limits: Limits = NO_LIMITS,
) -> StepValues:
    """Clip the gradients to ``max_norm`` and update the weights, unless the step is bad.

    If the loss or the norm is not finite, or above its limit, nothing changes: no weight, no state
    of the optimizer and no bias of a router. The device decides that itself, so the host waits only
    once: when the update has been launched, for the sums; with ``memory.cpu_offload``, before it.
    ``Limits.problem`` decides the same. Collectives: those of ``Optimizer.apply_gradients``.

    Args:
        stages: this rank's stages.
        optimizer: from ``build_optimizer``.
        sums: those of the gradients, the same on all ranks.
        max_norm: the largest norm; 0 means none.
        lr: the learning rate.
        limits: the largest loss and norm of a good step.

    Returns:
        The values of ``sums``.
    """
    sums.send_to_host()
    is_good = (sums.loss + sums.norm).isfinite()
    if limits.are_finite:
        is_good = is_good & (sums.loss <= limits.loss) & (sums.norm <= limits.norm)
    divisor = grad_norm.clip_divisor(sums.norm, max_norm)
    optimizer.set_lr(lr)
    optimizer.apply_gradients(divisor=divisor, is_good=is_good)
    stages.move_router_biases(is_good)
    return sums.await_values()
