"""Faults in products in float8."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.layers import moe
from composer3d.parallel import float8
from tools.prove.faults.plant import instead_of


def scale_columns() -> None:
    """Each column of a matrix has its own scale: the largest number over all tokens."""

    def wrong(x_NK: Tensor) -> float8.Rounded:
        scale_1K = float8._scale_of(x_NK.abs().amax(0, keepdim=True))
        return float8.Rounded(float8._round(x_NK, scale_1K), scale_1K)

    float8.round_rows = wrong


def take_the_scales_of_the_first_rank() -> None:
    """Every rank scales its part of a matrix by the scales of rank 0's part."""

    @instead_of(float8, float8._scale_of)
    def wrong(right: Any, amax: Tensor) -> Tensor:
        scale = right(amax)
        dist.broadcast(scale, 0)
        return scale


def forget_a_scale() -> None:
    """The gradients of inputs keep the scale of the weight."""

    @instead_of(float8, float8.round_whole)
    def wrong(right: Any, x_NK: Tensor) -> float8.Rounded:
        values, scale = right(x_NK)
        return float8.Rounded(values, scale.new_ones(()))


def round_nothing_in_backward() -> None:
    """The gradients of inputs are products in the dtype of the operands."""
    float8.input_gradient = lambda grad_NM, weight_MK: grad_NM @ weight_MK


def round_the_weight_gradient() -> None:
    """The gradients of weights are products of numbers in float8, too."""
    right = float8._Operands.backward

    def wrong(ctx: object, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, x = float8._widen(float8.round_rows(grad_NM)), float8._widen(float8.round_rows(x_NK))
        return right(ctx, grad_NM)[0], grad.T @ x, None

    float8._Operands.backward = staticmethod(wrong)


def leave_experts_out() -> None:
    """The products of experts are in the dtype of the operands."""

    @instead_of(float8, float8.apply)
    def wrong(right: Any, blocks: nn.ModuleDict, *arguments: Any) -> None:
        right(blocks, *arguments)
        for module in blocks.modules():
            if isinstance(module, moe.Experts):
                module.product = moe.grouped_product


def round_the_weight_gradients_of_experts() -> None:
    """The gradients of the matrices of experts are products of numbers in float8, too."""

    @instead_of(float8, float8._grouped_weight_gradient)
    def wrong(right: Any, *operands: Any) -> Tensor:
        *matrices, groups = operands
        return right(*(float8._widen(float8.round_rows(matrix)) for matrix in matrices), groups)


def leave_a_layer_out() -> None:
    """The down projections of feed-forward layers multiply in the dtype of the operands."""

    @instead_of(float8, float8.apply)
    def wrong(right: Any, blocks: object, plan: object, precision: object) -> None:
        kept = {name: block.ffn.w2 for name, block in blocks.items()}  # type: ignore[attr-defined]
        right(blocks, plan, precision)  # type: ignore[arg-type]
        for name, layer in kept.items():
            blocks[name].ffn.w2 = layer  # type: ignore[index]
