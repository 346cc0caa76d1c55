"""The gpt-oss decoder: gpt-oss-120b and gpt-oss-20b (OpenAI 2025, arXiv 2508.10925).

Beside the names of ``models.moe``, a block has ``attn.sinks.weight`` (a number for each head),
``attn.out_bias.weight``, biases of ``wq``, ``wk`` and ``wv``, ``moe.router.logit_bias``, and in
``moe.experts`` the biases ``b1`` and ``b2``. ``w1`` has the rows of gate and up projection in
turns, as the published files have them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from composer3d.models.contract import SequenceInfo
from composer3d.models.gpt_oss.shape import GptOssShape
from composer3d.models.layers.attention import Attention
from composer3d.models.layers.moe import Experts, Groups, MoE, Router, add_row_bias
from composer3d.models.layers.rope import Rope
from composer3d.models.llama.model import RotaryDecoder
from composer3d.models.moe.model import ExpertsBlock


class _Sinks(nn.Module):
    """The sink of each query head: ``sinks(x_BTC)`` returns them, whatever ``x_BTC`` is.

    A module of its own, with the style "column", so that tensor parallelism cuts it like the heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.weight


class _StreamBias(nn.Module):
    """A bias of what a layer adds to the residual stream: ``bias(x_BTC) -> x_BTC``.

    A module of its own, with the style "norm": the outputs of a "row" layer are summed over ranks,
    and a bias within would be summed as well.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC + self.weight


class GptOssAttention(Attention):
    """Attention with sinks (see ``attend_sdpa``) and a bias of each projection."""

    def __init__(self, shape: GptOssShape, rope: Rope, layer: int) -> None:
        super().__init__(
            dim=shape.dim,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            rope=rope,
            bias=True,
            window=shape.window_of(layer),
        )
        self.out_bias = _StreamBias(shape.dim)
        self.sinks = _Sinks(shape.n_heads)


class GptOssExperts(Experts):
    """E feed-forward layers with biases and a clamped gate: ``experts(rows, exchange)``.

    Attributes:
        w1, b1: (E, 2 F, C) and (E, 2 F): rows 0, 2, 4 ... are the gate projection, the others the
            up projection.
        w2, b2: (E, C, F) and (E, C), the down projection.
    """

    def __init__(self, shape: GptOssShape) -> None:
        super().__init__(shape.experts, shape.dim, shape.ffn)
        del self.w3
        self.w1 = nn.Parameter(torch.empty(shape.experts, 2 * shape.ffn, shape.dim))
        self.b1 = nn.Parameter(torch.empty(shape.experts, 2 * shape.ffn))
        self.b2 = nn.Parameter(torch.empty(shape.experts, shape.dim))
        self.slope, self.limit = shape.gate_slope, shape.gate_limit

    def compute(self, rows_MC: Tensor, groups: Groups, **own: Tensor) -> Tensor:
        """Compute the rows of this rank's experts with its parts of the parameters, by name."""
        inner = add_row_bias(self.product(rows_MC, own["w1"], groups), own["b1"], groups)
        gated_MF = _ClampedGate.apply(inner, self.slope, self.limit)
        return add_row_bias(self.product(gated_MF, own["w2"], groups), own["b2"], groups)


class _ClampedGate(torch.autograd.Function):
    """Multiply the clamped gate and up projection of each row: (M, 2 F) to (M, F).

    Only the input is kept for backward, which computes the rest again: autograd would keep six
    tensors of the width F beside it.
    """

    @staticmethod
    def forward(ctx: Any, inner: Tensor, slope: float, limit: float) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.slope, ctx.limit = slope, limit
        gate, up = _clamped(inner, limit)
        return (up + 1) * (gate * torch.sigmoid(slope * gate))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inner,) = ctx.saved_tensors
        (grad,) = grads
        gate, up = _clamped(inner, ctx.limit)
        share = torch.sigmoid(ctx.slope * gate)
        slope_of_gate = share * (1 + ctx.slope * gate * (1 - share))
        grad_inner = torch.empty_like(inner)
        is_free = inner[:, ::2] <= ctx.limit
        torch.mul(grad * (up + 1) * slope_of_gate, is_free, out=grad_inner[:, ::2])
        is_free = inner[:, 1::2].abs() <= ctx.limit
        torch.mul(grad * gate * share, is_free, out=grad_inner[:, 1::2])
        return grad_inner, None, None


def _clamped(inner: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the gate and the up projection, which ``inner`` has in turns."""
    return inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(min=-limit, max=limit)


class GptOssBlock(ExpertsBlock):
    """One pre-norm decoder block with experts: ``block(h_BTC, seq) -> h_BTC``."""

    def __init__(self, shape: GptOssShape, rope: Rope, layer: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attn = GptOssAttention(shape, rope, layer)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        router = Router(
            dim=shape.dim,
            experts=shape.experts,
            per_token=shape.experts_per_token,
            has_logit_bias=True,
            balance_loss=shape.balance_loss,
            z_loss=shape.z_loss,
        )
        self.moe = MoE(router, GptOssExperts(shape), None)

    def prepare(self, seq: SequenceInfo, dtype: torch.dtype) -> None:
        self.attn.prepare(seq, dtype)


class GptOss(RotaryDecoder):
    """A gpt-oss of one ``GptOssShape``. ``RotaryDecoder`` documents its arguments."""

    shape: GptOssShape

    def make_block(self, layer: int, rope: Rope) -> GptOssBlock:
        """Build a block by its number in the whole model."""
        return GptOssBlock(self.shape, rope, layer)
