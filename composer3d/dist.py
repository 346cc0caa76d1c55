"""The process group of a job: device, backend, time-out, and the end of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from composer3d.errors import DeviceError, MeshError


def count_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The device of this rank: its LOCAL_RANK's GPU, or the CPU.

    Raises:
        DeviceError: cuda was asked for and this node has no GPU for this rank.
    """
    found = count_gpus()
    if name == "cpu" or (name == "auto" and found == 0):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= found:
        raise DeviceError(
            f"run.device = {name!r}: local rank {local} needs a GPU of its own, but this node shows {found}; "
            f'start fewer processes on a node, or set run.device = "cpu"'
        )
    return torch.device("cuda", local)


@contextmanager
def world(device: torch.device, *, timeout_s: float, store: dist.Store | None = None) -> Iterator[None]:
    """The default process group, formed from RANK and WORLD_SIZE and destroyed at the end.

    gloo on CPU, NCCL (with gloo for CPU tensors) on GPUs. A collective that waits longer than ``timeout_s`` fails.
    One process forms a group as well, so that a single rank runs the lines that many run.
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
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_same(what: str, value: object) -> None:
    """Refuse to go on where ranks see different things, as two nodes with different files would. Collective.

    Raises:
        MeshError: on every rank, with what each group of ranks sees.
    """
    seen: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, value)
    if any(other != seen[0] for other in seen):
        groups = {repr(other): [rank for rank, mine in enumerate(seen) if mine == other] for other in seen}
        lines = [f"ranks {', '.join(map(str, ranks))} see {shown}" for shown, ranks in groups.items()]
        raise MeshError([f"{what} must be the same on every rank; give all nodes the same files", *lines])


@contextmanager
def pool_world(*, timeout_s: float = 60.0) -> Iterator[torch.device]:
    """The world of a task in ``launch.Pool``: gloo on CPU, met through the task's rendezvous file."""
    device = torch.device("cpu")
    store = dist.FileStore(os.environ["COMPOSER3D_STORE"], int(os.environ["WORLD_SIZE"]))
    with world(device, timeout_s=timeout_s, store=store):
        yield device
