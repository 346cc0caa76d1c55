"""The process group of a job, its device and its store, and collectives of Python objects."""

import ctypes
import hashlib
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from composer3d.facts.errors import DeviceError, MachineError, MeshError, UserError, of_os_error
from composer3d.facts.text import one_line
from composer3d.runtime import devices, environment, open_files
from composer3d.runtime.environment import STORE_VARIABLE
from composer3d.runtime.meeting import wait_for_host, wait_in_store
from composer3d.runtime.shortage import lacks_memory, no_memory
from composer3d.runtime.torch_private import default_timeout

T = TypeVar("T")

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = 2**31 - 1

# Seconds for which rank 0 keeps the store after it is clear that the ranks do not fit together.
_GOODBYE_S = 2.0

# Of a value that ranks compare: two halves, each of which fits into an int64 with its sign.
_DIGEST_BYTES = 14

# In the report of a table that differs between ranks.
_MOST_KEYS = 8
_SHOWN_CHARACTERS = 80

# In the report of an error that only some ranks have.
_MOST_HOSTS = 8

# The backend of the default group, by the type of its device.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

# Beside the default group: the group of all ranks for tensors in host memory, such as the bytes of
# Python objects. None: there is no world, or the default group takes such tensors.
_host_group: dist.ProcessGroup | None = None

# By its name, what waits for the end of something that needs the groups.
_in_background: dict[str, Callable[[], None]] = {}

# Whether ``world`` has formed groups in this process.
_has_had_groups = False

# A group of gloo with at most this many ranks connects all of its pairs when it is formed.
_MOST_RANKS_ALL_PAIRS = 64


