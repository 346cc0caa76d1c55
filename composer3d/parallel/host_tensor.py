"""A tensor that stays in host memory on its way through FSDP and torch's pipelines."""

from torch import Tensor

from composer3d.runtime.torch_private import cut_by_pipelines


class HostTensor:
    """A tensor (B, T) in host memory, as an input of a module that FSDP shards.

    FSDP moves tensors among a module's inputs to the GPU, and looks for them in lists, tuples and
    dicts, but not in this object. torch's pipelines do look into it (``cut_by_pipelines``): they
    cut the tensor into micro-batches as they cut others.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, rows: slice) -> "HostTensor":
        return HostTensor(self.tensor[rows])


cut_by_pipelines(HostTensor, "tensor")
