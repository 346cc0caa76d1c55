"""One optimizer step (gradients, clipping and the update), and validation."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.data import Batch, BatchesAhead, Corpus
from composer3d.data.order import Order
from composer3d.parallel import Stages, grad_norm
from composer3d.recipe.schema import Recipe
from composer3d.reliability.bad_steps import NO_LIMITS, Limits
from composer3d.spec.errors import DataError
from composer3d.training.batches import make_loader, move_to_device
from composer3d.training.optimizers import Optimizer


class StepValues(NamedTuple):
    """What the host learns of a step, the same on all ranks.

    Attributes:
        loss: of the job, the mean over all valid tokens, in nats.
        norm: the norm of all gradients. It is NaN if a gradient is.
        flags: for each flag, the number of ranks that have raised it.
        norm_by_part: the norm of each part of the model (``grad_norm.PARTS``); empty if the step
            was not asked for it. A part that the model lacks has none.
    """

    loss: float
    norm: float
    flags: list[float]
    norm_by_part: Mapping[str, float] = MappingProxyType({})


class StepSums:
    """What all ranks have summed up after backward, on the device, where nothing waits for it.

    Args:
        sums: float64 (2 + flags + parts) on the mesh's device: the loss, the squared norm, the
            flags, and the squared norm of each part.
        n_parts: the number of parts: that of ``grad_norm.PARTS``, or 0.

    Attributes:
        loss, norm: the scalars of ``StepValues``, on the device.
    """

    def __init__(self, sums: Tensor, n_parts: int = 0) -> None:
        self._n_parts = n_parts
        self.loss, self.norm = sums[0], sums[1].sqrt()
        self._values = torch.cat((self.loss[None], self.norm[None], sums[2:]))
        self._host_values: Tensor | None = None
        self._has_arrived: torch.Event | None = None

    def send_to_host(self) -> None:
        """Copy the values to the host, behind what the device has to do up to here.

        ``await_values`` then waits for that alone, and not for what the device is given later.
        """
        if self._values.device.type == "cpu":
            return
        # torch copies to pinned memory, so the host goes on at once.
        self._host_values = self._values.to("cpu", non_blocking=True)
        self._has_arrived = torch.Event(self._values.device)
        self._has_arrived.record()

    def await_values(self) -> StepValues:
        """Wait until the device has summed up the step, and return the values."""
        if self._host_values is None or self._has_arrived is None:
            values = self._values
        else:
            self._has_arrived.synchronize()
            values = self._host_values
        loss, norm, *others = values.tolist()
        n_flags = len(others) - self._n_parts
        norms_sq = zip(grad_norm.PARTS, others[n_flags:], strict=False)
        # A part that the model lacks has no gradient on any rank, so its sum is exactly 0.
        by_part = {part: math.sqrt(value) for part, value in norms_sq if value != 0}
        return StepValues(loss, norm, others[:n_flags], by_part)


def compute_gradients(
    stages: Stages,
    batch: Batch,
    flags: Callable[[], Sequence[float]] = tuple,
    by_part: bool = False,
) -> StepSums:
    """Compute the gradients of one step and leave them in ``.grad``. The host does not wait.

    Args:
        stages: this rank's stages.
        batch: this rank's part of the global batch.
        flags: returns numbers of this rank that travel with the loss, as many on every rank. It is
            called after backward has been launched.
        by_part: whether to compute the norm of each part of the model as well, the same on every
            rank. It travels with the loss.

    Returns:
        The loss, the norm of all gradients, and the flags, summed over all ranks.

    Collectives: those of ``Stages.forward_backward``, and two all-reduces of scalars over all
    ranks.
    """
    mesh = stages.mesh
    tokens_BT, labels_BT, positions_BT, documents_BT, local_valid = move_to_device(stages, batch)
    (valid_tokens,) = mesh.start_sum_over_world(local_valid)
    local_loss = stages.forward_backward(
        tokens_BT, labels_BT, positions_BT, valid_tokens.clamp(min=1.0), documents_BT
    )
    norm_sq = grad_norm.local_grad_norm_sq(stages.parameters(), mesh)
    # The message has the same length in every step: the order in which a ring adds a number up
    # depends on its place, and what is logged must not change a bit of the training.
    parts: Sequence[Tensor]
    if by_part:
        parts = grad_norm.local_grad_norm_sq_by_part(stages.named_parameters(), mesh)
    else:
        n_parts = len(grad_norm.PARTS)
        parts = torch.zeros(n_parts, dtype=torch.float64, device=mesh.device).unbind()
    sums = mesh.start_sum_over_world(local_loss, norm_sq, *flags(), *parts)
    return StepSums(sums, len(parts))


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
    once: when the update has been launched, for the sums. ``Limits.problem`` decides the same from
    the values that are returned.

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


def validate(
    recipe: Recipe,
    stages: Stages,
    held_out: Corpus,
    *,
    order: Order = "feistel",
    must_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Compute the mean loss over the valid tokens of ``validation.steps`` global batches.

    The batches are drawn from the whole held-out text. They are the same in every validation of
    every run with the same ``order``, that of the training's loader, whatever ``data.seed`` is.

    Args:
        recipe: the recipe.
        stages: this rank's stages.
        held_out: the text to validate on.
        order: the order of samples.
        must_stop: is called before each batch, and returns the same on all ranks: whether the
            validation is cut off.

    Returns:
        Nats per valid token, the same on all ranks; None if the validation was cut off.

    Raises:
        DataError: no token is valid.

    Collectives: those of ``Stages.evaluate`` for each batch, and one all-reduce over all ranks.
    """
    loader = make_loader(recipe, stages.mesh, held_out, seed=0, order=order)
    batches = BatchesAhead(loader, stages.mesh.device)
    losses, valid_tokens = [], []
    for _ in range(recipe.validation.steps):
        if must_stop():
            batches.close()
            return None
        local_loss, local_valid = evaluate_batch(stages, next(batches))
        losses.append(local_loss)
        valid_tokens.append(local_valid)
    batches.close()
    loss, tokens = stages.mesh.sum_over_world(sum(losses), sum(valid_tokens))
    if tokens == 0:
        raise DataError(
            f"validation.steps = {recipe.validation.steps}: no token of these batches of "
            f"{held_out.name} is learned; use more steps, or other text"
        )
    return loss / tokens


def evaluate_batch(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute this rank's shares of a batch's summed loss and of its number of valid tokens.

    Returns:
        Two scalars on the mesh's device: the loss in float64, and the number in int64.

    Collectives: those of ``Stages.evaluate``. ``Mesh.sum_over_world`` adds up the shares.
    """
    tokens_BT, labels_BT, positions_BT, documents_BT, local_valid = move_to_device(stages, batch)
    return stages.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT), local_valid