def count_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return this rank's device: the GPU with the number LOCAL_RANK, or the CPU.

    A scheduler may show each process only the GPU that is its own. So a process that sees one GPU
    takes it, whatever its LOCAL_RANK is. ``world`` refuses ranks that would share a GPU.

    Args:
        name: ``run.device`` of the recipe. "auto" means "cuda" if this node has a GPU, and "cpu"
            otherwise.

    Raises:
        DeviceError: this rank needs a GPU, but its node has too few. Or "auto" finds no GPU in a
            job of several nodes, where the other nodes might choose differently.
    """
    gpus = count_gpus()
    has_other_nodes = environment.world_size() > environment.local_world_size()
    if name == "auto" and gpus == 0 and has_other_nodes:
        raise DeviceError(
            'run.device = "auto" found no GPU on this node, but other nodes may have GPUs; '
            'set run.device = "cuda" or "cpu" in a job of several nodes'
        )
    if name == "cpu" or (name == "auto" and gpus == 0):
        return torch.device("cpu")

    local_rank = environment.local_rank()
    if gpus == 1:
        return torch.device("cuda", 0)
    if local_rank >= gpus:
        raise DeviceError(
            f"run.device = {name!r}: local rank {local_rank} needs a GPU of its own, but this node "
            f'shows {gpus}; start fewer processes on each node, or set run.device = "cpu"'
        )
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next step. Without glibc, do nothing.

    By default glibc maps a large tensor when it is made and unmaps it when it is freed. On a CPU,
    every step would then pay for the page faults of all its activations.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)


def open_store(*, timeout_s: float = 600.0) -> dist.Store:
    """Open the store through which the ranks of this job meet. All ranks must call it together.

    Args:
        timeout_s: how long an operation on the store may wait, and how long the ranks may take to
            meet.

    Returns:
        The file store of ``launch``; or torchrun's store, with a key prefix for this start of the
        job; or a store in memory, if this process is the only rank.

    Raises:
        MeshError: under torchrun, ranks or the store are missing after ``timeout_s``.
        MachineError: this process may not open as many files as it needs connections.
    """
    rank, size = environment.rank(), environment.world_size()
    timeout = timedelta(seconds=timeout_s)
    is_host = rank == 0 and not environment.uses_store_of_agent()
    open_files.allow(rank, size, hosts_store=is_host)

    if environment.has_launcher():
        file_store = dist.FileStore(os.environ[STORE_VARIABLE], size)
        file_store.set_timeout(timeout)
        return file_store

    address = environment.store_address()
    if address is None:  # this process is alone
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
        return dist.HashStore()

    deadline_s = time.monotonic() + timeout_s
    shown = f"{address[0]}:{address[1]}"
    try:
        wait_for_host(*address, is_host=is_host, deadline_s=deadline_s)
        store = _connect_to_store(*address, is_host=is_host, size=size, timeout=timeout)
        left_s = max(0.0, deadline_s - time.monotonic())
        prefix = agree_on_round(store, rank, size, timeout_s=left_s)
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            raise MeshError(
                f"rank 0 cannot open the job's store at {shown}: the port is in use, by another "
                "job or by a second process with RANK = 0; set another MASTER_PORT, and give each "
                "process a RANK of its own"
            ) from error
        raise MeshError(
            f"rank {rank} did not meet all {size} ranks within {timeout_s:g} s at {shown}, the "
            f"job's store (MASTER_ADDR, MASTER_PORT): {reason}; start the job on all of its nodes, "
            "and see that they can reach that address"
        ) from error
    return dist.PrefixStore(prefix, store)


def _connect_to_store(
    host: str, port: int, *, is_host: bool, size: int, timeout: timedelta
) -> dist.Store:
    """Return a client of the store at ``host``, which listens. ``is_host`` opens the store there.

    Raises OSError, DistNetworkError or DistStoreError.
    """
    made: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            # No rank waits for the others here: ``agree_on_round`` can name the missing ones.
            store = dist.TCPStore(
                host,
                port,
                size,
                is_host,
                timeout,
                wait_for_workers=False,
                multi_tenant=not environment.uses_store_of_agent(),
            )
        except Exception as error:
            made.append(error)
        else:
            made.append(store)

    # In a thread of its own: torch waits without a limit for a server that accepts and is silent.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + 1.0)
    found = made[0] if made else TimeoutError(0, "what listens there is not the store of a job")
    if isinstance(found, Exception):
        raise found
    return found


def rank_0_holds_store() -> bool:
    """Return whether the store of ``open_store`` is in the process of rank 0.

    Otherwise it is in an agent of torchrun or in a file, or this process is the only rank.
    """
    return environment.store_address() is not None and not environment.uses_store_of_agent()


def agree_on_round(store: dist.Store, rank: int, size: int, *, timeout_s: float) -> str:
    """Return a key prefix that all ranks of this start of the job share, and no earlier start had.

    All ranks call it together; it communicates through the store.

    torchrun keeps its store when it restarts the ranks, so the keys of earlier starts are still
    there. Each node counts its restarts separately, so no number is the same on all nodes.
    Therefore each rank writes a greeting with a random word. Rank 0 answers every word with the
    name of the round. An old greeting, or an old answer, contains an old word. When rank 0 sees
    that a greeting has changed, it answers again with a new name.

    Args:
        store: the store that torchrun keeps.
        rank: the rank of this process.
        size: the number of ranks.
        timeout_s: how long to wait for the other ranks.

    Raises:
        MeshError: ranks are missing after ``timeout_s``, or contradict each other.
    """
    own_word = uuid.uuid4().hex
    place = f"process {os.getpid()} on {socket.gethostname()}"
    own_greeting = f"{own_word} {size} {place}"
    deadline_s = time.monotonic() + timeout_s
    greeting_keys = [f"composer3d/greeting/{peer}" for peer in range(size)]
    answer_key = f"composer3d/answer/{rank}"
    # torchrun numbers the ranks, and old greetings are in its store. Elsewhere each one is of now.
    is_of_script = "TORCHELASTIC_RUN_ID" not in os.environ
    store.set(greeting_keys[rank], own_greeting)

    answered: list[bytes] = []  # the greetings that rank 0 answered last, by rank
    joined_name = ""
    while time.monotonic() < deadline_s:
        if rank == 0 and store.check(greeting_keys):
            greetings = store.multi_get(greeting_keys)
            if greetings != answered:
                answered = greetings
                new_name = uuid.uuid4().hex
                for peer, greeting in enumerate(greetings):
                    word = greeting.split()[0].decode()
                    store.set(f"composer3d/answer/{peer}", f"{new_name} {word}")

        if store.check([answer_key]):
            name, _, answered_word = store.get(answer_key).decode().partition(" ")
            if answered_word == own_word and name != joined_name:
                joined_name = name
                if store.add(f"composer3d/{name}/joined", 1) == size:
                    store.set(f"composer3d/{name}/all", "1")

        if joined_name and store.check([f"composer3d/{joined_name}/all"]):
            return f"composer3d/{joined_name}"
        if is_of_script:
            _refuse_contradictions(store, rank, size, own_greeting)
        time.sleep(0.05 + size / 20_000)  # thousands of ranks must not keep the store busy

    missing = [peer for peer, key in enumerate(greeting_keys) if not store.check([key])]
    who = f": {describe_ranks(missing)} did not come" if missing else ""
    raise MeshError(
        f"rank {rank} did not meet all {size} ranks within {timeout_s:.0f} s{who}; "
        "start the job on all of its nodes"
    )


def _refuse_contradictions(store: dist.Store, rank: int, size: int, own_greeting: str) -> None:
    """Raise MeshError on all ranks if two have the same RANK, or another WORLD_SIZE than rank 0.

    Every rank looks at its own greeting and at that of rank 0, in one or two requests.
    """
    key = "composer3d/contradiction"
    found = store.get(f"composer3d/greeting/{rank}").decode()
    if found != own_greeting:
        _, _, other = found.split(" ", 2)
        _, _, own = own_greeting.split(" ", 2)
        store.compare_set(
            key,
            "",
            f"RANK = {rank} is set for two processes, {own} and {other}: each needs a number of "
            "its own; the script that starts the processes sets it",
        )
    elif rank != 0 and store.check(["composer3d/greeting/0"]):
        size_of_0 = int(store.get("composer3d/greeting/0").split()[1])
        if size_of_0 != size:
            store.compare_set(
                key,
                "",
                f"WORLD_SIZE = {size_of_0} on rank 0, but {size} on rank {rank}: all ranks need "
                "the same number; the script that starts the processes sets it",
            )
    if store.check([key]):
        line = store.get(key).decode()
        if rank == 0:
            time.sleep(_GOODBYE_S)  # the store is in this process: let the others read the line
        raise MeshError(line)


@contextmanager
def world(
    device: torch.device, *, timeout_s: float = 600.0, store: dist.Store | None = None
) -> Iterator[torch.device]:
    """Form the default process group from RANK and WORLD_SIZE, and destroy it at the end.

    The backend is gloo on a CPU, and NCCL on a GPU. NCCL takes no tensor in host memory. So on a
    GPU a second group of all ranks is formed, with gloo, which carries Python objects
    (``gather_objects`` and the functions that call it) and ``max_over_ranks``. DeviceMesh splits
    the groups of its axes from the default group, so these have NCCL alone.

    A single process forms a group too, so that one rank runs the same code as many. The end waits
    for what ``begin_in_background`` has named. After an error it does not, and does not destroy the
    groups.

    gloo connects two ranks when they first exchange something, unless TORCH_GLOO_LAZY_INIT=0 is
    set. A rank then waits for five time-outs for a peer that hangs. So the ranks meet in the store
    first, with one time-out, and then connect (``_connect``). All further groups are formed by
    ``form_group`` and ``form_mesh``, which do the same.

    Args:
        device: the device of this rank; the context yields it.
        timeout_s: how long a collective may wait for its peers before it fails. Groups that are
            created inside the context without a time-out get this one.
        store: the store through which the ranks meet; None calls ``open_store``.

    Raises:
        DeviceError: two ranks have the same GPU (``devices.refuse_shared_gpus``).
    """
    global _host_group, _has_had_groups
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    rank, size = environment.rank(), environment.world_size()
    if store is None:
        store = open_store(timeout_s=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Before the group is formed: NCCL would fail with an error that names no rank.
        devices.refuse_shared_gpus(store, devices.gpu_of(device), rank=rank, size=size)
    backend = _BACKENDS[device.type]
    timeout = timedelta(seconds=timeout_s)
    _has_had_groups = True
    with default_timeout(timeout):
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if backend != "gloo":
            # NCCL has connected all ranks by now, because it knows the device.
            _host_group = dist.new_group(backend="gloo", timeout=timeout)
        wait_in_store(store, "composer3d/world", size)
        _connect(_host_group or cast(dist.ProcessGroup, dist.group.WORLD))
        _in_background.clear()  # what a world that ended with an error has left
        yield device
        # After an error this is skipped: NCCL would wait for peers that are stuck in a collective,
        # and would delay the report of the error.
        for what in list(_in_background):
            wait_for(what)
        _host_group = None
        dist.destroy_process_group()


def begin_in_background(what: str, wait: Callable[[], None]) -> None:
    """Name what goes on in the background with the groups, so that ``world`` waits for it.

    Args:
        what: its name; a later one of the same name replaces it.
        wait: waits for its end, and raises its error.
    """
    _in_background[what] = wait


def wait_for(what: str) -> None:
    """Wait for what ``begin_in_background`` has named, if anything, and raise its error."""
    wait = _in_background.pop(what, None)
    if wait is not None:
        wait()


def form_group(
    ranks: Sequence[int] | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> dist.ProcessGroup:
    """Form a group, as ``torch.distributed.new_group`` does. Collective over all ranks.

    A rank that does not come is noticed within the time-out of the world, whatever ``timeout_s``
    is. See ``form_mesh`` for how.

    Args:
        ranks: the ranks of the group; None for all.
        backend: None for that of the default group.
        timeout_s: the time-out of the group's collectives; None for that of the world.

    Returns:
        The group. On a rank outside of it, what torch returns for such a rank.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)

    def form() -> dist.ProcessGroup:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        return cast(dist.ProcessGroup, group)

    return _form(form, lambda group: [group])


