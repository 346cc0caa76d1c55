"""Each network has its variables, and a value that is not as recommended comes first."""

from collections.abc import Mapping
from typing import Any

import pytest

from composer3d.doctor.advice import _ROWS, Advice, advice_as_json, advise, describe_links, lines_of
from composer3d.doctor.links import Adapter, MachineLinks
from composer3d.runtime.environment import ALLOCATOR_VARIABLES, RECORDER_VARIABLES

PLAIN = MachineLinks((), ("eth0",), None, {"open files": 4096, "locked memory": 65536}, 64 << 20)
TWO = PLAIN._replace(interfaces=("eth0", "ib0"))
ON_ALL = {"OMP_NUM_THREADS", "open files"}
ON_GPUS = ON_ALL | {
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "PYTORCH_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "/dev/shm",
}
ON_RDMA = {"NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_CROSS_NIC", "NCCL_NET", "locked memory"}
ON_EFA = {
    *("NCCL_NET", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_USE_HUGE_PAGE"),
    *("RDMAV_FORK_SAFE", "locked memory"),
}
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


def with_adapter(kind: str, *, is_active: bool | None = True) -> MachineLinks:
    return PLAIN._replace(adapters=(Adapter("mlx5_0", kind, is_active),))


def advice_of(
    links: MachineLinks, environment: Mapping[str, str] | None = None, **changes: Any
) -> dict[str, Advice]:
    """Return the advice by name, each of which must come once."""
    keywords = {"has_gpus": True, "ranks": 16, "is_alone": False} | changes
    found = advise(links, environment or {}, **keywords)
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


@pytest.mark.parametrize(
    ("links", "has_gpus", "names"),
    [
        (PLAIN, False, ON_ALL),
        (TWO, False, ON_ALL | INTERFACES),
        (with_adapter("InfiniBand"), False, ON_ALL),
        (PLAIN, True, ON_GPUS | {"NCCL_SOCKET_NTHREADS"}),
        (TWO, True, ON_GPUS | INTERFACES | {"NCCL_SOCKET_NTHREADS"}),
        (with_adapter("InfiniBand"), True, ON_GPUS | ON_RDMA),
        (with_adapter("RoCE"), True, ON_GPUS | ON_RDMA),
        (with_adapter("EFA", is_active=None), True, ON_GPUS | ON_EFA),
        (with_adapter("InfiniBand", is_active=False), True, ON_GPUS | {"NCCL_SOCKET_NTHREADS"}),
        (with_adapter("unknown"), True, ON_GPUS),
    ],
)
def test_each_network_has_its_variables(
    links: MachineLinks, has_gpus: bool, names: set[str]
) -> None:
    assert set(advice_of(links, has_gpus=has_gpus)) == names


def test_a_value_is_right_or_wrong_or_for_a_person_to_know() -> None:
    links = with_adapter("InfiniBand")._replace(interfaces=("eth0", "eth1"))
    before = advice_of(links)
    assert {name for name, each in before.items() if each.is_right is False} == {
        *("locked memory", "/dev/shm"),
    }
    assert {name for name, each in before.items() if each.is_right is None} == {
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    }
    variables = {
        "NCCL_IB_DISABLE": "1",
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_NET": "Socket",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
        "OMP_NUM_THREADS": "1",
    }
    good = {"open files": None, "locked memory": None}
    after = advice_of(links._replace(limits=good, shared_memory=1 << 30), variables)
    judged = {name: after[name].is_right for name in after if name in variables}
    assert judged == {
        "NCCL_IB_DISABLE": False,
        "NCCL_IB_HCA": None,
        "NCCL_NET": False,
        "CUDA_DEVICE_MAX_CONNECTIONS": False,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": False,
        "PYTORCH_CUDA_ALLOC_CONF": None,
        "OMP_NUM_THREADS": True,
    }
    assert all(after[name].is_right for name in ("open files", "locked memory", "/dev/shm"))
    assert after["NCCL_IB_HCA"].now == "mlx5_0"


def test_more_ranks_need_more_open_files() -> None:
    assert advice_of(PLAIN)["open files"].is_right
    assert advice_of(PLAIN, ranks=2048)["open files"].is_right is False


def test_what_is_unknown_is_neither_right_nor_wrong() -> None:
    links = with_adapter("EFA")._replace(limits={}, shared_memory=None)
    found = advice_of(links)
    for name in ("open files", "locked memory", "/dev/shm"):
        assert (found[name].now, found[name].is_right) == (None, None)
    (line,) = (line for line in lines_of(list(found.values())) if "/dev/shm" in line)
    assert line.startswith("   ?  /dev/shm: unknown. ")
    assert "NVLink: unknown" in describe_links(links)


def test_it_does_not_contradict_what_composer3d_sets() -> None:
    """Its own values are right, and it reads every name of a variable that it sets."""
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
    of_launcher = dict.fromkeys(INTERFACES, "lo")
    found = advice_of(TWO, own | of_launcher, is_alone=True)
    assert all(found[name].is_right for name in own | of_launcher)
    names = {name for row in _ROWS for name in (row.variable, *row.names)}
    assert names >= {*RECORDER_VARIABLES, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    assert set(ALLOCATOR_VARIABLES) - names == {"PYTORCH_HIP_ALLOC_CONF"}


def test_what_needs_a_look_comes_first_and_lines_are_short() -> None:
    links = with_adapter("EFA")._replace(interfaces=("eth0", "eth1"))
    lines = lines_of(list(advice_of(links, {"RDMAV_FORK_SAFE": "1" * 200}).values()))
    marks = [line[:4].strip() for line in lines if not line.startswith("     ")]
    assert marks == sorted(marks, key=["LOOK", "?", "ok"].index)
    assert marks[0] == "LOOK"
    assert max(map(len, lines)) <= 100


def test_json_has_all_of_it() -> None:
    links = with_adapter("RoCE")
    answer = advice_as_json(links, list(advice_of(links).values()))
    assert answer["adapters"] == [{"name": "mlx5_0", "kind": "RoCE", "is_active": True}]
    assert (answer["interfaces"], answer["nvlink"]) == (["eth0"], None)
    (found,) = (each for each in answer["advice"] if each["name"] == "NCCL_IB_DISABLE")
    assert found == {
        "network": "RoCE",
        "name": "NCCL_IB_DISABLE",
        "now": None,
        "value": "unset",
        "why": "with 1, tensors travel by IP sockets",
        "is_right": True,
    }
