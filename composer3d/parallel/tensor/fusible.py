"""The collectives of ``parallel.async_tp``: the compiler makes one operator of each and a product.

Wang et al. 2023 (ASPLOS). ``compile.apply`` tells the compiler to do so.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.parallel.tensor import collectives
from composer3d.parallel.tensor.collectives import CUT_DIM, _WithTranspose
from composer3d.runtime.torch_private import fusible_gather, fusible_scatter_sum


def gather_sequence(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather as ``collectives.gather_sequence``; in a compiled graph, so that a product can fuse.

    Shapes are those of that function: (B, T / n, C) to (B, T, C). The collectives of forward
    and backward are the same. Outside of a graph the operators are too.
    """
    if not torch.compiler.is_compiling():
        return collectives.gather_sequence(x_BTC, group)
    return _WithTranspose.apply(x_BTC, group, _fusible_all_gather, _fusible_reduce_scatter)


def scatter_sum(x_BTC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum and scatter as ``collectives.scatter_sum``: (B, T, C) to (B, T / n, C).

    See ``gather_sequence``.
    """
    if not torch.compiler.is_compiling():
        return collectives.scatter_sum(x_BTC, group)
    return _WithTranspose.apply(x_BTC, group, _fusible_reduce_scatter, _fusible_all_gather)


def _fusible_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return fusible_gather(x, CUT_DIM, group)


def _fusible_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return fusible_scatter_sum(x, CUT_DIM, group)
