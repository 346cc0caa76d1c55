"""Compile each block on its own with torch.compile, and the loss. Blocks of a kind share a graph.

Ansel et al. 2024 (PyTorch 2, ASPLOS). Blocks of a kind run the same code on parameters of the same
shapes, so the others reuse the graph of the first. A rank compiles two graphs of each kind, one for
training and one for validation, whatever the number of blocks; and two more if only some blocks are
checkpointed. The loss has two as well, for each size of its parts. Most models have one kind.
Blocks with another window, or without rotary positions, are another one: the window is a constant
of the graph. torch keeps 8 graphs of a method, and runs what would need a further one eagerly.

A block with experts has two graphs in place of one: the rows of an expert change in every step, so
experts and the exchange of tokens run between them, eagerly. With a balance loss and packed
documents, the first of them is compiled again for rows of more than 16 and 256 documents.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.facts.errors import DeviceError, PlanError
from composer3d.models.contract import Decoder, DecoderBlock, SequenceInfo, ShardingPlan
from composer3d.models.layers.head import cross_entropy
from composer3d.models.layers.moe import Router
from composer3d.recipe.schema import CompileTable, MemoryTable, ParallelTable
from composer3d.runtime.process_group import check_machines
from composer3d.runtime.torch_private import (
    FUSE_TP,
    enable_symmetric_memory,
    silence_selective_checkpoint_warning,
)

Refresh = Callable[[], None]


def check(
    model: Decoder,
    plan: ShardingPlan,
    table: CompileTable,
    memory: MemoryTable,
    parallel: ParallelTable,
) -> None:
    """Raise PlanError if a block holds experts and cannot be compiled around them.

    Args:
        model: the whole model.
        plan: its plan.
        table, memory, parallel: the recipe's ``[compile]``, ``[memory]`` and ``[parallel]``.
    """
    if not table.enabled or plan.experts is None:
        return
    for number, block in model.blocks.items():
        holds_experts = any(
            plan.holds_experts(f"blocks.{number}.{name}") for name, _ in block.named_modules()
        )
        if not holds_experts:
            continue
        methods = _methods(block)
        if "forward" in methods or not all(hasattr(block, method) for method in methods):
            raise PlanError(
                f"compile.enabled = true makes graphs of {', '.join(methods)} of blocks.{number}, "
                "but the number of tokens of each expert changes in every step; name the methods "
                "before and after the experts in the attribute `compiled` of its class, or use "
                "compile.enabled = false"
            )
        if memory.checkpointing.mode == "selective":
            raise PlanError(
                "compile.enabled = true with experts cannot keep the results of single operators; "
                'use memory.activation_checkpoint = "full" or "none"'
            )
        if parallel.async_tp:
            raise PlanError("parallel.async_tp = true is not proven with experts; use false")


def _methods(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods of a block that are compiled."""
    return block.compiled if isinstance(block, DecoderBlock) else DecoderBlock.compiled


def prepare(
    table: CompileTable,
    device: torch.device,
    async_tp_group: dist.ProcessGroup | None = None,
) -> None:
    """Check that this machine can compile, and let tp ranks read each other's memory.

    Collective over all ranks of the world, if there is one and compilation is enabled.

    Args:
        table: the recipe's ``[compile]``.
        device: the device that the model runs on.
        async_tp_group: the tp ranks with ``parallel.async_tp``, else None.

    Raises:
        DeviceError: compilation is enabled, and a machine has no compiler for ``device``; or
            ``device`` cannot run the operators of ``async_tp_group``. Every rank raises it.
    """

    def prepare_here() -> None:
        check_toolchain(device)
        if async_tp_group is not None:
            prepare_async_tp(device, async_tp_group)

    if table.enabled:
        check_machines(prepare_here)


def apply(
    blocks: nn.ModuleDict,
    table: CompileTable,
    refreshes: Mapping[str, Refresh],
    *,
    fuse_tp: bool = False,
) -> None:
    """Replace the forward of each of ``blocks`` by one that torch compiles at its first call.

    Of a block with ``DecoderBlock.compiled``, these methods are replaced. Hooks on a block stay
    outside of its graphs. Parameters keep their names.

    Args:
        blocks: the blocks, changed in place.
        table: the recipe's ``[compile]``.
        refreshes: functions from ``tensor.styles.apply``, by the name of a module in the stage.
            Before each call of a graph, a block calls ``DecoderBlock.prepare`` and
            then the functions of its own modules.
        fuse_tp: whether the compiler makes one operator of an all-gather and the products that
            read it, and one of a product and the reduce-scatter after it. They send parts while
            they multiply others (Wang et al. 2023, ASPLOS). It is ``parallel.async_tp``.
    """
    if not table.enabled:
        return
    silence_selective_checkpoint_warning()
    for name, block in blocks.items():
        own_refreshes = [
            refresh
            for module_name, refresh in refreshes.items()
            if f"{module_name}.".startswith(f"blocks.{name}.")
        ]
        for method in _methods(block):
            compiled = torch.compile(
                getattr(block, method), dynamic=False, options=FUSE_TP if fuse_tp else None
            )
            setattr(block, method, _with_preparation(block, own_refreshes, compiled))


def apply_to_loss(stage: nn.Module, plan: ShardingPlan, table: CompileTable) -> None:
    """Compile the cross-entropy of each head in ``stage`` that has the default one, in place.

    Two kernels read the logits in their own dtype, and a third writes their gradient. Eagerly, the
    logits are copied to float32, and their softmax is kept in it. A loss over tp has collectives
    and stays eager. All heads of a process share the 8 graphs that torch keeps of a function, one
    for each number of tokens, with and without gradients.

    Args:
        stage: this rank's part of the model, or one of them.
        plan: the plan of the model.
        table: the recipe's ``[compile]``.
    """
    if not table.enabled:
        return
    for name, module in stage.named_modules():
        is_head = plan.style_of(name) == "head"
        if is_head and getattr(module, "cross_entropy", None) is cross_entropy:
            module.cross_entropy = torch.compile(cross_entropy, dynamic=False)


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
    block: nn.Module, refreshes: list[Refresh], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a method of a block that prepares a call of its graph, and then calls it.

    Its first argument is the residual stream; preparation looks for ``seq`` among the others.
    """
    routers = [module for module in block.modules() if isinstance(module, Router)]

    def method(h_BTC: Tensor, *arguments: Any, **keywords: Any) -> Any:
        for seq in (*arguments, *keywords.values()):
            if not isinstance(seq, SequenceInfo):
                continue
            if isinstance(block, DecoderBlock):
                block.prepare(seq, h_BTC.dtype)
            for router in routers:
                router.prepare(h_BTC, seq)
        for refresh in refreshes:
            refresh()
        return compiled(h_BTC, *arguments, **keywords)

    return method
