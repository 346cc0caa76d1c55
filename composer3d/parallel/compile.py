"""torch.compile of each block by itself: one graph that all blocks of a rank share, seconds to make.

Ansel et al. 2024 (PyTorch 2, ASPLOS). Blocks run the same code on parameters of the same shapes: the first is compiled,
the others find its graph. There is one for training and one for validation, however many blocks there are.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from composer3d.errors import DeviceError
from composer3d.models import Seq
from composer3d.recipe.schema import CompileTable


def apply(blocks: Iterable[nn.Module], table: CompileTable, device: torch.device) -> None:
    """Compile the forward of each of ``blocks`` for ``device``, in place; it is done when the first of them is called.

    Hooks on a block stay outside of its graph, and parameters keep their names. A module in a block may have a method
    ``prepare(seq, dtype)`` that fills what blocks share: a graph that did so would fit the first block alone.

    Raises:
        DeviceError: this machine lacks what makes machine code of a graph.
    """
    if not table.enabled:
        return
    check_toolchain(device)
    # It warns of selective checkpointing on every rank: a region must not change a tensor in place, and none does.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in blocks:
        block.forward = _prepared(block, torch.compile(block.forward, dynamic=False))


def check_toolchain(device: torch.device) -> None:
    """Say before the training what a compilation would say in its midst. torch looks for the compiler as here."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    way_out = "or use compile.enabled = false"
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise DeviceError(
            f"compile.enabled = true needs a C++ compiler on a CPU, and there is no {compiler!r} on this machine; "
            f"install one, name another in the environment variable CXX, {way_out}"
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise DeviceError(
            f"compile.enabled = true needs Triton on a GPU, and this Python has none; install it, {way_out}"
        )


def _prepared(block: nn.Module, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    every = (getattr(module, "prepare", None) for module in block.modules())
    prepares: list[Callable[..., None]] = [prepare for prepare in every if callable(prepare)]

    def forward(h_BTC: Tensor, seq: Seq) -> Tensor:
        for prepare in prepares:
            prepare(seq, h_BTC.dtype)
        return compiled(h_BTC, seq)

    return forward
