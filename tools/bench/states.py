"""AdamW with 8-bit states of torchao: whether its numbers depend on how ranks cut a matrix.

Its states are rounded in blocks of 256 numbers of what a rank holds, so a cut within a block gives
other blocks. Both runs have the same weights and gradients, on one process.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from composer3d.facts.errors import UserError
from tools.bench.tables import print_head, print_row

ROWS, COLUMNS = 512, 384  # half of the columns is no multiple of 256
STEPS = 20

Cut = Callable[[Tensor], Sequence[Tensor]]
CUTS: dict[str, Cut] = {
    "rows in halves": lambda whole: whole.chunk(2, 0),
    "columns in halves": lambda whole: whole.chunk(2, 1),
}


def states(_: argparse.Namespace) -> int:
    """Print by how much a cut, and the states, change the weights, relative to the update."""
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError:
        raise UserError("bench states needs torchao: `pip install --no-deps torchao`") from None

    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS)
    # Rows of different sizes, as those of frequent and rare tokens.
    gradients = [torch.randn(ROWS, COLUMNS) * torch.rand(ROWS, 1) for _ in range(STEPS)]

    exact = _train(torch.optim.AdamW, weight, gradients, lambda whole: [whole])
    moved = (exact - weight).norm()
    uncut, float32 = "difference from the uncut matrix", "difference from float32 states"
    print_head("states", "cut", uncut, float32)
    for optimizer in (torch.optim.AdamW, AdamW8bit, AdamWFp8):
        whole = _train(optimizer, weight, gradients, lambda whole: [whole])
        for name, cut in CUTS.items():
            joined = _train(optimizer, weight, gradients, cut)
            by_cut, by_states = (joined - whole).norm() / moved, (whole - exact).norm() / moved
            print_row(optimizer.__name__, name, f"{by_cut:.1%}", f"{by_states:.1%}")
    return 0


def _train(
    optimizer: type[torch.optim.Optimizer], weight: Tensor, gradients: Sequence[Tensor], cut: Cut
) -> Tensor:
    """Return the weight (rows, columns) after all steps, each part with states of its own."""
    parts = [
        nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in cut(weight)
    ]
    one_step = optimizer(parts, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)  # type: ignore[call-arg]
    for gradient in gradients:
        for part, share in zip(parts, cut(gradient), strict=True):
            part.grad = share.contiguous()
        one_step.step()
    dim = 0 if parts[0].shape[1] == weight.shape[1] else 1
    return torch.cat([part.detach() for part in parts], dim)