def form_disjoint_groups(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Form groups that share no rank, each as ``form_group``. Collective over all ranks.

    NCCL splits one communicator for all of them; gloo forms one after the other.

    Args:
        groups: the ranks of each group, the same on all ranks.

    Returns:
        The group that has this rank; None if none has it.
    """
    rank, backend = dist.get_rank(), dist.get_backend()

    def form() -> dist.ProcessGroup | None:
        if backend == "nccl":
            return dist.split_group(split_ranks=[list(ranks) for ranks in groups])
        own = None
        for ranks in groups:
            # A group of a fake world that lacks this rank would be thrown away.
            if rank in ranks or backend != "fake":
                formed = dist.new_group(list(ranks))
                own = formed if rank in ranks else own
        return own

    return _form(form, lambda group: [] if group is None else [group])


def form_mesh(make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Return the mesh that ``make`` returns, of which it forms groups. Collective over all ranks.

    The ranks meet before ``make``: NCCL waits without a limit for a rank that does not come to
    the split of a communicator. Groups of gloo then connect in the world's time-out, instead of
    in five of them at the first exchange of each group. Groups of NCCL are connected by the
    split, so nothing is exchanged over them, and no GPU waits.

    Args:
        make: forms groups on all ranks, the same number on each.
    """
    return _form(make, lambda mesh: mesh.get_all_groups())


def _form(make: Callable[[], T], groups_of: Callable[[T], Sequence[dist.ProcessGroup]]) -> T:
    """Call ``make``, which forms groups on all ranks, and let the ranks of each group connect."""
    if not _has_had_groups:
        # The groups of a fake world connect nothing.
        return make()
    world_group = _host_group or cast(dist.ProcessGroup, dist.group.WORLD)
    _wait_for_all(world_group)
    made = make()
    # A rank that hangs is noticed here, where the connections exist, within one time-out.
    _wait_for_all(world_group)
    for group in groups_of(made):
        if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_backend(group) == "gloo":
            _connect(group)
    return made


def _wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until all ranks of a gloo group are here: a barrier of about log2(n) messages."""
    options = dist.BarrierOptions()
    # ``dist.barrier`` would take the GPU of a process that has one.
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def _connect(group: dist.ProcessGroup) -> None:
    """Connect the pairs of ranks of a gloo group that exchange something later.

    Collective over the ranks of ``group``. All of them are there.

    A small group connects all of its pairs. A large one connects each rank to those at distances
    of 1, 2, 4 and so on, as gloo's rings and trees do, and to the first rank, which gathers. So
    the number of connections of a world grows with n log n, not with the square of n.
    """
    size, group_rank = group.size(), group.rank()
    if size == 1:
        return
    _wait_for_all(group)
    own = torch.zeros(1)
    if size <= _MOST_RANKS_ALL_PAIRS:
        dist.all_to_all_single(torch.empty(size), own.expand(size).contiguous(), group=group)
    else:
        parts = [torch.empty(1) for _ in range(size)] if group_rank == 0 else None
        dist.gather(own, parts, group=group, group_dst=0)


def has_had_groups() -> bool:
    """Return whether ``world`` has formed groups in this process, destroyed since or not.

    Threads of gloo may still run then.
    """
    return _has_had_groups


def _group_for_host(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group for tensors in host memory: ``group``, or by default that of the world.

    None is the default group.

    Raises:
        ValueError: ``group`` lacks ranks.
    """
    if group is None:
        return _host_group
    if group.size() != dist.get_world_size():
        raise ValueError(
            f"the group has {group.size()} of {dist.get_world_size()} ranks; it must have all ranks"
        )
    return group


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest of each number over all ranks. Collective: one all-reduce of float64.

    The numbers are in host memory, so no GPU takes part, and the host waits for no GPU.
    """
    packed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(packed, dist.ReduceOp.MAX, _host_group)
    return packed.tolist()


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return the values of all ranks, by rank, on rank 0, and None on the others. Collective.

    Each rank sends its value to rank 0, padded to the size of the largest, after an all-reduce of
    one integer. Torch's ``gather_object`` sends the sizes of all ranks to all ranks.

    Args:
        value: the value of this rank. It is sent pickled.
        group: a group of all ranks that takes tensors in host memory, such as a second one with
            gloo; None for that of the world.

    Raises:
        ValueError: ``group`` lacks ranks.
    """
    group = _group_for_host(group)
    pickled = pickle.dumps(value)
    most = torch.tensor(len(pickled))
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    own = torch.frombuffer(bytearray(pickled.ljust(int(most))), dtype=torch.uint8)
    if dist.get_rank() != 0:
        dist.gather(own, dst=0, group=group)
        return None
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.gather(own, parts, dst=0, group=group)
    # A pickle says where it ends, so the padding is not read.
    return [pickle.loads(part.numpy().data) for part in parts]


class Gathering:
    """Bytes of all ranks on their way to rank 0. The host does not wait for them.

    Creating it is collective over all ranks: one gather in host memory.

    Args:
        content: the bytes of this rank, as many on every rank.
    """

    def __init__(self, content: bytes) -> None:
        self._own = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._parts: list[torch.Tensor] | None = None
        if dist.get_rank() == 0:
            self._parts = [torch.empty_like(self._own) for _ in range(dist.get_world_size())]
        work = dist.gather(self._own, self._parts, dst=0, group=_host_group, async_op=True)
        self._work = cast(dist.Work, work)

    def has_arrived(self) -> bool:
        """Return whether this rank's part is done. On rank 0, that is the arrival of all."""
        return self._work.is_completed()

    def await_contents(self) -> list[bytes] | None:
        """Wait, and return the bytes of each rank on rank 0, and None on the others."""
        self._work.wait()
        return None if self._parts is None else [part.numpy().tobytes() for part in self._parts]


def broadcast_object(
    value: T | None, group: dist.ProcessGroup | None = None, *, source: int = 0, keep: bool = True
) -> T | None:
    """Return the value of one rank on all ranks. Collective over all ranks.

    Args:
        value: the value of the rank ``source``, which is sent pickled. It is not read on others.
        group: as in ``gather_objects``.
        source: the global rank that has the value.
        keep: whether this rank wants the value. Otherwise it only passes the bytes on to others,
            and returns None.
    """
    group = _group_for_host(group)
    is_source = dist.get_rank() == source
    pickled = pickle.dumps(value) if is_source else b""
    size = torch.tensor(len(pickled))
    dist.broadcast(size, source, group)
    content = bytearray(pickled) if is_source else bytearray(int(size))
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), source, group)
    if is_source:
        return value
    return pickle.loads(content) if keep else None


