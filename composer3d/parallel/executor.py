"""Run the micro-batches of a step on a rank that holds the whole depth of the model.

With pipeline stages, ``pipeline.runtime.Pipeline`` has the same methods.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from composer3d.parallel.data import fsdp
from composer3d.recipe.schema import ParallelTable


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The size of a rank's step.

    Attributes:
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches in a step.
        seq_len: tokens in a whole sample, before it is cut over cp.
    """

    micro_batch: int
    micro_batches: int
    seq_len: int


class Executor(Protocol):
    """Runs the micro-batches of a step through the stages of this rank."""

    def forward_backward(
        self, tokens_BT: Tensor, keywords: Mapping[str, Any], divisor: Tensor
    ) -> Tensor:
        """Compute the gradients of all micro-batches into ``.grad``, reduced over FSDP's ranks.

        Args:
            tokens_BT: int64 (micro_batches x micro_batch, T): the tokens of all micro-batches. Only
                stage 0 reads them.
            keywords: the other inputs of the stages, with the rows of ``tokens_BT``. ``labels_BT``
                is among them on the rank of the last stage.
            divisor: what the losses of a micro-batch are divided by, on the mesh's device: (1 + K)
                for K depths of multi-token prediction; one number, () or (1), for a scalar loss.

        Returns:
            The sum of the divided losses on the ranks of the last stage, 0 on the others: float64,
            of the shape of ``divisor``.

        Collectives: those of the stages; with a pipeline, sends and receives over pp.
        """

    def forward(self, tokens_BT: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        """Compute the sum of the losses, not divided: a float64 scalar. The caller disables grad.

        The arguments (B, T) and the ranks that have the sum are those of ``forward_backward``, the
        collectives those of its forward.
        """


class OneStage:
    """The ``Executor`` of a rank whose only stage is the whole model.

    Args:
        module: the stage, in its final form.
        parallel: the recipe's ``[parallel]``.
        micro_batch: the rows of a micro-batch.
        device: the device of this rank.
    """

    def __init__(
        self, module: nn.Module, parallel: ParallelTable, micro_batch: int, device: torch.device
    ) -> None:
        self._module, self._parallel = module, parallel
        self._micro_batch, self._device = micro_batch, device
        self._units = fsdp.units(module)

    def forward_backward(
        self, tokens_BT: Tensor, keywords: Mapping[str, Any], divisor: Tensor
    ) -> Tensor:
        """See ``Executor.forward_backward``, with its shapes (B, T)."""
        total = torch.zeros(divisor.shape, dtype=torch.float64, device=self._device)
        micro_batches = list(cut_into_micro_batches(tokens_BT, keywords, self._micro_batch))
        for index, (tokens, inputs) in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            fsdp.begin_micro_batch(self._units, self._parallel, last=is_last)
            summed = self._module(tokens, **inputs)
            loss = summed / divisor.to(summed.dtype)
            loss.sum().backward()
            total += loss.detach()
        return total

    def forward(self, tokens_BT: Tensor, keywords: Mapping[str, Any]) -> Tensor:
        """See ``Executor.forward``, with its shapes (B, T)."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for tokens, inputs in cut_into_micro_batches(tokens_BT, keywords, self._micro_batch):
            total += self._module(tokens, **inputs)
        return total


def cut_into_micro_batches(
    tokens_BT: Tensor, keywords: Mapping[str, Any], micro_batch: int
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Cut tokens (B, T) and keywords (B, ...) into parts of ``micro_batch`` rows: views."""
    for begin in range(0, tokens_BT.shape[0], micro_batch):
        rows = slice(begin, begin + micro_batch)
        yield tokens_BT[rows], {name: value[rows] for name, value in keywords.items()}
