"""The process group of a job: device, backend and time-out; and collectives of Python objects."""

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

from composer3d.runtime.starter import STORE_VARIABLE
from composer3d.runtime.torch_private import default_timeout
from composer3d.spec.errors import DeviceError, MeshError, UserError

T = TypeVar("T")

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1


def count_gpus() -> int:
    """The number of GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return this rank's device: the GPU with the number LOCAL_RANK, or the CPU.

    Args:
        name: ``run.device`` of the recipe. "auto" is "cuda" if this node has a GPU, and else
            "cpu".

    Raises:
        DeviceError: this rank needs a GPU and there is none for it; or "auto" finds no GPU in a
            job of several nodes, which could decide differently.
    """
    gpus = count_gpus()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if name == "auto" and gpus == 0 and world_size > local_world_size:
        raise DeviceError(
            'run.device = "auto" found no GPU on this node, but other nodes may have GPUs; '
            'set run.device = "cuda" or "cpu" in a job of several nodes'
        )
    if name == "cpu" or (name == "auto" and gpus == 0):
        return torch.device("cpu")

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= gpus:
        raise DeviceError(
            f"run.device = {name!r}: local rank {local_rank} needs a GPU of its own, but this node "
            f'shows {gpus}; start fewer processes on each node, or set run.device = "cpu"'
        )
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next step. Does nothing without glibc.

    By default glibc maps a large tensor when it is made and unmaps it when it is freed. On a CPU,
    every step would then pay for the page faults of all its activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def open_store(*, timeout_s: float = 600.0) -> dist.Store:
    """Open the store through which the ranks of this job meet.

    It belongs to our launcher, to torchrun, or to this process if it is the only one.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    timeout = timedelta(seconds=timeout_s)

    if STORE_VARIABLE in os.environ:
        file_store = dist.FileStore(os.environ[STORE_VARIABLE], size)
        file_store.set_timeout(timeout)
        return file_store

    # A single process. The image of a cluster may set one of the two variables all the same.
    if "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
        return dist.HashStore()

    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(agree_on_round(store, rank, size, timeout_s=timeout_s), store)


def agree_on_round(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> str:
    """Return a name that the ranks of this start of the job share, and no earlier start has.

    Collective over the store.

    torchrun keeps its store when it restarts the ranks, so the keys of earlier starts are still
    there. Each node counts its restarts separately, so no number is the same on all nodes.
    Therefore each rank greets with a random word. Rank 0 answers every word with the name of the
    round. An old greeting, or an old answer, contains an old word. When rank 0 sees that a
    greeting has changed, it answers again with a new name.

    Raises MeshError if ranks are missing after ``timeout_s``.
    """
    own_word = uuid.uuid4().hex
    deadline_s = time.monotonic() + timeout_s
    greeting_keys = [f"composer3d/greeting/{peer}" for peer in range(size)]
    answer_key = f"composer3d/answer/{rank}"
    store.set(greeting_keys[rank], own_word)

    answered_words: list[bytes] = []  # by rank 0, in its last answers
    joined_name = ""
    while time.monotonic() < deadline_s:
        if rank == 0 and store.check(greeting_keys):
            words = store.multi_get(greeting_keys)
            if words != answered_words:
                answered_words = words
                new_name = uuid.uuid4().hex
                for peer, word in enumerate(words):
                    store.set(f"composer3d/answer/{peer}", f"{new_name} {word.decode()}")

        if store.check([answer_key]):
            name, _, answered_word = store.get(answer_key).decode().partition(" ")
            if answered_word == own_word and name != joined_name:
                joined_name = name
                if store.add(f"composer3d/{name}/joined", 1) == size:
                    store.set(f"composer3d/{name}/all", "1")

        if joined_name and store.check([f"composer3d/{joined_name}/all"]):
            return f"composer3d/{joined_name}"
        time.sleep(0.05 + size / 20_000)  # thousands of ranks must not keep the store busy

    raise MeshError(
        f"rank {rank} did not meet all {size} ranks within {timeout_s:.0f} s; "
        "start the job on all of its nodes"
    )


@contextmanager
def world(
    device: torch.device, *, timeout_s: float = 600.0, store: dist.Store | None = None
) -> Iterator[torch.device]:
    """Form the default process group from RANK and WORLD_SIZE, and destroy it at the end.

    It uses gloo on CPU, and NCCL on GPUs, with gloo for CPU tensors. One process forms a group as
    well, so that a single rank runs the same code as many. After an error the group is not
    destroyed.

    Args:
        device: of this rank; the context yields it.
        timeout_s: a collective that waits longer has lost its peers and fails. Groups that are
            made inside without a time-out of their own get the same one.
        store: through which the ranks meet; None opens the job's.
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
        # Not after an error: NCCL would wait for peers that are stuck in a collective, and the
        # error would stay hidden for as long.
        dist.destroy_process_group()


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks, by rank. Collective over ``group``, or the job.

    The values are sent pickled.
    """
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def on_all(what: str, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``function`` on every rank and return its value; if it fails on one rank, fail on all.

    Collective over ``group``, or the job.

    Args:
        what: the subject of the line that reports an OSError, such as "data".
        function: what to run.
        group: None for all ranks.

    Raises:
        UserError: on every rank, if ``function`` raises a UserError or an OSError on any rank. It
            has the class of the lowest failing rank's error. It has the lines of each different
            error once, with the numbers of the ranks that raised it unless all did.
    """
    value, error = None, None
    try:
        value = function()
    except UserError as user_error:
        error = user_error
    except OSError as os_error:
        error = UserError(f"{what}: {os_error}")

    errors = all_gather_objects(error, group)
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return cast(T, value)

    lines_of_ranks = [() if error is None else error.lines for error in errors]
    report = []
    for lines in dict.fromkeys(lines_of_ranks):
        if not lines:
            continue
        ranks = [str(rank) for rank, other in enumerate(lines_of_ranks) if other == lines]
        prefix = "" if len(ranks) == len(errors) else f"rank {', '.join(ranks)}: "
        report += [prefix + line for line in lines]
    raise type(first)(report)


def check_same(what: str, value: object) -> None:
    """Check that ``value`` is the same on all ranks, as two nodes may have different files.

    Collective over all ranks.

    Raises MeshError on every rank, with the value that each group of ranks sees.
    """
    values = all_gather_objects(value)
    if all(other == values[0] for other in values):
        return
    lines = [f"{what} must be the same on every rank; give all nodes the same files"]
    ranks_by_text = {
        repr(seen): [str(rank) for rank, other in enumerate(values) if other == seen]
        for seen in values
    }
    for text, ranks in ranks_by_text.items():
        lines.append(f"ranks {', '.join(ranks)} see {text}")
    raise MeshError(lines)


def pool_world(*, timeout_s: float = 60.0) -> AbstractContextManager[torch.device]:
    """The world of a task in ``launch.Pool``: gloo on CPU."""
    return world(torch.device("cpu"), timeout_s=timeout_s)
