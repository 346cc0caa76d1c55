"""Random tensors and labels, and the plain loss, for the tests of heads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from composer3d.models.contract import IGNORE_INDEX


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, drawn in float64 and rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def random_labels(count: int, vocab: int) -> Tensor:
    """Labels from the whole vocabulary, with its first and last word. Every third is ignored."""
    labels = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(3))
    labels[1], labels[2] = 0, vocab - 1
    labels[::3] = IGNORE_INDEX
    return labels


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
