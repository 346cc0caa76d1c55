"""Sums and statistics in too narrow a dtype: no proof in float64 can see them.

``tools/prove/dtypes.py`` does. Each computes in bfloat16, or in the gradients' own dtype, what must
be wide when ``precision.compute`` is bfloat16.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.layers import head, moe, rope
from composer3d.parallel import executor, grad_norm, stages
from composer3d.parallel.context import ring
from composer3d.parallel.pipeline import runtime
from composer3d.parallel.pipeline.ties import local_shard
from composer3d.parallel.tensor import vocab
from composer3d.runtime.mesh import Mesh
from composer3d.training.optimizers.adamw import AdamW
from tools.prove.faults.plant import instead_of


class _Torch:
    """The module ``torch`` as one module of composer3d sees it, with other functions."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__ |= functions

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _widen_nothing(module: Any) -> None:
    """Let a module compute in the dtype of its inputs."""
    module.torch = _Torch(promote_types=lambda dtype, _: dtype)


def norm_in_the_dtype_of_gradients() -> None:
    """The squared norm is summed in the dtype of the gradients, and not in float64."""

    def wrong(parameters: Iterable[nn.Parameter], mesh: Mesh) -> Tensor:
        grads = [local_shard(p.grad) for p in parameters if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).square().sum() / mesh.stage_ranks

    grad_norm.local_grad_norm_sq = wrong


def sum_the_loss_narrow() -> None:
    """The loss of a vocabulary that tp does not cut, or of its parts, is summed in bfloat16."""
    _widen_nothing(head)


def sum_exponentials_narrow() -> None:
    """The loss of a vocabulary that tp cuts is computed in bfloat16."""
    _widen_nothing(vocab)


def turn_by_narrow_angles() -> None:
    """Rotary angles are computed in bfloat16."""
    _widen_nothing(rope)


def route_narrow() -> None:
    """The scores of routers are computed in bfloat16."""
    _widen_nothing(moe)


def sum_balance_losses_narrow() -> None:
    """The balance loss of a router is summed in bfloat16."""
    right = moe.Router._balance_loss
    moe.Router._balance_loss = lambda self, probabilities, *others: right(
        self, probabilities.bfloat16(), *others
    )


def add_experts_narrow() -> None:
    """The outputs of a token's experts are weighted and added up in bfloat16."""

    @instead_of(moe.Router, moe.Router.forward)
    def wrong(right: Any, self: moe.Router, x_BTC: Tensor, seq: Any) -> moe.Routing:
        routing = right(self, x_BTC, seq)
        return routing._replace(weights_NK=routing.weights_NK.to(x_BTC.dtype))


def count_tokens_of_experts_narrow() -> None:
    """What routers have seen is added up in bfloat16."""
    right = moe.RouterStatistics.add
    moe.RouterStatistics.add = lambda self, sums: right(self, sums.bfloat16())


def add_losses_of_micro_batches_narrow() -> None:
    """The losses of micro-batches are added up in bfloat16, with and without a pipeline."""

    def zeros(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        is_wide = dtype == torch.float64
        return torch.zeros(*size, dtype=torch.bfloat16 if is_wide else dtype, **options)

    module: ModuleType
    for module in (executor, runtime):
        module.torch = _Torch(zeros=zeros)  # type: ignore[attr-defined]


def add_gradients_over_tp_narrow() -> None:
    """Gradients that are parts of a sum over tp are summed in bfloat16."""
    stages.torch = _Torch(cat=lambda parts: torch.cat(parts).bfloat16())


def merge_blocks_narrow() -> None:
    """The blocks of a ring are merged in bfloat16."""

    def wrong(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
        narrow = out.bfloat16()
        narrow.lerp_(block_out.bfloat16(), (block_lse - lse).sigmoid()[..., None].bfloat16())
        out.copy_(narrow)
        lse.copy_(torch.logaddexp(lse, block_lse))

    ring._merge = wrong


def add_gradients_of_keys_narrow() -> None:
    """The gradients of queries, keys and values are added up over the blocks in bfloat16."""

    def wrong(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
        for total, part in zip(totals, parts, strict=True):
            total.copy_(total.bfloat16() + part.bfloat16())

    ring._add = wrong


def take_statistics_of_norms_narrow() -> None:
    """The mean of squares of a norm is computed in bfloat16."""

    def wrong(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight

    F.rms_norm = wrong


def update_narrow() -> None:
    """The optimizer computes its update in bfloat16."""

    def wrong(self: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = local_shard(parameter.grad).bfloat16() * -group["lr"]
                local_shard(parameter.detach()).add_(update)

    AdamW.step = wrong
