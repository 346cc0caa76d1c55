"""What the faults of clipping share: another function clips the gradients of a step."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from composer3d.training import step as train_step
from tools.prove.faults.plant import instead_of


def change_clipping(clip: Callable[..., None]) -> None:
    """Let ``clip`` scale the gradients of each step, and not the optimizer.

    It gets what ``scale_gradients`` gets; ``norm`` is that of the whole job.
    """

    @instead_of(train_step, train_step.update)
    def wrong(
        right: Any, own: Any, optimizer: Any, sums: Any, *, max_norm: float, **others: Any
    ) -> Any:
        clip(list(own.parameters()), norm=sums.norm.item(), max_norm=max_norm)
        return right(own, optimizer, sums, max_norm=0.0, **others)


def scale_gradients(parameters: Iterable[nn.Parameter], /, *, norm: float, max_norm: float) -> None:
    """Clip as it is right: scale the gradients so that their norm is at most ``max_norm``."""
    if not norm > max_norm > 0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(max_norm / norm)
