"""A small tensor on its way from the device to the host, which waits when it reads it."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory, made behind what the device has to do up to now.

    Args:
        tensor: of any shape, on any device. It must not change before the copy is read.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._has_arrived: torch.Event | None = None
        # torch copies to pinned memory, so the host goes on at once.
        self._values = tensor.to("cpu", non_blocking=True)
        if tensor.device.type != "cpu":
            self._has_arrived = torch.Event(tensor.device)
            self._has_arrived.record()

    def read(self) -> Tensor:
        """Wait until the copy is there, but not for what the device was given later.

        Returns:
            The values, with the shape of the tensor.
        """
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        return self._values
