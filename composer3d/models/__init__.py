"""Single-device models. They never import torch.distributed; a ``Plan`` beside them says how they may be cut."""

from composer3d.models.layers import Decoder, Seq
from composer3d.models.llama import Head, Llama

__all__ = ["Decoder", "Head", "Llama", "Seq"]
