"""One row for each accelerator: its name, the names torch gives it, its peaks and its memory. No torch here.

Peaks are dense (no sparsity) FLOP/s of the vendors' datasheets: NVIDIA A100, H100, H200, HGX B200, GB200 and L40S;
AMD Instinct MI300X. Peaks that a datasheet quotes with sparsity are halved. Memory is about what
``torch.cuda.get_device_properties().total_memory`` reports, which is less than the name of the device says.
"""

import re
from typing import NamedTuple


class Hardware(NamedTuple):
    """An accelerator. ``aliases`` are parts of ``torch.cuda.get_device_name``; ``peaks`` are FLOP/s by dtype."""

    name: str
    aliases: tuple[str, ...]
    memory_gib: float
    peaks: dict[str, float]


def _peaks(*, half: float, tf32: float, fp32: float, fp8: float = 0.0) -> dict[str, float]:
    """In FLOP/s, of TFLOP/s; ``half`` is that of bf16 and of fp16, and 0 says that there is none."""
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": fp32, "fp8": fp8}
    return {dtype: tflops * 1e12 for dtype, tflops in peaks.items() if tflops}


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
    """The row whose name or alias occurs in ``device_name``, the longest one; None for a device that has no row.

    Case does not count, and an alias must stand by itself: "H200" is no part of "GH200", nor "B200" of "GB200".
    A slice of a device (MIG) has no row: its peak is not that of the device.
    """
    if re.search(r"\bmig\b", device_name.lower()):
        return None
    found = {
        len(alias): row
        for row in DEVICES
        for alias in (row.name, *row.aliases)
        if re.search(rf"(?<![a-z0-9]){re.escape(alias.lower())}(?![a-z0-9])", device_name.lower())
    }
    return found[max(found)] if found else None


def peak_flops(hw: Hardware, dtype_name: str) -> float | None:
    """Dense peak of ``hw`` in FLOP/s for "bfloat16", "float16", "float32", "tf32" or "fp8"; None if it is not known.

    float32 without TF32 runs on the vector units: ask for "tf32" where matrix products use it.
    """
    return hw.peaks.get(dtype_name)
