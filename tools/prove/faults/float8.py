"""Faults in products in float8."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from composer3d.models.layers import moe
from composer3d.parallel import float8
from tools.prove.faults.places import EP, harms
from tools.prove.faults.plant import fault_of
from tools.prove.paths import MOE_RECIPE

_FLOAT8 = "precision.compute=bfloat16 precision.matmul=float8"


@harms(_FLOAT8, message=" is off by")
@fault_of(float8, float8.round_rows)
def scale_columns(_: Any, x_NK: Tensor) -> float8.Rounded:
    """Each column of a matrix has its own scale: the largest number over all tokens."""
    scale_1K = float8._scale_of(x_NK.abs().amax(0, keepdim=True))
    return float8.Rounded(float8._round(x_NK, scale_1K), scale_1K)


@harms(f"mesh.tp=2 {_FLOAT8}", message=" is off by")
@fault_of(float8, float8._scale_of)
def take_the_scales_of_the_first_rank(right: Any, amax: Tensor) -> Tensor:
    """Every rank scales its part of a matrix by the scales of rank 0's part."""
    scale = right(amax)
    dist.broadcast(scale, 0)
    return scale


@harms(_FLOAT8, message=" is off by")
@fault_of(float8, float8.round_whole)
def forget_a_scale(right: Any, x_NK: Tensor) -> float8.Rounded:
    """The gradients of inputs keep the scale of the weight."""
    values, scale = right(x_NK)
    return float8.Rounded(values, scale.new_ones(()))


@harms(f"mesh.dp_shard=2 {_FLOAT8}")
def round_nothing_in_backward() -> None:
    """The gradients of inputs are products in the dtype of the operands."""
    float8.input_gradient = lambda grad_NM, weight_MK: grad_NM @ weight_MK


@harms(_FLOAT8, message=r" is off by")
def round_the_weight_gradient() -> None:
    """The gradients of weights are products of numbers in float8, too."""
    right = float8._Operands.backward

    def wrong(ctx: object, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, x = float8._widen(float8.round_rows(grad_NM)), float8._widen(float8.round_rows(x_NK))
        return right(ctx, grad_NM)[0], grad.T @ x, None

    float8._Operands.backward = staticmethod(wrong)


@harms(f"{EP} {_FLOAT8}", message=" is off by", recipe=MOE_RECIPE)
@fault_of(float8, float8.apply)
def leave_experts_out(right: Any, blocks: nn.ModuleDict, *arguments: Any) -> None:
    """The products of experts are in the dtype of the operands."""
    right(blocks, *arguments)
    for module in blocks.modules():
        if isinstance(module, moe.Experts):
            module.product = moe.grouped_product


@harms(f"mesh.dp_shard=2 {_FLOAT8}", message=" is off by", recipe=MOE_RECIPE)
@fault_of(float8, float8._grouped_weight_gradient)
def round_the_weight_gradients_of_experts(right: Any, *operands: Any) -> Tensor:
    """The gradients of the matrices of experts are products of numbers in float8, too."""
    *matrices, groups = operands
    return right(*(float8._widen(float8.round_rows(matrix)) for matrix in matrices), groups)


@harms(f"mesh.tp=2 {_FLOAT8}", message=" is off by")
@fault_of(float8, float8.apply)
def leave_a_layer_out(right: Any, blocks: object, plan: object, precision: object) -> None:
    """The down projections of feed-forward layers multiply in the dtype of the operands."""
    kept = {name: block.ffn.w2 for name, block in blocks.items()}  # type: ignore[attr-defined]
    right(blocks, plan, precision)  # type: ignore[arg-type]
    for name, layer in kept.items():
        blocks[name].ffn.w2 = layer  # type: ignore[index]
