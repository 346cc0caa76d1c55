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
from tools.prove.faults.places import computes_narrow
from tools.prove.faults.plant import fault_of
from tools.prove.paths import MOE_RECIPE


class _Torch:
    """The module ``torch`` as one module of composer3d sees it, with other functions."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__ |= functions

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _widen_nothing(module: Any) -> None:
    """Let a module compute in the dtype of its inputs."""
    module.torch = _Torch(promote_types=lambda dtype, _: dtype)


@computes_narrow(
    r"not in float64: .*compute_gradients: aten::pow\S* of float32 .*squared norm",
    "mesh.dp_shard=2",
)
@fault_of(grad_norm, grad_norm.local_grad_norm_sq)
def norm_in_the_dtype_of_gradients(
    _: Any, parameters: Iterable[nn.Parameter], mesh: Mesh
) -> Tensor:
    """The squared norm is summed in the dtype of the gradients, and not in float64."""
    grads = [local_shard(p.grad) for p in parameters if p.grad is not None]
    return torch.stack(torch._foreach_norm(grads)).square().sum() / mesh.stage_ranks


@computes_narrow(r"cross_entropy: aten::nll_loss_forward of bf")
@computes_narrow(r"_Parts\.gradients: aten::add_\.Tensor of bfloat16", "memory.loss_chunks=2")
def sum_the_loss_narrow() -> None:
    """The loss of a vocabulary that tp does not cut, or of its parts, is summed in bfloat16."""
    _widen_nothing(head)


@computes_narrow(r"vocab\.py:.*: c10d::allreduce_ of bfloat16", "mesh.tp=2")
def sum_exponentials_narrow() -> None:
    """The loss of a vocabulary that tp cuts is computed in bfloat16."""
    _widen_nothing(vocab)


@computes_narrow(r"rope_table: aten::cos of bfloat16")
def turn_by_narrow_angles() -> None:
    """Rotary angles are computed in bfloat16."""
    _widen_nothing(rope)


@computes_narrow(r"Router\.forward: aten::_softmax of bfloat16", recipe=MOE_RECIPE)
def route_narrow() -> None:
    """The scores of routers are computed in bfloat16."""
    _widen_nothing(moe)


@computes_narrow(r"Router\._balance_loss: aten::sum of bfloat16", recipe=MOE_RECIPE)
@fault_of(moe.Router, moe.Router._balance_loss)
def sum_balance_losses_narrow(right: Any, self: Any, probabilities: Tensor, *others: Any) -> Any:
    """The balance loss of a router is summed in bfloat16."""
    return right(self, probabilities.bfloat16(), *others)


@computes_narrow(r"_WeightedSum\.forward: aten::addcmul_ of bf", recipe=MOE_RECIPE)
@fault_of(moe.Router, moe.Router.forward)
def add_experts_narrow(right: Any, self: moe.Router, x_BTC: Tensor, seq: Any) -> moe.Routing:
    """The outputs of a token's experts are weighted and added up in bfloat16."""
    routing = right(self, x_BTC, seq)
    return routing._replace(weights_NK=routing.weights_NK.to(x_BTC.dtype))


@computes_narrow(r"RouterStatistics\.add: aten::add\.Tensor of bfloat16", recipe=MOE_RECIPE)
def count_tokens_of_experts_narrow() -> None:
    """What routers have seen is added up in bfloat16."""
    right = moe.RouterStatistics.add
    moe.RouterStatistics.add = lambda self, sums: right(self, sums.bfloat16())


@computes_narrow(
    r"OneStage\.forward: aten::add_\.Tensor of bfloat16(?s:.)*OneStage\.forward_backward"
)
@computes_narrow(r"runtime\.py:.*: aten::add.* of bfloat16", "mesh.pp=2")
def add_losses_of_micro_batches_narrow() -> None:
    """The losses of micro-batches are added up in bfloat16, with and without a pipeline."""

    def zeros(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        is_wide = dtype == torch.float64
        return torch.zeros(*size, dtype=torch.bfloat16 if is_wide else dtype, **options)

    module: ModuleType
    for module in (executor, runtime):
        module.torch = _Torch(zeros=zeros)  # type: ignore[attr-defined]


@computes_narrow(r"finish_gradients: c10d::allreduce_ of bfloat16", "mesh.tp=2")
def add_gradients_over_tp_narrow() -> None:
    """Gradients that are parts of a sum over tp are summed in bfloat16."""
    stages.torch = _Torch(cat=lambda parts: torch.cat(parts).bfloat16())


@computes_narrow(r"aten::lerp_\.Tensor of bfloat16", "mesh.cp=2")
@fault_of(ring, ring._merge)
def merge_blocks_narrow(
    _: Any, out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> None:
    """The blocks of a ring are merged in bfloat16."""
    narrow = out.bfloat16()
    narrow.lerp_(block_out.bfloat16(), (block_lse - lse).sigmoid()[..., None].bfloat16())
    out.copy_(narrow)
    lse.copy_(torch.logaddexp(lse, block_lse))


@computes_narrow(r"ring\.py:.*: aten::add\.Ten", "mesh.cp=2")
@fault_of(ring, ring._add)
def add_gradients_of_keys_narrow(_: Any, totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    """The gradients of queries, keys and values are added up over the blocks in bfloat16."""
    for total, part in zip(totals, parts, strict=True):
        total.copy_(total.bfloat16() + part.bfloat16())


@computes_narrow(r"aten::mean\.dim of bfloat16")
@fault_of(F, F.rms_norm)
def take_statistics_of_norms_narrow(
    _: Any, x: Tensor, shape: Any, weight: Tensor, eps: float
) -> Tensor:
    """The mean of squares of a norm is computed in bfloat16."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@computes_narrow(r"optim:.*: aten::mul\.Tensor of bfloat16")
def update_narrow() -> None:
    """The optimizer computes its update in bfloat16."""

    def wrong(self: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                update = local_shard(parameter.grad).bfloat16() * -group["lr"]
                local_shard(parameter.detach()).add_(update)

    AdamW.step = wrong
