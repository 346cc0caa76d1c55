"""Float8 matrix products: round the operands of a product to e4m3, each row with its own scale.

Micikevicius et al. 2022 (FP8 formats, arXiv 2209.05433). The scales are those of torchao's recipe
"rowwise_with_gw_hp". Of the three products of a linear layer, two are in float8:

    output          rows of x            x  rows of the weight
    input gradient  rows of the gradient x  the weight, with one scale for all of it
    weight gradient in the dtype of the operands

The products of experts follow the same rules, each expert as a layer of its own.

A row of x or of a gradient is one token, so a product does not depend on which other tokens a rank
holds: not on micro-batches, dp or cp. The weight gradient sums over tokens, and nothing is rounded
before it. tp cuts rows, and a rank takes its scales from its own part of a row. The result thus
depends on ``mesh.tp``, as a sum in bfloat16 does.

A scale is a power of two, so scaling rounds nothing, in bfloat16 either. In float64, a product is
emulated: operands are rounded to the same e4m3 numbers, and multiplied in float64. ``verify``
proves layouts that way.

This is not torchao's ``Float8Linear``, for three reasons. It cannot compute in float64. Its
backward cannot put the weight gradient off (``pipeline.zero_bubble``). Its tensor subclass adds to
the time of every eager operator. A test compares the two, bit by bit.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import (  # type: ignore[attr-defined]  # its stub lacks one of them
    ScalingType,
    scaled_grouped_mm,
    scaled_mm,
)

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.facts.hardware import HOPPER_MAJOR
from composer3d.models.contract import ShardingPlan
from composer3d.models.layers.moe import Experts, Groups
from composer3d.recipe.schema import FLOAT8_MULTIPLE, MeshTable, PrecisionTable
from composer3d.runtime.process_group import check_machines

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max  # 448
_SMALLEST_AMAX = 1e-12  # rows of zeros have a finite scale too
_LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0


class Rounded(NamedTuple):
    """A matrix in float8, and its scales.

    Attributes:
        values: e4m3, the matrix times ``scale``.
        scale: powers of two in float32, (..., rows, 1) or (..., 1, 1).
    """

    values: Tensor
    scale: Tensor


def round_rows(x_NK: Tensor) -> Rounded:
    """Round each row with its own scale, in one matrix or in several (E, N, K)."""
    scale_N1 = _scale_of(x_NK.abs().amax(-1, keepdim=True))
    return Rounded(_round(x_NK, scale_N1), scale_N1)


def round_whole(x_NK: Tensor) -> Rounded:
    """Round a matrix with one scale, or each matrix of several (E, N, K)."""
    scale_11 = _scale_of(x_NK.abs().amax((-2, -1), keepdim=True))
    return Rounded(_round(x_NK, scale_11), scale_11)


def _scale_of(amax: Tensor) -> Tensor:
    """Return the largest power of two that brings ``amax`` to at most 448, in float32.

    If ``amax`` is not finite, the scale is NaN, and so are all numbers that it scales.
    """
    # In float64, so that compiled and eager code divide alike.
    ratio = _LARGEST / amax.to(torch.float64).clamp(min=_SMALLEST_AMAX)
    # ratio = mantissa x 2^n, with a mantissa of at least 0.5 and below 1.
    return (ratio / (2 * torch.frexp(ratio).mantissa)).to(torch.float32)


def _round(x: Tensor, scale: Tensor) -> Tensor:
    # torch rounds a float64 number to float32 first. So does the reference of ``verify``. Kernels
    # take consecutive rows.
    return (x * scale.to(x.dtype)).to(_E4M3, memory_format=torch.contiguous_format)


def output_product(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    """Return ``x @ weight.T`` (N, M) in the dtype of ``x``, from rows in float8."""
    x, weight = round_rows(x_NK), round_rows(weight_MK)
    if x_NK.dtype == torch.float64:
        return _widen(x) @ _widen(weight).T
    return scaled_mm(
        x.values,
        weight.values.T,
        x.scale.reciprocal(),
        ScalingType.RowWise,
        weight.scale.reciprocal().T,
        ScalingType.RowWise,
        output_dtype=x_NK.dtype,
        use_fast_accum=True,
    )


def input_gradient(grad_NM: Tensor, weight_MK: Tensor) -> Tensor:
    """Return ``grad @ weight`` (N, K) in the dtype of ``grad``, from float8."""
    grad, weight = round_rows(grad_NM), round_whole(weight_MK)
    if grad_NM.dtype == torch.float64:
        return _widen(grad) @ _widen(weight)
    # As torchao: with scales of rows and exact sums, the kernel is slow. Powers of two can also be
    # applied afterwards, without rounding.
    one = torch.ones((), dtype=torch.float32, device=grad_NM.device)
    product_NK = scaled_mm(
        grad.values,
        weight.values.T.contiguous().T,  # the kernel takes columns
        one,
        ScalingType.TensorWise,
        one,
        ScalingType.TensorWise,
        output_dtype=grad_NM.dtype,
    )
    return product_NK * (grad.scale * weight.scale).reciprocal().to(grad_NM.dtype)


@torch.library.custom_op("composer3d::grouped_float8_output", mutates_args=())
def grouped_output(rows_MK: Tensor, weight_EJK: Tensor, tokens_E: Tensor) -> Tensor:
    """Return ``output_product`` of the rows of each expert, (M, J)."""
    groups = Groups(tokens_E)
    if not _has_grouped_kernel(rows_MK):
        return torch.cat([output_product(x, w) for x, w in groups.pairs(rows_MK, weight_EJK)])
    rows, weight = round_rows(rows_MK), round_rows(weight_EJK)
    return scaled_grouped_mm(
        rows.values,
        weight.values.mT,
        rows.scale.reciprocal().flatten(),
        ScalingType.RowWise,
        weight.scale.reciprocal().flatten(1),
        ScalingType.RowWise,
        offs=groups.ends_E,
        output_dtype=rows_MK.dtype,
        use_fast_accum=True,
    )


@grouped_output.register_fake
def _(rows_MK: Tensor, weight_EJK: Tensor, tokens_E: Tensor) -> Tensor:
    return rows_MK.new_empty(rows_MK.shape[0], weight_EJK.shape[1])


@torch.library.custom_op("composer3d::grouped_float8_input_gradient", mutates_args=())
def grouped_input_gradient(grad_MJ: Tensor, weight_EJK: Tensor, tokens_E: Tensor) -> Tensor:
    """Return ``input_gradient`` of the rows of each expert, (M, K)."""
    groups = Groups(tokens_E)
    if not _has_grouped_kernel(grad_MJ):
        return torch.cat([input_gradient(x, w) for x, w in groups.pairs(grad_MJ, weight_EJK)])
    grad, weight = round_rows(grad_MJ), round_whole(weight_EJK)
    experts, _, columns = weight_EJK.shape
    return scaled_grouped_mm(
        grad.values,
        weight.values.mT.contiguous().mT,  # the kernel takes columns
        grad.scale.reciprocal().flatten(),
        ScalingType.RowWise,
        # The kernel has a scale for each column: all have that of their expert.
        weight.scale.reciprocal().flatten(1).expand(experts, columns).contiguous(),
        ScalingType.RowWise,
        offs=groups.ends_E,
        output_dtype=grad_MJ.dtype,
    )


@grouped_input_gradient.register_fake
def _(grad_MJ: Tensor, weight_EJK: Tensor, tokens_E: Tensor) -> Tensor:
    return grad_MJ.new_empty(grad_MJ.shape[0], weight_EJK.shape[2])


def _grouped_weight_gradient(grad_MJ: Tensor, rows_MK: Tensor, groups: Groups) -> Tensor:
    """Return ``grad.T @ rows`` of each expert, (E, J, K), in the dtype of the operands."""
    if rows_MK.dtype == torch.bfloat16:
        return F.grouped_mm(grad_MJ.T, rows_MK, offs=groups.ends_E)
    parts = zip(grad_MJ.split(groups.sizes), rows_MK.split(groups.sizes), strict=True)
    return torch.stack([grad.T @ rows for grad, rows in parts])


def _has_grouped_kernel(rows_MK: Tensor) -> bool:
    """Whether torch has one kernel for the rows of all experts: on Hopper, in bfloat16.

    Other GPUs multiply one expert after the other, and wait for the numbers of rows. ``check`` has
    seen that the sizes are multiples of what kernels take.
    """
    if not rows_MK.is_cuda or rows_MK.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(rows_MK.device)[0] == HOPPER_MAJOR


def _widen(matrix: Rounded) -> Tensor:
    """Return the numbers that ``matrix`` stands for, in float64."""
    return matrix.values.to(torch.float64) / matrix.scale


class _Operands(torch.autograd.Function):
    """Save the operands of a product before it is computed; return zeros of its shape.

    Recomputation ends with the last tensor that backward reads. If the product itself saved its
    operands, it would do so when it is done, and recomputation would compute the last one for
    nothing. The zeros are one number in memory. The gradient of the product arrives as theirs.
    """

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight: Tensor, groups: Groups | None) -> Tensor:
        ctx.save_for_backward(x_NK, weight)
        ctx.groups = groups
        return x_NK.new_zeros(()).expand(x_NK.shape[0], weight.shape[-2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight = ctx.saved_tensors
        (grad_NM,) = grads
        if ctx.groups is None:
            return input_gradient(grad_NM, weight), grad_NM.T @ x_NK, None
        input_grad_NK = grouped_input_gradient(grad_NM, weight, ctx.groups.tokens_E)
        return input_grad_NK, _grouped_weight_gradient(grad_NM, x_NK, ctx.groups), None


class _Float8Product(torch.autograd.Function):
    """Compute the product in place of the zeros of ``_Operands``, and pass its gradient there."""

    @staticmethod
    def forward(
        ctx: Any, zeros_NM: Tensor, x_NK: Tensor, weight: Tensor, groups: Groups | None
    ) -> Tensor:
        if groups is None:
            return output_product(x_NK, weight)
        return grouped_output(x_NK, weight, groups.tokens_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


def product(x_NK: Tensor, weight: Tensor, groups: Groups | None = None) -> Tensor:
    """Multiply rows by a matrix (M, K), transposed; or with groups by those of experts (E, M, K).

    Output and input gradient are in float8. The result is (N, M), in the dtype of ``x_NK``.
    """
    zeros_NM = _Operands.apply(x_NK, weight, groups)
    return _Float8Product.apply(zeros_NM, x_NK.detach(), weight.detach(), groups)


class Float8Linear(nn.Linear):
    """A linear layer with its output and its input gradient in float8: (..., K) to (..., M)."""

    def __init__(self, linear: nn.Linear) -> None:
        # These parameters are replaced by those of ``linear``.
        super().__init__(1, 1, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        out = product(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        return out if self.bias is None else out + self.bias


def apply(blocks: nn.ModuleDict, plan: ShardingPlan, precision: PrecisionTable) -> None:
    """Let the modules that the plan names multiply in float8, with ``precision.matmul = "float8"``.

    Linear layers are replaced in place; experts get another ``product``.

    Parameters keep their names. Call it before anything wraps the layers.

    Args:
        blocks: the blocks of a stage, by number.
        plan: the plan of the model.
        precision: the recipe's ``[precision]``.
    """
    if precision.matmul != "float8":
        return
    # A module may have several names, which must get the same replacement.
    replacements: dict[nn.Module, Float8Linear] = {}
    for name, module in list(blocks.named_modules(remove_duplicate=False)):
        if not plan.multiplies_in_float8(f"blocks.{name}"):
            continue
        if isinstance(module, Experts):
            module.product = product
        elif isinstance(module, nn.Linear):
            if module not in replacements:
                replacements[module] = Float8Linear(module)
            blocks.set_submodule(name, replacements[module])


def check(
    model: nn.Module,
    plan: ShardingPlan,
    sizes: MeshTable,
    precision: PrecisionTable,
    device: torch.device,
) -> None:
    """Check that a whole model can multiply in float8 on ``device``, if ``precision`` wants it.

    Collective over all ranks of the world, if there is one, on GPUs.

    Raises:
        PlanError: the plan names no module, or one whose matrices have sizes on a rank that the
            kernel does not take.
        DeviceError: a GPU is too old. Every rank raises it.
    """
    if precision.matmul != "float8":
        return
    if not plan.float8:
        raise PlanError(
            "the plan's float8 names no module, so none can multiply in float8; name linear layers "
            'or experts, or use precision.matmul = "compute"'
        )
    if precision.computes_in == "float64":
        return  # emulated, with any sizes and on any device
    if device.type == "cuda":
        check_machines(partial(_require_capability, device))
    lines = []
    for name, module in model.named_modules():
        if not plan.multiplies_in_float8(name):
            continue
        rows, columns = _local_sizes(module, plan, name, sizes.tp)
        if rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
            lines.append(
                f"{name!r} has a weight of {rows} x {columns} on each rank of mesh.tp = "
                f"{sizes.tp}, but products in float8 need multiples of {FLOAT8_MULTIPLE}; "
                'change the sizes of the model or mesh.tp, or use precision.matmul = "compute"'
            )
    if lines:
        raise PlanError(lines)


def _require_capability(gpu: torch.device) -> None:
    capability = torch.cuda.get_device_capability(gpu)
    if capability < _LEAST_CAPABILITY:
        raise DeviceError(
            'precision.matmul = "float8" needs a GPU of compute capability '
            f"{_as_version(_LEAST_CAPABILITY)} or newer, and "
            f"{torch.cuda.get_device_name(gpu)} has {_as_version(capability)}; use "
            'precision.matmul = "compute"'
        )


def _local_sizes(module: nn.Module, plan: ShardingPlan, name: str, tp: int) -> tuple[int, int]:
    """Return the rows and columns of the weight that a tp rank multiplies by."""
    if isinstance(module, Experts):
        _, rows, columns = module.w1.shape  # whole experts; w2 has the same sizes
        return rows, columns
    # ``models.fit.check`` refuses a plan that names anything else.
    assert isinstance(module, nn.Linear)
    rows, columns = module.out_features, module.in_features
    match plan.style_of(name):
        case "column":
            return rows // tp, columns
        case "kv_column":
            # With fewer heads than ranks, a rank computes one head.
            assert plan.kv_heads is not None
            return rows // min(tp, plan.kv_heads), columns
        case _:
            return rows, columns // tp


def _as_version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
