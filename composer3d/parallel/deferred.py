"""Weight gradients put off: a backward that gives the gradients of inputs now, and those of weights when asked.

Qi et al. 2023 (zero bubble, arXiv 2401.10241). Only the gradients of inputs hold up the stage before; a schedule runs
the rest where a rank would wait. torch splits the backward of a whole stage for that, behind the back of FSDP's hooks,
and whole gradients are lost. Here the backward of a stage is an ordinary one, in which the linear layers of its blocks
leave their weights' part undone, and no graph outlives it. Norms, embedding and head keep their ordinary backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.parallel import fsdp

Work = Callable[[], None]


class PutOffLinear(nn.Linear):
    """A linear layer whose backward appends the gradient of its weight and bias to ``later``, as work to be done."""

    later: list[Work]

    def forward(self, input: Tensor) -> Tensor:
        return _PutOff.apply(input, self.weight, self.bias, self.later)


class _PutOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: list[Work]) -> Tensor:
        ctx.save_for_backward(x)
        # By reference: under checkpointing ``saved_tensors`` gives a copy, and a gradient given to a copy is lost.
        ctx.weight, ctx.bias, ctx.later = weight, bias, later
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,) = ctx.saved_tensors, grads
        weight, bias = ctx.weight, ctx.bias

        def finish() -> None:
            rows = grad.flatten(0, -2)
            parts = [rows.T @ x.flatten(0, -2), *([] if bias is None else [rows.sum(0)])]
            # Through what lies between a parameter and the weight as it was used: the local part of a DTensor, a slice.
            torch.autograd.backward([weight, *([] if bias is None else [bias])], parts)

        ctx.later.append(finish)
        ctx.weight = ctx.bias = None
        return grad @ weight, None, None, None


def put_off(stage: nn.Module, blocks: nn.Module) -> Callable[[], Work]:
    """Make the linear layers of ``blocks`` put off their weights' gradients. In place, before anything wraps a module.

    Returns:
        The ``dw_builder`` of the stage: called after the backward of a micro-batch, it returns what is left of it to
        be done. Between the two, inputs and output gradients of the linear layers stay in memory.
    """
    later: list[Work] = []
    for module in blocks.modules():
        if type(module) is nn.Linear:
            module.__class__ = PutOffLinear
            module.later = later  # type: ignore[assignment]

    def builder() -> Work:
        works = tuple(later)
        later.clear()

        def finish() -> None:
            for work in works:
                work()
            fsdp.widen(stage)

        return finish

    return builder
