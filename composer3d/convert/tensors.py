"""A tensor in a file, before it is read."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from composer3d.checkpoint.manifest import TensorSpec

Box = tuple[slice, ...]  # a range in each dim of a tensor, with begin and end


class ReadableTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        spec: its shape and dtype.
        read: returns it on the CPU, as a view of the file if the format allows it.
        has_checksum: whether ``read`` raises ValueError if the bytes differ from a checksum in the
            file. Otherwise such files have none, or it was compared when the checkpoint was opened.
        read_box: returns a box of it, where that takes less than to read it whole; None: it does
            not. An empty box is the whole tensor.
    """

    spec: TensorSpec
    read: Callable[[], Tensor]
    has_checksum: bool = False
    read_box: Callable[[Box], Tensor] | None = None
