"""The process group of a job: device, backend, time-out, and the end of it."""

import ctypes
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist

from composer3d.runtime.starter import STORE
from composer3d.runtime.torch_private import default_timeout
from composer3d.spec.errors import DeviceError, MeshError, UserError

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


def open_store(*, timeout_s: float = 600.0) -> dist.Store:
    """The store through which the ranks of this job meet: that of our launcher, of torchrun, or of one process."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)
    if STORE in os.environ:
        file_store = dist.FileStore(os.environ[STORE], size)
        file_store.set_timeout(timeout)
        return file_store
    if (
        "MASTER_ADDR" not in os.environ or "RANK" not in os.environ
    ):  # one process, whatever a cluster's image sets
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
        return dist.HashStore()
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(agree_on_round(store, rank, size, timeout_s=timeout_s), store)


def agree_on_round(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> str:
    """A name that the ranks of this start of the job share, and no start before it. Collective over the store.

    torchrun keeps its store when it restarts the ranks, and numbers restarts apart on each node, so that keys of a
    start before are found there, and no number is the same on all nodes. Here each rank greets with a word of its own.
    Rank 0 answers every word with the round's name. An old greeting, or an old answer, has an old word in it: when
    rank 0 sees that a greeting has changed, it answers again under a new name.

    Raises MeshError where ranks are missing after ``timeout_s``.
    """
    word, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    store.set(f"composer3d/greeting/{rank}", word)
    known: list[bytes] = []
    joined, name = "", ""
    while time.monotonic() < until:
        if rank == 0 and store.check([f"composer3d/greeting/{peer}" for peer in range(size)]):
            words = store.multi_get([f"composer3d/greeting/{peer}" for peer in range(size)])
            if words != known:
                known, name = words, uuid.uuid4().hex
                for peer, greeted in enumerate(words):
                    store.set(f"composer3d/answer/{peer}", f"{name} {greeted.decode()}")
        if store.check([mine := f"composer3d/answer/{rank}"]):
            name, _, answered = store.get(mine).decode().partition(" ")
            if answered == word and name != joined:
                joined = name
                if store.add(f"composer3d/{name}/joined", 1) == size:
                    store.set(f"composer3d/{name}/all", "1")
        if joined and store.check([f"composer3d/{joined}/all"]):
            return f"composer3d/{joined}"
        time.sleep(0.05 + size / 20_000)  # thousands of ranks must not keep the store busy
    raise MeshError(
        f"rank {rank} met not all of the {size} ranks within {timeout_s:.0f} s; are all nodes started?"
    )


@contextmanager
def world(
    device: torch.device, *, timeout_s: float = 600.0, store: dist.Store | None = None
) -> Iterator[torch.device]:
    """The default process group, formed from RANK and WORLD_SIZE and destroyed at the end, unless an error ends it.

    gloo on CPU, NCCL (with gloo for CPU tensors) on GPUs. A collective that waits longer than ``timeout_s`` has
    lost its peers, and fails; so it does in every group that is made later and names no time of its own. One process
    forms a group as well, so that a single rank runs the lines that many run.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    with default_timeout(timeout):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=open_store(timeout_s=timeout_s) if store is None else store,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        yield device
        # Not after an error: NCCL would wait for peers that are stuck in a collective, and the error would
        # not be seen for as long.
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
        groups = {
            repr(other): [rank for rank, mine in enumerate(seen) if mine == other] for other in seen
        }
        lines = [
            f"ranks {', '.join(map(str, ranks))} see {shown}" for shown, ranks in groups.items()
        ]
        raise MeshError(
            [f"{what} must be the same on every rank; give all nodes the same files", *lines]
        )


def pool_world(*, timeout_s: float = 60.0) -> AbstractContextManager[torch.device]:
    """The world of a task in ``launch.Pool``: gloo on CPU."""
    return world(torch.device("cpu"), timeout_s=timeout_s)