def send_to_each(make: Callable[[int], torch.Tensor] | None, own: torch.Tensor) -> None:
    """Send each rank a tensor of its own from rank 0. Collective over all ranks.

    The sends follow each other, so rank 0 holds the tensor of one rank at a time, and each rank
    receives only its own.

    Args:
        make: on rank 0, returns the tensor of a rank; None on the others. It is in host memory,
            with the shape and dtype that the rank has in ``own``.
        own: is filled with this rank's tensor.
    """
    if make is None:
        dist.recv(own, 0, group=_host_group)
        return
    own.copy_(make(0))
    for rank in range(1, dist.get_world_size()):
        dist.send(make(rank), rank, group=_host_group)


def distinct_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return each value that some rank has, once, in the order of the lowest rank that has it.

    Collective over all ranks. Rank 0 gathers a digest of each rank, and one rank for each distinct
    value broadcasts it. So a rank receives as many values as there are distinct ones.

    Args:
        value: the value of this rank. Two values are the same if their ``repr`` is.
        group: as in ``gather_objects``.
    """
    digests = gather_objects(_digest_of(value), group)
    first_ranks = None
    if digests is not None:
        # In reverse, so that the lowest rank of each digest stays.
        lowest = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        first_ranks = sorted(lowest.values())
    sources = cast("list[int]", broadcast_object(first_ranks, group))
    return [cast(T, broadcast_object(value, group, source=source)) for source in sources]


def _digest_of(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST_BYTES).digest()


def on_all(what: str, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``function`` on every rank and return its value; if it fails on one rank, fail on all.

    Collective over all ranks: an all-reduce of one integer. Only after a failure, rank 0 gathers
    the errors and broadcasts the report.

    Args:
        what: the start of the line that reports an OSError, such as "data".
        function: the function to run.
        group: as in ``gather_objects``.

    Raises:
        UserError: on every rank, if ``function`` raises a UserError or an OSError on any rank, or
            lacks memory there. The class is that of the lowest failing rank's error: a MachineError
            if a machine fails or lacks something. The lines of equal errors appear once.
            They start with the numbers of the ranks that raised them, unless all ranks did, and
            with their hosts if the job has several.
    """
    value, error = _try(what, function)
    n_failed = torch.tensor(int(error is not None))
    dist.all_reduce(n_failed, group=_group_for_host(group))
    if not n_failed:
        return cast(T, value)

    found = gather_objects((error, socket.gethostname()), group)
    report = None if found is None else _report_of(*zip(*found, strict=True))
    raise cast(UserError, broadcast_object(report, group))


