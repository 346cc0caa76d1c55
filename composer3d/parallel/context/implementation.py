"""Kernels of attention from a package outside of torch, for the whole process.

torch keeps a registry of them. An implementation takes the place of torch's FlashAttention 2 behind
its own operators: those that ``kernels`` and ``segment_kernel`` call, and one of those that
``scaled_dot_product_attention`` chooses from.
"""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from composer3d.facts.errors import DeviceError
from composer3d.runtime import process_group


class Implementation(NamedTuple):
    """What a value of ``parallel.attention_kernel`` needs.

    Attributes:
        name: its name in torch's registry.
        module: the module that torch imports it from.
        capabilities: the major numbers of the compute capabilities that it has kernels for.
    """

    name: str
    module: str
    capabilities: tuple[int, ...]


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "flash3": Implementation("FA3", "flash_attn_interface", (9,)),
    "flash4": Implementation("FA4", "flash_attn.cute.interface", (9, 10)),
}


def activate(kernel: str, device: torch.device) -> None:
    """Replace torch's kernels of attention in this process.

    Collective over all ranks of the world, if there is one, unless ``kernel`` is "torch".

    Args:
        kernel: the recipe's ``parallel.attention_kernel``. "torch" changes nothing.
        device: the device of this rank.

    Raises:
        DeviceError: ``device`` is no GPU that has such kernels, or no package with them can be
            imported. Every rank raises it.
    """
    if kernel != "torch":
        process_group.check_machines(partial(_activate_here, kernel, device))


def _activate_here(kernel: str, device: torch.device) -> None:
    chosen, key = IMPLEMENTATIONS[kernel], f'parallel.attention_kernel = "{kernel}"'
    way_out = 'use parallel.attention_kernel = "torch"'
    major = _major_capability(device)
    if major not in chosen.capabilities:
        needed = " or ".join(f"{each}.x" for each in chosen.capabilities)
        raise DeviceError(
            f"{key} needs a GPU of compute capability {needed}, and this run is on "
            f"{_words_of(device, major)}; {way_out}"
        )
    try:
        activate_flash_attention_impl(chosen.name)
    except Exception as error:
        # A package of compiled code can fail to load in many ways.
        raise DeviceError(
            f"{key} needs the module {chosen.module}, which cannot be used here ({error}); install "
            f"a package that has it for torch {torch.__version__}, or {way_out}"
        ) from error
    if current_flash_attention_impl() != chosen.name:
        raise DeviceError(f"{key}: torch {torch.__version__} did not take it; {way_out}")
    # Otherwise ``scaled_dot_product_attention`` takes cuDNN's kernel on the same GPUs.
    torch.backends.cuda.enable_cudnn_sdp(False)


def installed() -> list[str]:
    """Return the values of ``parallel.attention_kernel`` whose modules this Python has."""
    return [kernel for kernel, each in IMPLEMENTATIONS.items() if _has_module(each.module)]


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except Exception:
        # To find a module in a package, Python imports the package, which can fail in many ways.
        return False


def _major_capability(device: torch.device) -> int | None:
    """Return the major number of a GPU's compute capability, None for any other device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def _words_of(device: torch.device, major: int | None) -> str:
    return f"a {device.type.upper()}" if major is None else f"a GPU of {major}.x"
