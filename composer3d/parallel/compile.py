"""Compile each block on its own with torch.compile. All blocks of a rank share one graph.

Ansel et al. 2024 (PyTorch 2, ASPLOS). All blocks run the same code on parameters of the same
shapes, so the others reuse the graph of the first. A rank compiles two graphs, one for training and
one for validation, whatever the number of blocks; and two more if only some blocks are
checkpointed.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models.contract import DecoderBlock, SequenceInfo, ShardingPlan
from composer3d.recipe.schema import CompileTable
from composer3d.runtime.torch_private import (
    FUSE_TP,
    enable_symmetric_memory,
    silence_selective_checkpoint_warning,
)

Refresh = Callable[[], None]


def check(plan: ShardingPlan, table: CompileTable) -> None:
    """Raise PlanError if blocks are to be compiled that hold experts."""
    if table.enabled and plan.experts is not None:
        raise PlanError(
            "compile.enabled = true makes one graph of a block, but the number of tokens of each "
            "expert changes in every step; use compile.enabled = false"
        )


def apply(
    blocks: nn.ModuleDict,
    table: CompileTable,
    device: torch.device,
    refreshes: Mapping[str, Refresh],
    async_tp_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the forward of each of ``blocks`` by one that torch compiles at its first call.

    Hooks on a block stay outside of its graph. Parameters keep their names.

    Args:
        blocks: the blocks, changed in place.
        table: the recipe's ``[compile]``.
        device: the device that the blocks run on.
        refreshes: functions from ``tensor.styles.apply``, by the name of a module in the stage.
            Before each call of the graph, a block calls ``DecoderBlock.prepare`` and
            then the functions of its own modules.
        async_tp_group: the tp ranks with ``parallel.async_tp``, else None. The compiler then makes
            one operator of an all-gather and the products that read it, and one of a product and
            the reduce-scatter after it. They send parts while they multiply others (Wang et al.
            2023, ASPLOS).

    Raises:
        DeviceError: compilation is enabled, and this machine has no compiler for ``device``; or
            ``device`` cannot run the operators of ``async_tp_group``.
    """
    if not table.enabled:
        return
    check_toolchain(device)
    options = None
    if async_tp_group is not None:
        prepare_async_tp(device, async_tp_group)
        options = FUSE_TP
    silence_selective_checkpoint_warning()
    for name, block in blocks.items():
        own_refreshes = [
            refresh
            for module_name, refresh in refreshes.items()
            if f"{module_name}.".startswith(f"blocks.{name}.")
        ]
        compiled = torch.compile(block.forward, dynamic=False, options=options)
        block.forward = _with_preparation(block, own_refreshes, compiled)


def check_toolchain(device: torch.device) -> None:
    """Check, before training starts, that torch will find a compiler, and can load what it makes.

    Raises:
        DeviceError: this machine has no compiler for ``device``, or the compiler's cache is on a
            mount from which no code is loaded.
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
    for variable, folder in _cache_folders(device).items():
        if _is_noexec(folder):
            raise DeviceError(
                f"compile.enabled = true puts machine code into {folder}, and its mount has the "
                "option noexec, so that the code cannot be loaded; name a folder on another mount "
                f"in the environment variable {variable}, {way_out}"
            )


def _cache_folders(device: torch.device) -> dict[str, Path]:
    """Return the folders for machine code, by the environment variable that names each."""
    # By default, both are in a folder of the user in the folder for temporary files.
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    folders = {"TORCHINDUCTOR_CACHE_DIR": Path(inductor)}
    if device.type == "cuda" and (triton := os.environ.get("TRITON_CACHE_DIR")):
        folders["TRITON_CACHE_DIR"] = Path(triton)
    return folders


def _is_noexec(folder: Path) -> bool:
    """Return whether no code can be loaded from a folder, which need not exist yet."""
    for place in (folder.absolute(), *folder.absolute().parents):
        try:
            return bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
        except OSError:
            continue
    return False


def prepare_async_tp(device: torch.device, group: dist.ProcessGroup) -> None:
    """Let the tp ranks of ``group`` read each other's memory.

    Raises:
        DeviceError: ``device`` is no GPU, or torch has no symmetric memory for it.
    """
    way_out = "use parallel.async_tp = false"
    if device.type != "cuda":
        raise DeviceError(
            "parallel.async_tp = true needs GPUs that read each other's memory, and this run is on "
            f"a {device.type.upper()}; {way_out}"
        )
    if not enable_symmetric_memory(group):
        raise DeviceError(
            "parallel.async_tp = true needs GPUs that read each other's memory, and torch "
            f"{torch.__version__} has no symmetric memory here; {way_out}"
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
