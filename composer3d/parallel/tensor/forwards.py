"""The forwards of modules that need more under tp than a collective before and after them.

They are called once with the module before it is cut, and with the tp ranks. Each returns
``forward(module, *inputs)``, where the parameters of ``module`` are this rank's shards.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.models.layers.head import cross_entropy
from composer3d.parallel.tensor import vocab
from composer3d.parallel.tensor.collectives import gather_columns, mean_over_ranks

Forward = Callable[..., Tensor]


def embedding_forward(module: nn.Module, group: dist.ProcessGroup) -> Forward:
    """Return ``forward(module, tokens_BT) -> rows_BTC``, which looks up this rank's rows.

    Tokens of other ranks' rows give 0.
    """
    first, count = vocab.own_rows(module.get_parameter("weight").shape[0], group)
    lookup = type(module).forward

    def forward(module: nn.Module, tokens_BT: Tensor, *arguments: Any) -> Tensor:
        row_BT = tokens_BT - first
        is_elsewhere_BT = (row_BT < 0) | (row_BT >= count)
        rows_BTC = lookup(module, row_BT.masked_fill(is_elsewhere_BT, 0), *arguments)
        return rows_BTC.masked_fill(is_elsewhere_BT[..., None], 0)

    return forward


def norm_forward(norm: Any, group: dist.ProcessGroup) -> Forward:
    """Return an RMSNorm over the heads of all ranks, of which each rank holds some.

    All ranks hold equally many heads, so the mean over all heads is the mean of the ranks' means.
    With fewer key-value heads than ranks this holds as well: equally many ranks compute each head.

    Returns:
        ``forward(norm, x_BTHD) -> x_BTHD``, of this rank's heads. It has one all-reduce of (B, T).

    Raises:
        PlanError: the module is no ``torch.nn.RMSNorm`` with an eps.
    """
    if not isinstance(norm, nn.RMSNorm) or norm.eps is None:
        raise PlanError(
            'a module of style "column_norm" or "kv_column_norm" must be a torch.nn.RMSNorm with '
            f"an eps, and {type(norm).__name__} is none; derive it from torch.nn.RMSNorm, or use "
            "mesh.tp = 1"
        )
    eps = norm.eps

    def forward(norm: Any, x_BTHD: Tensor) -> Tensor:
        wide_BTHD = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32))
        own_BT11 = wide_BTHD.square().mean((-2, -1), keepdim=True)
        mean_BT11 = mean_over_ranks(own_BT11, group)
        weight_HD = norm.weight.unflatten(0, x_BTHD.shape[-2:])
        return (wide_BTHD * torch.rsqrt(mean_BT11 + eps) * weight_HD).to(x_BTHD.dtype)

    return forward


def head_forward(head: Any, group: dist.ProcessGroup, *, loss_parallel: bool) -> Forward:
    """Return the head's own forward, after replacing its ``cross_entropy``.

    The new one takes logits_NV whose columns are cut over ``group``, and all labels_N.

    Raises:
        PlanError: the head lacks the seam, or has a loss of its own under ``loss_parallel``.
    """
    name = type(head).__name__
    if not hasattr(head, "cross_entropy"):
        raise PlanError(
            f"tensor parallelism cuts a head at its seam `cross_entropy`, which {name} lacks: "
            "compute the loss in the head as composer3d.models.layers.head.Head does, or use "
            "mesh.tp = 1"
        )
    own_loss = head.cross_entropy
    if loss_parallel and own_loss is not cross_entropy:
        raise PlanError(
            f"{name} has a loss of its own, which needs whole logits; use parallel.loss_parallel = "
            "false"
        )
    columns = head.weight.shape[0]
    if loss_parallel:
        first, _ = vocab.own_rows(columns, group)
        head.cross_entropy = partial(vocab.cross_entropy, first=first, group=group)
    else:

        def loss_of_whole_logits(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
            return own_loss(gather_columns(logits_NV, columns, group), labels_N)

        head.cross_entropy = loss_of_whole_logits
    return type(head).forward
