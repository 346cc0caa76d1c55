"""What a careless change would add to a block, as ``counts.Job.prepare``.

Each makes the attention of every block do something more.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer3d.models.layers.attention import Attention
from composer3d.parallel.context import segment_kernel


def copy_and_read() -> None:
    _before_attention(lambda x: x.sum().item())
    _before_attention(lambda x: x[0, 0, :2].tolist())
    _before_attention(lambda x: torch.ones(2).to(x.device))
    _before_attention(lambda x: x.detach().cpu())


def search_a_mask() -> None:
    _before_attention(lambda x: torch.nonzero(x[0, 0] > 0))


def make_a_clone() -> None:
    _before_attention(lambda x: x.clone())


def call_a_kernel_for_each_document() -> None:
    """Attend to each document of the first row by itself, over the shard of this rank."""
    attend: Any = segment_kernel.attend_segments

    def attend_to_each(q: Tensor, k: Tensor, v: Tensor, segments: segment_kernel.Segments) -> Any:
        for _ in range(segments.query_offsets.numel() - 1):
            result = attend(q, k, v, segments)
        return result

    segment_kernel.attend_segments = attend_to_each


def _before_attention(action: Callable[[Tensor], object]) -> None:
    forward: Any = Attention.forward

    def act_first(self: Attention, x_BTC: Tensor, **keywords: Any) -> Tensor:
        action(x_BTC)
        return forward(self, x_BTC, **keywords)

    Attention.forward = act_first  # type: ignore[method-assign]
