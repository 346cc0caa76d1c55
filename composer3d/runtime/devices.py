"""Settings of a process that trains on a GPU, and the check that no two ranks share one."""

import os
import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composer3d.facts.errors import DeviceError, RecipeError
from composer3d.recipe.schema import Recipe
from composer3d.runtime import environment
from composer3d.runtime.environment import (
    ALLOCATOR,
    ALLOCATOR_VARIABLES,
    RECORDED_COLLECTIVES,
    RECORDER_VARIABLES,
)
from composer3d.runtime.meeting import wait_in_store
from composer3d.runtime.torch_private import set_allocator

# The values of environment variables under which cuBLAS and NCCL are deterministic. The first one
# is set if the variable is absent. NCCL's other algorithms may add in the order of arrival.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_ALGO": ("Ring",)}


def prepare_gpu(recipe: Recipe, *, cores: int) -> str:
    """Make the settings of a process that trains on a GPU; return a line that says them.

    It must be called before CUDA starts.

    Args:
        recipe: ``run.deterministic`` and ``memory.cpu_offload`` are read.
        cores: as in ``offload_threads``.

    Raises:
        RecipeError: as ``make_deterministic``.
    """
    parts = [f"allocator {configure_allocator()}"]
    record_collectives()
    if recipe.run.deterministic:
        make_deterministic()
        parts.append("deterministic")
    if recipe.memory.cpu_offload:
        torch.set_num_threads(offload_threads(cores))
        parts.append(f"{torch.get_num_threads()} threads for the optimizer on the host")
    return f"GPU: {', '.join(parts)}"


def configure_allocator() -> str:
    """Configure torch's allocator of GPU memory, unless the environment does. Return the settings.

    It must be called before memory of a GPU is allocated.
    """
    for name in ALLOCATOR_VARIABLES:
        if name in os.environ:
            return f"{os.environ[name]} ({name})"
    set_allocator(ALLOCATOR)
    return ALLOCATOR


def record_collectives() -> None:
    """Let torch's flight recorder keep the last collectives of NCCL, unless the environment says.

    The report of lost ranks has them (``peers``). It must be called before NCCL starts.
    """
    if not any(name in os.environ for name in RECORDER_VARIABLES):
        os.environ[RECORDER_VARIABLES[0]] = RECORDED_COLLECTIVES


def make_deterministic() -> None:
    """Make the same computation on the same GPUs give the same bits. Call it before CUDA starts.

    torch takes deterministic kernels where it has them, also in the backward of attention, and
    raises RuntimeError in an operator that has none. composer3d calls no such operator.

    Raises:
        RecipeError: the environment demands something else of cuBLAS or NCCL.
    """
    wrong = [
        f"run.deterministic = true, but {name} = {os.environ[name]!r} in the environment; unset "
        f"it, or use {' or '.join(values)}"
        for name, values in _DETERMINISTIC.items()
        if os.environ.get(name, values[0]) not in values
    ]
    if wrong:
        raise RecipeError(wrong)
    for name, values in _DETERMINISTIC.items():
        os.environ.setdefault(name, values[0])

    torch.use_deterministic_algorithms(True)
    # torch would fill each new tensor with NaN. That finds values that are read before they are
    # written, and takes time.
    fills: Any = torch.utils.deterministic
    fills.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def offload_threads(cores: int) -> int:
    """Return the number of threads for the optimizer of parameters in host memory.

    It is OMP_NUM_THREADS if that is above 1, else this rank's share of the cores. A value of 1 is
    taken for no choice: torchrun and ``launch`` set it by themselves.

    Args:
        cores: the cores that this process may use. The LOCAL_WORLD_SIZE ranks of a node share them.
    """
    chosen = environment.threads()
    if chosen is not None and chosen > 1:
        return chosen
    return max(1, cores // environment.local_world_size())


class Gpu(NamedTuple):
    """A physical GPU.

    Attributes:
        host: the name of its host.
        uuid: tells it from all other GPUs, whatever number a process knows it by.
    """

    host: str
    uuid: str


def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU behind a device of this process."""
    return Gpu(socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))


def refuse_shared_gpus(store: dist.Store, gpu: Gpu, *, rank: int, size: int) -> None:
    """Check that no two ranks have the same GPU. All ranks call it together.

    It communicates through the store: at most six requests of each rank.

    Args:
        store: the store of the job.
        gpu: the GPU of this rank.
        rank: the rank of this process.
        size: the number of ranks.

    Raises:
        DeviceError: two ranks have the same GPU. Every rank raises it, and that of rank 0 has the
            line that names both.
    """
    first = int(store.compare_set(f"composer3d/gpu/{gpu.host}/{gpu.uuid}", "", str(rank)))
    if first != rank:
        both = f"ranks {min(first, rank)} and {max(first, rank)}"
        store.set("composer3d/gpu/shared", f"{both} would share the GPU {gpu.uuid} of {gpu.host}")
    wait_in_store(store, "composer3d/gpu", size)
    if not store.check(["composer3d/gpu/shared"]):
        return
    if rank != 0:
        raise DeviceError([])
    raise DeviceError(
        f"{store.get('composer3d/gpu/shared').decode()}: each process needs a GPU of its own; "
        "show every process its own GPU or all GPUs of its host, start fewer processes on each "
        'node, or set run.device = "cpu"'
    )
