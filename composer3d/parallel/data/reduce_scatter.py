"""A reduce-scatter of FSDP that sends narrow numbers and sums wide ones.

A reduce-scatter in bfloat16 adds up in bfloat16 on its way, and FSDP's ``reduce_dtype`` of bfloat16
would also sum micro-batches in it. Both lose bits in each addition. Here each rank's contribution
is rounded once, and everything is added up in the dtype of FSDP's own buffers.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d.runtime.torch_private import ReduceScatter


class WithPlainBuffers(ReduceScatter):
    """A reduce-scatter whose buffers are ordinary tensors."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer for FSDP's input or output of a call, in the dtype of its sums.

        Its shape is ``size``, and its values are not set.
        """
        return torch.empty(*size, dtype=dtype, device=device)


class SendNarrow(WithPlainBuffers):
    """Sum and scatter a vector over a group, with one all-to-all and a sum on the receiving rank.

    Each rank rounds its contribution once to ``dtype``, its part of its own shard too. In bfloat16,
    an element of the result differs from the exact sum by at most 2^-8 times the sum of |x| over
    ranks. The addition has at most one further rounding for each rank, in the dtype of x.

    Args:
        dtype: that of the numbers which ranks exchange.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write the sum of this rank's shard to ``output_tensor``. Collective: one all-to-all.

        Each rank sends (n-1)/n of the elements of x, in ``dtype``: as many as a reduce-scatter. Two
        buffers of the size of x in ``dtype`` live during the call.

        Args:
            output_tensor: (N / n); is overwritten.
            input_tensor: x, (N); N is a multiple of the number n of ranks.
            group: the n ranks.
            op: is always a sum (``fsdp.apply`` forces it).
            async_op: is always False. The current stream waits for the result, the host does not.
        """
        sent = input_tensor.to(self._dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        contributions = received.view(group.size(), -1)
        torch.sum(contributions, dim=0, dtype=output_tensor.dtype, out=output_tensor)
