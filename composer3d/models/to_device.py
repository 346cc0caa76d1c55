"""Copies of what the host computes to the device of a model, for which the host does not wait."""

from torch import Tensor


def copy_to_device_of(like: Tensor, on_host: Tensor) -> Tensor:
    """Return a copy of ``on_host`` on the device of ``like``. No collective.

    A GPU copies it when it has done what it was given before, and the host goes on at once.

    Args:
        like: of any shape and dtype.
        on_host: of any shape, which the copy has too.
    """
    if like.is_cuda:
        # From memory that may be paged out, the host itself copies, and may wait for the GPU first.
        on_host = on_host.pin_memory()
    # Made of ``like``: in a dry run, it is a tensor of the same kind.
    on_device = like.new_empty(on_host.shape, dtype=on_host.dtype)
    return on_device.copy_(on_host, non_blocking=True)