def check_machines(check: Callable[[], None]) -> None:
    """Run a check of this rank's device and machine, which others may pass: see ``on_all``.

    Collective over all ranks. Without a world, or in a fake one, it is a check of this rank alone.

    Raises what ``on_all`` does.
    """
    if dist.is_initialized() and dist.get_backend() != "fake":
        on_all("this machine", check)
    else:
        check()


def on_main(what: str, function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``function`` on rank 0, and return its value on all ranks; if it fails, fail on all.

    Collective over all ranks: a broadcast of the value. The arguments are those of ``on_all``.

    Raises:
        UserError: on every rank, if ``function`` raises a UserError or an OSError on rank 0.
    """
    value, error = _try(what, function) if dist.get_rank() == 0 else (None, None)
    value, error = cast(
        "tuple[T | None, UserError | None]", broadcast_object((value, error), group)
    )
    if error is not None:
        raise error
    return cast(T, value)


def _try(what: str, function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """Return the value of ``function``, or its error as a UserError if it can be one."""
    try:
        return function(), None
    except UserError as error:
        return None, error
    except Exception as error:
        if lacks_memory(error):
            # All ranks will have it, and one of them prints it.
            return None, MachineError(no_memory(what, error).lines)
        if isinstance(error, OSError):
            return None, of_os_error(what, error)
        raise


def _report_of(errors: Sequence[UserError | None], hosts: Sequence[str]) -> UserError:
    """Join the errors of all ranks, of which at least one is not None.

    Args:
        errors: by rank.
        hosts: the name of each rank's machine.
    """
    first = next(error for error in errors if error is not None)
    lines_of_ranks = [() if error is None else error.lines for error in errors]
    report = []
    for lines in dict.fromkeys(lines_of_ranks):
        if not lines:
            continue
        ranks = [rank for rank, other in enumerate(lines_of_ranks) if other == lines]
        prefix = "" if len(ranks) == len(errors) else f"{_name_ranks(ranks, hosts)}: "
        report += [prefix + line for line in lines]
    return type(first)(report)


def _name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the numbers of some ranks, and their hosts if those of all ranks are several."""
    text = f"rank {', '.join(map(str, ranks))}"
    if len(set(hosts)) == 1:
        return text
    own_hosts = list(dict.fromkeys(hosts[rank] for rank in ranks))
    further = len(own_hosts) - _MOST_HOSTS
    text += f" on {', '.join(own_hosts[:_MOST_HOSTS])}"
    return f"{text} and {further} more" if further > 0 else text


def check_same(what: str, value: object) -> None:
    """Check that ``value`` is the same on all ranks. Collective over all ranks.

    Two nodes may have different files, for example. The ranks compare digests, by an all-reduce of
    four integers. Only if these differ, rank 0 gathers the values and broadcasts the report.

    Args:
        what: the name of the value in the error, such as "the data".
        value: a value that can be pickled. Two values are the same if their ``repr`` is.

    Raises:
        MeshError: on every rank, if two ranks have different values. It lists the ranks of each
            value.
    """
    if is_same(value):
        return

    texts = gather_objects(repr(value))
    lines = None
    if texts is not None:
        lines = [f"{what} must be the same on every rank; give all nodes the same files"]
        for text in dict.fromkeys(texts):
            ranks = ", ".join(str(rank) for rank, other in enumerate(texts) if other == text)
            lines.append(f"ranks {ranks} see {text}")
    raise MeshError(cast("list[str]", broadcast_object(lines)))


def check_same_table(what: str, table: Mapping[str, str]) -> None:
    """Check that a table of texts is the same on all ranks, and name the keys that differ.

    Collective over all ranks: those of ``check_same``.

    Args:
        what: what the table is, such as "the recipe".
        table: texts by key.

    Raises:
        MeshError: on every rank, if a key has different texts on two ranks, or is absent on one.
    """
    if is_same(sorted(table.items())):
        return
    tables = gather_objects(dict(table))
    lines = None
    if tables is not None:
        lines = []
        for key in dict.fromkeys(key for of_rank in tables for key in of_rank):
            ranks_of: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(tables):
                ranks_of.setdefault(of_rank.get(key, "absent"), []).append(rank)
            if len(ranks_of) > 1:
                values = "; ".join(
                    f"{one_line(text, _SHOWN_CHARACTERS)} on {describe_ranks(ranks)}"
                    for text, ranks in ranks_of.items()
                )
                lines.append(f"{what} must be the same on every rank: {key} is {values}")
        if len(lines) > _MOST_KEYS:
            lines[_MOST_KEYS:] = [f"and {len(lines) - _MOST_KEYS} more keys"]
    raise MeshError(cast("list[str]", broadcast_object(lines)))


def describe_ranks(ranks: Sequence[int]) -> str:
    """Describe ascending ranks in a few words: ``rank 3``, or ``ranks 0-3, 8 and 50 more``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ranges[:8]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in shown)
    hidden = len(ranks) - sum(b - a + 1 for a, b in shown)
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {text} and {hidden} more" if hidden else f"{word} {text}"


def is_same(value: object) -> bool:
    """Return whether the ``repr`` of ``value`` is the same on all ranks: an all-reduce of digests.

    Collective over all ranks.
    """
    digest = _digest_of(value)
    half = _DIGEST_BYTES // 2
    parts = [int.from_bytes(part, "big") for part in (digest[:half], digest[half:])]
    # The largest digest, and minus the smallest.
    extremes = torch.tensor([*parts, *(-part for part in parts)])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, _host_group)
    return torch.equal(extremes[:2], -extremes[2:])


def pool_world(*, timeout_s: float = 60.0) -> AbstractContextManager[torch.device]:
    """Return the ``world`` of a task in ``launch.Pool``, which uses gloo on the CPU."""
    return world(torch.device("cpu"), timeout_s=timeout_s)
