"""Kernels that a GPU has and a CPU has not, as far as their memory differs.

A dry run calls the operators of a CPU. There, torch computes RMSNorm step by step and keeps two
copies of the input in float32 for backward. On a GPU it is one kernel, which keeps the input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_Norm = Callable[..., Tensor]


@contextmanager
def norms_of_a_gpu() -> Iterator[None]:
    """Within the context, ``rms_norm`` allocates and keeps what ``aten::_fused_rms_norm`` does.

    Only for tensors without data: the values are undefined.
    """
    functional: Any = F
    step_by_step: _Norm = functional.rms_norm
    functional.rms_norm = partial(_rms_norm, step_by_step)
    try:
        yield
    finally:
        functional.rms_norm = step_by_step


def _rms_norm(
    step_by_step: _Norm,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Call the kernel where torch would: the input and the weight have one dtype."""
    if weight is None or weight.dtype != x.dtype or len(normalized_shape) != 1:
        return step_by_step(x, normalized_shape, weight, eps)
    return _FusedNorm.apply(x, weight)


class _FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel. It keeps its input, the weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        _, weight, _ = ctx.saved_tensors
        # Both are made of the gradient, so that they vary between ranks as it does.
        return torch.empty_like(grad), grad.new_empty(weight.shape)
