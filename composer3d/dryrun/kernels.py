"""Kernels that a GPU has and a CPU has not, as far as their memory differs.

A dry run calls the operators of a CPU. There, torch computes RMSNorm step by step and keeps two
copies of the input in float32 for backward. On a GPU it is one kernel, which keeps the input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

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


# Two operators that only say what they would make. As operators, they count as two launches, and
# what a dry run follows of its tensors goes from their inputs to their outputs. Their namespace is
# not composer3d: selective activation checkpointing keeps the results of all operators there.
_FORWARD, _BACKWARD = "composer3d_dryrun::norm", "composer3d_dryrun::norm_backward"
torch.library.define(_FORWARD, "(Tensor x, Tensor weight) -> (Tensor, Tensor)")
torch.library.define(
    _BACKWARD, "(Tensor grad, Tensor x, Tensor rstd, Tensor weight) -> (Tensor, Tensor)"
)


@torch.library.register_fake(_FORWARD)
def _describe_forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=wide)


@torch.library.register_fake(_BACKWARD)
def _describe_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), grad.new_empty(weight.shape)


class _FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel. It keeps its input, the weight, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        output, rstd = torch.ops.composer3d_dryrun.norm(x, weight)
        ctx.save_for_backward(x, weight, rstd)
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        of_x, of_weight = torch.ops.composer3d_dryrun.norm_backward(grad, x, rstd, weight)
        return of_x, of_weight
