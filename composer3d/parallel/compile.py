"""torch.compile of each block on its own: a graph that all blocks of a rank share.

Ansel et al. 2024 (PyTorch 2, ASPLOS). All blocks run the same code on parameters of the same
shapes: the first is compiled, the others find its graph. A rank compiles two graphs, one for
training and one for validation, whatever the number of blocks.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from composer3d.models.contract import DecoderBlock, SequenceInfo
from composer3d.recipe.schema import CompileTable
from composer3d.runtime.torch_private import silence_selective_checkpoint_warning
from composer3d.spec.errors import DeviceError

Refresh = Callable[[], None]


def apply(
    blocks: nn.ModuleDict,
    table: CompileTable,
    device: torch.device,
    refreshes: Mapping[str, Refresh],
) -> None:
    """Compile the forward of each of ``blocks`` for ``device``, in place, when it is first called.

    Hooks on a block stay outside of its graph. Parameters keep their names.

    Args:
        refreshes: by name of a module in ``blocks``, what must run before a block that contains it
            (from ``tensor.styles.apply``). ``DecoderBlock.prepare`` runs before as well.

    Raises:
        DeviceError: this machine lacks a compiler.
    """
    if not table.enabled:
        return
    check_toolchain(device)
    silence_selective_checkpoint_warning()
    for name, block in blocks.items():
        own_refreshes = [
            refresh for module, refresh in refreshes.items() if f"{module}.".startswith(f"{name}.")
        ]
        compiled = torch.compile(block.forward, dynamic=False)
        block.forward = _with_preparation(block, own_refreshes, compiled)


def check_toolchain(device: torch.device) -> None:
    """Check for a compiler where torch would look for it, but before training starts.

    Raises:
        DeviceError: there is none.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    way_out = "or use compile.enabled = false"
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise DeviceError(
            f"compile.enabled = true needs a C++ compiler on a CPU, and there is no {compiler!r} "
            f"on this machine; install one, name another in the environment variable CXX, {way_out}"
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise DeviceError(
            "compile.enabled = true needs Triton on a GPU, and this Python has none; install it, "
            f"{way_out}"
        )


def _with_preparation(
    block: nn.Module, refreshes: list[Refresh], compiled: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def forward(h_BTC: Tensor, seq: SequenceInfo) -> Tensor:
        if isinstance(block, DecoderBlock):
            block.prepare(seq, h_BTC.dtype)
        for refresh in refreshes:
            refresh()
        return compiled(h_BTC, seq)

    return forward
