"""The process group of a job: device, backend, time-out, and the end of it."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist

from composer3d.errors import DeviceError, MeshError, UserError

T = TypeVar("T")


def count_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """This rank's device: its LOCAL_RANK's GPU, or the CPU. Raises DeviceError where it needs a GPU and has none."""
    found = count_gpus()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if name == "auto" and found == 0 and size > int(os.environ.get("LOCAL_WORLD_SIZE", size)):
        raise DeviceError(
            'run.device = "auto" found no GPU on this node, and other nodes may have theirs; '
            'set run.device = "cuda" or "cpu" for a job of several nodes'
        )
    if name == "cpu" or (name == "auto" and found == 0):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= found:
        raise DeviceError(
            f"run.device = {name!r}: local rank {local} needs a GPU of its own, but this node shows {found}; "
            f'start fewer processes on a node, or set run.device = "cpu"'
        )
    return torch.device("cuda", local)


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees, for the next step; where it is not glibc, do nothing.

    By default large tensors are mapped when they are made and unmapped when they are freed: on a CPU every step then
    pays for the faults of all pages of its activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max, never = -1, -4, 2**31 - 1  # of malloc.h
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, never)


@contextmanager
def world(device: torch.device, *, timeout_s: float = 600.0, store: dist.Store | None = None) -> Iterator[torch.device]:
    """The default process group, formed from RANK and WORLD_SIZE and destroyed at the end, unless an error ends it.

    gloo on CPU, NCCL (with gloo for CPU tensors) on GPUs. A collective that waits longer than ``timeout_s`` has
    lost its peers, and fails. One process forms a group as well, so that a single rank runs the lines that many run.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if store is None and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    yield device
    # Not after an error: NCCL would wait for peers that are stuck in a collective, and hide the error for as long.
    dist.destroy_process_group()


def gather(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank gives, by rank. Collective over ``group``, or the job: all get all, pickled."""
    every = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine, group)
    return every


def on_all(what: str, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``function`` on every rank, and fail on all of them where it fails on one. Collective over ``group``.

    Raises UserError on every rank, of the lowest one's class: each different problem once, with the ranks that met it
    where those are not all.
    """
    value, problem = None, None
    try:
        value = function()
    except UserError as error:
        problem = error
    except OSError as error:
        problem = UserError(f"{what}: {error}")
    met = gather(problem, group)
    first = next(filter(None, met), None)
    if first is None:
        return cast(T, value)
    shown = [each.lines if each else () for each in met]
    lines = []
    for mine in dict.fromkeys(filter(None, shown)):
        who = [str(rank) for rank, other in enumerate(shown) if other == mine]
        prefix = "" if len(who) == len(met) else f"rank {', '.join(who)}: "
        lines += [prefix + line for line in mine]
    raise type(first)(lines)


def check_same(what: str, value: object) -> None:
    """Refuse to go on where ranks see different things, as two nodes with different files would. Collective.

    Raises MeshError on every rank, with what each group of ranks sees.
    """
    seen = gather(value)
    if any(other != seen[0] for other in seen):
        groups = {repr(other): [rank for rank, mine in enumerate(seen) if mine == other] for other in seen}
        lines = [f"ranks {', '.join(map(str, ranks))} see {shown}" for shown, ranks in groups.items()]
        raise MeshError([f"{what} must be the same on every rank; give all nodes the same files", *lines])


def pool_world(*, timeout_s: float = 60.0) -> AbstractContextManager[torch.device]:
    """The world of a task in ``launch.Pool``: gloo on CPU, met through the task's rendezvous file."""
    store = dist.FileStore(os.environ["COMPOSER3D_STORE"], int(os.environ["WORLD_SIZE"]))
    return world(torch.device("cpu"), timeout_s=timeout_s, store=store)
