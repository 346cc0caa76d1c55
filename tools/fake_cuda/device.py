"""A CUDA device that exists in name only, for tensors without data on a machine without a GPU.

With it, the code of a step takes the branches that it takes on a GPU, and every operator tells on
which device its tensors are. Attention, RMSNorm and the like are one operator each, as on a GPU.
Nothing is computed. ``guard.cpp`` is what torch asks for in C++; this module replaces what it asks
for in Python.
"""

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_SOURCE = Path(__file__).with_name("guard.cpp")
_COMPUTE_CAPABILITY = (9, 0)


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None if this machine has none."""
    return shutil.which("c++") or shutil.which("g++")


def build(folder: Path) -> Path:
    """Compile ``guard.cpp`` for the torch of this process; return the library."""
    root = Path(torch.__file__).parent
    library = folder / "guard.so"
    command = [
        str(compiler()),
        *("-shared", "-fPIC", "-std=c++20", "-O0"),
        f"-I{root / 'include'}",
        str(_SOURCE),
        f"-L{root / 'lib'}",
        *("-lc10", "-ltorch_cpu", "-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return library


def _nothing(*arguments: Any, **keywords: Any) -> None:
    pass


def _yes(*arguments: Any) -> bool:
    return True


class _Event:
    """An event that has happened as soon as it is recorded: nothing runs beside the host."""

    __init__ = record = wait = synchronize = _nothing
    query = _yes


class _Stream:
    """A stream on which nothing runs."""

    device = torch.device("cuda", 0)
    stream_id = device_index = 0
    device_type = 1  # CUDA, in C++
    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


_STREAM = _Stream()


def _current_stream(*arguments: Any) -> _Stream:
    return _STREAM


def _current_device() -> int:
    return 0


def _one_device() -> int:
    return 1


def _random_state(*arguments: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _capability(*arguments: Any) -> tuple[int, int]:
    return _COMPUTE_CAPABILITY


def _itself(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return tensor


def _tolist(tensor: torch.Tensor) -> Any:
    """One copy of the whole tensor to the host, where the method of fake tensors reads each value.

    What lies on the host already and has data is no fake tensor.
    """
    return tensor.cpu().tolist() if tensor.is_cuda else _tolist_on_host(tensor)


_tolist_on_host: Any = FakeTensor.tolist


# Operators that have a kernel for CUDA. Where torch finds none, it computes them step by step.
_WITH_KERNEL = ("_fused_rms_norm", "silu_backward")

_kernels = torch.library.Library("aten", "IMPL")


def _never_called(*arguments: Any) -> Any:
    raise AssertionError("a kernel was called on tensors without data")


def install(library: Path) -> None:
    """Make the device known to this process, until it ends."""
    for operator in _WITH_KERNEL:
        _kernels.impl(operator, _never_called, "CUDA")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL).install()
    # torch describes operators on a CUDA device by tensors on it only where it may not start CUDA.
    FakeTensorMode.avoid_device_init = property(_yes)  # type: ignore[assignment]
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.current_stream = _current_stream
    cuda.stream = nullcontext
    cuda.is_available = cuda.is_initialized = _yes
    cuda.device_count = _one_device
    cuda.current_device = _current_device
    cuda.get_device_capability = _capability
    cuda.get_rng_state = _random_state
    cuda.set_rng_state = _nothing
    cuda.set_device = cuda.synchronize = cuda._lazy_init = _nothing
    tensor: Any = torch.Tensor
    tensor.record_stream = _nothing
    tensor.pin_memory = _itself
    fake_tensor: Any = FakeTensor
    fake_tensor.tolist = _tolist
