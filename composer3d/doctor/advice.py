"""Which variables of the environment, and which limits, matter on a machine. No torch here.

Each row of ``_ROWS`` is a fact of a page of who makes the software:

- NCCL's user guide, "Environment Variables" and "Runtime and MPI issues";
- "EFA Cheatsheet" of AWS (aws-samples/awsome-distributed-training);
- PyTorch's "ProcessGroupNCCL Environment Variables", "CUDA semantics", on the memory allocator, and
  "Distributed communication package", on network interfaces;
- NVIDIA's "CUDA Environment Variables", and Megatron-LM, which refuses one connection with FSDP.

Nothing here contradicts what composer3d sets itself (``runtime.environment``, ``runtime.launch``).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from composer3d.doctor.links import MachineLinks
from composer3d.facts.text import in_quotes
from composer3d.runtime import open_files
from composer3d.runtime.environment import ALLOCATOR, RECORDED_COLLECTIVES

# Where a row matters: on every machine, with GPUs, or with a network between machines.
Network = Literal["any", "GPUs", "several interfaces", "InfiniBand", "RoCE", "EFA", "TCP"]

_SHARED_MEMORY = 1 << 30  # bytes; the number of NCCL's user guide

# What is no variable of the environment.
_LIMITS = _OPEN_FILES, _LOCKED_MEMORY, _SHARED = "open files", "locked memory", "/dev/shm"


class _Recommendation(NamedTuple):
    """A variable, and the value that it should have.

    Attributes:
        networks: where it matters.
        variable: its name.
        value: what is recommended, in words.
        why: the reason.
        allowed: the values that are right; None: unset.
        may_differ: whether another value may be right as well, which only a person can know.
        names: other variables that do the same.
    """

    networks: tuple[Network, ...]
    variable: str
    value: str
    why: str
    allowed: tuple[str | None, ...] = (None,)
    may_differ: bool = False
    names: tuple[str, ...] = ()


_RDMA: tuple[Network, ...] = ("InfiniBand", "RoCE")
_UNSET = "unset"
_ROWS = (
    _Recommendation(
        ("several interfaces",),
        "GLOO_SOCKET_IFNAME",
        "the interface that the other machines reach",
        "by default it is the one to which the host's name resolves",
        (),
        may_differ=True,
    ),
    _Recommendation(
        ("several interfaces",),
        "NCCL_SOCKET_IFNAME",
        "the same",
        "NCCL may choose an interface that is up and leads nowhere, and hang at the start",
        (),
        may_differ=True,
    ),
    _Recommendation(
        _RDMA,
        "NCCL_IB_DISABLE",
        _UNSET,
        "with 1, tensors travel by IP sockets",
        (None, "0"),
    ),
    _Recommendation(
        _RDMA,
        "NCCL_IB_HCA",
        f"{_UNSET}, or the adapters for tensors",
        "name them if others, such as those of storage, are among the adapters",
        may_differ=True,
    ),
    _Recommendation(
        _RDMA,
        "NCCL_CROSS_NIC",
        f"{_UNSET}, which is 2; or by the network: 0 or 1",
        "0 is for a switch for each adapter (rails), 1 for all adapters at one switch",
        (None, "0", "1", "2"),
    ),
    _Recommendation(
        _RDMA,
        "NCCL_NET",
        f"{_UNSET}, or IB",
        "NCCL finds the adapters itself; with IB it does not fall back to sockets",
        (None, "IB"),
    ),
    _Recommendation(
        ("EFA",),
        "NCCL_NET",
        f"{_UNSET}, or the name of the plug-in",
        "NCCL takes aws-ofi-nccl if it finds it; with a name it does not fall back to sockets",
        may_differ=True,
    ),
    _Recommendation(
        ("EFA",),
        "FI_PROVIDER",
        f"{_UNSET}, or efa",
        "aws-ofi-nccl up to 1.5 needs efa; later ones choose it",
        (None, "efa"),
    ),
    _Recommendation(
        ("EFA",),
        "FI_EFA_USE_DEVICE_RDMA",
        _UNSET,
        "aws-ofi-nccl from 1.7 with libfabric from 1.18 needs none; before, 1 on p4 and p5",
        (None, "1"),
    ),
    _Recommendation(
        ("EFA",),
        "FI_EFA_USE_HUGE_PAGE",
        "0",
        "otherwise a fork may fail with 'Cannot allocate memory' when huge pages run out",
        ("0",),
    ),
    _Recommendation(("EFA",), "RDMAV_FORK_SAFE", _UNSET, "it can break newer kernels", (None,)),
    _Recommendation(
        ("TCP",),
        "NCCL_SOCKET_NTHREADS",
        f"{_UNSET}; for 100 Gbit/s try 4, with NCCL_NSOCKS_PERTHREAD = 4",
        "several sockets use more of a fast link; the product of both is at most 64",
        may_differ=True,
    ),
    _Recommendation(
        ("GPUs",),
        "NCCL_P2P_DISABLE",
        _UNSET,
        "with 1, GPUs of a machine do not use NVLink or PCIe directly",
        (None, "0"),
    ),
    _Recommendation(
        ("GPUs",),
        "NCCL_SHM_DISABLE",
        _UNSET,
        "with 1, GPUs without a direct link send through the network",
        (None, "0"),
    ),
    _Recommendation(
        ("GPUs",),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        f"{_UNSET}, which is 3",
        "with 0, ranks wait for a lost one for ever",
        (None, "1", "3"),
    ),
    _Recommendation(
        ("GPUs",),
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        f"{_UNSET}: composer3d sets {RECORDED_COLLECTIVES}",
        "the report of lost ranks has the last collectives",
        (None, RECORDED_COLLECTIVES),
        may_differ=True,
        names=("TORCH_FR_BUFFER_SIZE",),
    ),
    _Recommendation(
        ("GPUs",),
        "PYTORCH_ALLOC_CONF",
        f"{_UNSET}: composer3d sets {ALLOCATOR}",
        "freed memory of one size serves another; a value of yours replaces it",
        (None, ALLOCATOR),
        may_differ=True,
        names=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    _Recommendation(
        ("GPUs",),
        "CUDA_DEVICE_MAX_CONNECTIONS",
        f"{_UNSET}, which is 8",
        "with 1, kernels of all streams wait in one queue, and collectives of FSDP for products",
        (None, *map(str, range(2, 33))),
    ),
    _Recommendation(
        ("any",),
        "OMP_NUM_THREADS",
        "1, the launchers' value; more with memory.cpu_offload",
        "the threads of a rank on the host; ranks of a machine share its cores",
        ("1",),
        may_differ=True,
    ),
)


class Advice(NamedTuple):
    """A variable or a limit of this machine.

    Attributes:
        network: where it matters.
        name: of the variable, or of the limit.
        now: the value; None: not set, or unknown for a limit.
        value: what is recommended, in words.
        why: the reason.
        is_right: whether ``now`` is a recommended value; None: a person must know.
    """

    network: str
    name: str
    now: str | None
    value: str
    why: str
    is_right: bool | None


def networks_of(links: MachineLinks, *, has_gpus: bool) -> list[Network]:
    """Return which rows matter, apart from the adapters that no rank uses.

    Args:
        links: what the machine has.
        has_gpus: whether NCCL carries the tensors. gloo uses IP alone.
    """
    found: list[Network] = ["any"]
    if len(links.interfaces) > 1:
        found.append("several interfaces")
    if not has_gpus:
        return found
    found.append("GPUs")
    of_adapters: tuple[Network, ...] = ("InfiniBand", "RoCE", "EFA")
    kinds = {adapter.kind for adapter in links.adapters if adapter.is_active is not False}
    used = [kind for kind in of_adapters if kind in kinds]
    if used:
        return found + used
    # An adapter whose kind is unknown may carry tensors.
    return found if "unknown" in kinds else [*found, "TCP"]


def advise(
    links: MachineLinks,
    environment: Mapping[str, str],
    *,
    has_gpus: bool,
    ranks: int,
    is_alone: bool,
) -> list[Advice]:
    """Return what matters on this machine.

    Args:
        links: what the machine has.
        environment: the variables of a rank.
        has_gpus: whether NCCL carries the tensors.
        ranks: the number of ranks of the job.
        is_alone: whether composer3d has started all ranks, on this machine. It has set their
            interface then.
    """
    found = networks_of(links, has_gpus=has_gpus)
    advice = []
    for row in _ROWS:
        # The first network stands for all: the same row must not come twice.
        for network in [each for each in row.networks if each in found][:1]:
            by_composer3d = is_alone and row.variable.endswith("_SOCKET_IFNAME")
            advice.append(_of_row(row, network, environment, by_composer3d=by_composer3d))
    return advice + list(_limits(links, found, ranks))


def _of_row(
    row: _Recommendation, network: str, environment: Mapping[str, str], *, by_composer3d: bool
) -> Advice:
    names = (row.variable, *row.names)
    name = next((each for each in names if each in environment), row.variable)
    now = environment.get(name)
    if by_composer3d:
        why = "composer3d sets the loopback interface for ranks of one machine"
        return Advice(network, name, now, "as it is, for this job", why, True)
    is_right: bool | None = now in row.allowed
    if not is_right and row.may_differ:
        is_right = None
    return Advice(network, name, now, row.value, row.why, is_right)


def _limits(links: MachineLinks, networks: list[Network], ranks: int) -> Iterator[Advice]:
    need = open_files.needed(0, ranks, hosts_store=True)
    yield _of_limit(
        "any",
        links,
        _OPEN_FILES,
        need,
        f"at least {need} (ulimit -Hn)",
        "each connection of rank 0 is one; composer3d raises the soft limit itself",
    )
    for network in ("InfiniBand", "RoCE", "EFA"):
        if network in networks:
            yield _of_limit(
                network,
                links,
                _LOCKED_MEMORY,
                None,
                "unlimited (ulimit -l, or --ulimit memlock=-1 of a container)",
                "adapters read and write memory that is locked",
            )
            break
    if "GPUs" in networks:
        size = links.shared_memory
        yield Advice(
            "GPUs",
            _SHARED,
            None if size is None else f"{size >> 20} MiB",
            "at least 1 GiB (--shm-size=1g or --ipc host of a container)",
            "NCCL's ranks of a machine meet there",
            None if size is None else size >= _SHARED_MEMORY,
        )


def _of_limit(
    network: str, links: MachineLinks, name: str, need: int | None, value: str, why: str
) -> Advice:
    """Return the advice for a hard limit that must be ``need``, or with None unlimited."""
    if name not in links.limits:
        return Advice(network, name, None, value, why, None)
    limit = links.limits[name]
    is_right = limit is None or (need is not None and limit >= need)
    return Advice(network, name, "unlimited" if limit is None else f"{limit}", value, why, is_right)


def describe_links(links: MachineLinks) -> str:
    """Return in one line what a machine has."""
    adapters = [
        f"{adapter.name} ({adapter.kind}{_ACTIVITY[adapter.is_active]})"
        for adapter in links.adapters
    ]
    parts = [
        f"adapters of RDMA: {', '.join(adapters) or 'none'}",
        f"interfaces of IP: {', '.join(links.interfaces) or 'none'}",
        f"NVLink: {'by switches' if links.has_nvlink else 'unknown (nvidia-smi nvlink -s)'}",
    ]
    return "; ".join(parts)


_ACTIVITY = {True: "", False: ", not active", None: ", activity unknown"}


def lines_of(advice: list[Advice]) -> list[str]:
    """Return two lines for each variable and limit: first those that are not as recommended."""
    marks = {False: "LOOK", None: "?", True: "ok"}
    lines = []
    for each in sorted(advice, key=lambda each: list(marks).index(each.is_right)):
        absent = "unknown" if each.name in _LIMITS else "not set"
        now = absent if each.now is None else in_quotes(each.now, 40)
        lines.append(f"{marks[each.is_right]:>4}  {each.name}: {now}. Best: {each.value}")
        lines.append(f"        {each.why}")
    return lines


def advice_as_json(links: MachineLinks, advice: list[Advice]) -> dict[str, Any]:
    """Return both as JSON. What is unknown is null."""
    return {
        "adapters": [adapter._asdict() for adapter in links.adapters],
        "interfaces": list(links.interfaces),
        "nvlink": links.has_nvlink,
        "advice": [each._asdict() for each in advice],
    }
