"""Single-device models. They never import torch.distributed; a ``Plan`` beside them says how they may be cut."""

from composer3d.models.layers import IGNORE_INDEX, Seq
from composer3d.models.llama import Llama

__all__ = ["IGNORE_INDEX", "Llama", "Seq"]
