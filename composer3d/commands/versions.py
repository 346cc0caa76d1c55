"""``composer3d --version --verbose``: what a bug report should say of this machine."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from composer3d.doctor.rank import driver_version
from composer3d.runtime.agreement import versions

# Packages besides torch whose version can decide what happens.
_PACKAGES = (
    *("torchdata", "triton", "numpy", "safetensors", "tokenizers", "tensorboard", "tomli"),
    *("xxhash", "transformers"),
)


def lines() -> Iterator[str]:
    """Yield a line for each fact: software, system and devices. It imports torch.

    No line holds a name of the user, of this machine or of a folder.
    """
    for name, number in versions().items():
        yield f"{name} {number}"
    yield f"Python {platform.python_version()}"
    for package in _PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            yield f"{package} is not installed"
    yield f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}".rstrip(", ")
    yield f"{platform.machine()}, {os.cpu_count()} cores"
    if not torch.cuda.is_available():
        yield "no GPU that torch can use"
        return
    yield f"driver {driver_version()}"
    for index in range(torch.cuda.device_count()):
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}"
