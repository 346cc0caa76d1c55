"""A table of accelerators: name, names in torch, peak FLOP/s and memory. No torch here.

Peaks are dense FLOP/s from the vendors' datasheets: NVIDIA A100, H100, H200, HGX B200, GB200 and
L40S; AMD Instinct MI300X. Peaks that a datasheet quotes with sparsity are halved. Memory is about
the ``total_memory`` of ``torch.cuda.get_device_properties()``, which is less than the name of the
device says.
"""

import re
from typing import NamedTuple


class Hardware(NamedTuple):
    """An accelerator.

    Attributes:
        name: our name for it.
        aliases: parts of the name that ``torch.cuda.get_device_name`` returns.
        memory_gib: memory that a program can use.
        peaks: dense peak FLOP/s by dtype; a dtype that is not supported or not known is absent.
    """

    name: str
    aliases: tuple[str, ...]
    memory_gib: float
    peaks: dict[str, float]


def _peaks(*, half: float, tf32: float, fp32: float, fp8: float = 0.0) -> dict[str, float]:
    """Convert peaks from TFLOP/s to FLOP/s. ``half`` is bf16 and fp16; 0 means no support."""
    tflops = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": fp32, "fp8": fp8}
    return {dtype: peak * 1e12 for dtype, peak in tflops.items() if peak}


_A100 = _peaks(half=312.0, tf32=156.0, fp32=19.5)
_H100 = _peaks(half=989.0, tf32=494.5, fp32=67.0, fp8=1979.0)

DEVICES: tuple[Hardware, ...] = (
    Hardware("A100-40GB", ("A100-SXM4-40GB", "A100-SXM-40GB", "A100-PCIE-40GB"), 39.4, _A100),
    Hardware("A100-80GB", ("A100-SXM4-80GB", "A100-SXM-80GB", "A100 80GB PCIe"), 79.1, _A100),
    Hardware("H100-80GB SXM", ("H100 80GB HBM3", "H100-SXM5-80GB"), 79.1, _H100),
    Hardware(
        "H100-80GB PCIe",
        ("H100 PCIe",),
        79.1,
        _peaks(half=756.0, tf32=378.0, fp32=51.0, fp8=1513.0),
    ),
    Hardware("H200-141GB SXM", ("H200",), 139.8, _H100),
    Hardware(
        "H200-141GB NVL",
        ("H200 NVL",),
        139.8,
        _peaks(half=835.5, tf32=417.5, fp32=60.0, fp8=1671.0),
    ),
    Hardware(
        "B200-180GB SXM", ("B200",), 178.3, _peaks(half=2250.0, tf32=1125.0, fp32=75.0, fp8=4500.0)
    ),
    Hardware(
        "GB200-186GB", ("GB200",), 184.0, _peaks(half=2500.0, tf32=1250.0, fp32=80.0, fp8=5000.0)
    ),
    Hardware("L40S-48GB", ("L40S",), 44.4, _peaks(half=362.0, tf32=183.0, fp32=91.6, fp8=733.0)),
    Hardware(
        "MI300X-192GB", ("MI300X",), 191.7, _peaks(half=1307.4, tf32=653.7, fp32=163.4, fp8=2614.9)
    ),
)


def find(device_name: str) -> Hardware | None:
    """Return the row with the longest name or alias that occurs in ``device_name``, else None.

    Case is ignored. An alias must be a word: "H200" does not occur in "GH200", nor "B200" in
    "GB200". A slice of a device (MIG) has no row, because its peak is lower than the peak of the
    whole device.
    """
    device_name = device_name.lower()
    if re.search(r"\bmig\b", device_name):
        return None
    longest, best_row = 0, None
    for row in DEVICES:
        for alias in (row.name, *row.aliases):
            pattern = rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])"
            if len(alias) >= longest and re.search(pattern, device_name):
                longest, best_row = len(alias), row
    return best_row


def peak_flops(hw: Hardware, dtype_name: str) -> float | None:
    """Return the dense peak of ``hw`` in FLOP/s, or None if it is not known.

    Args:
        hw: a row of the table.
        dtype_name: "bfloat16", "float16", "float32", "tf32" or "fp8". "float32" is the peak of the
            vector units, without TF32; use "tf32" if matrix products run in TF32.
    """
    return hw.peaks.get(dtype_name)
