"""What a step adds up over all ranks, and how it comes from the device to the host."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from composer3d.facts.flags import N_FLAGS, StepFlags
from composer3d.parallel import grad_norm
from composer3d.runtime.host_copy import HostCopy


class StepValues(NamedTuple):
    """What the host learns of a step, the same on all ranks.

    Attributes:
        loss: of the job, the mean over all valid tokens, in nats.
        norm: the norm of all gradients. It is NaN if a gradient is.
        flags: those that any rank has raised.
        norm_by_part: the norm of each part of the model (``grad_norm.PARTS``); empty if the step
            was not asked for it. A part that the model lacks has none.
        mtp_losses: what each depth of multi-token prediction adds to the loss that is minimised:
            the mean over its valid tokens, times its coefficient.
    """

    loss: float
    norm: float
    flags: StepFlags = StepFlags()
    norm_by_part: Mapping[str, float] = MappingProxyType({})
    mtp_losses: tuple[float, ...] = ()


class StepSums:
    """What all ranks have summed up after backward, on the device, where nothing waits for it.

    Args:
        sums: float64 (2 + flags + parts + depths) on the mesh's device: the loss, the squared norm,
            the packed ``StepFlags``, the squared norm of each of ``grad_norm.PARTS``, and
            ``StepValues.mtp_losses``.

    Attributes:
        loss, norm: the scalars of ``StepValues``, on the device.
    """

    def __init__(self, sums: Tensor) -> None:
        self.loss, self.norm = sums[0], sums[1].sqrt()
        self._values = torch.cat((self.loss[None], self.norm[None], sums[2:]))
        self._copy: HostCopy | None = None

    def send_to_host(self) -> None:
        """Copy the values to the host, behind what the device has to do up to here.

        ``await_values`` then waits for that alone, and not for what the device is given later.
        """
        self._copy = HostCopy(self._values)

    def await_values(self) -> StepValues:
        """Wait until the device has summed up the step, and return the values."""
        values = self._values if self._copy is None else self._copy.read()
        loss, norm, *others = values.tolist()
        end_of_parts = N_FLAGS + len(grad_norm.PARTS)
        flags, parts = others[:N_FLAGS], others[N_FLAGS:end_of_parts]
        norms_sq = zip(grad_norm.PARTS, parts, strict=True)
        # A part that the model lacks has no gradient on any rank, so its sum is exactly 0.
        by_part = {part: math.sqrt(value) for part, value in norms_sq if value != 0}
        mtp_losses = tuple(others[end_of_parts:])
        return StepValues(loss, norm, StepFlags.unpack(flags), by_part, mtp_losses)
