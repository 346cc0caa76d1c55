"""What a machine has to reach others and its own GPUs with, and its limits. No torch here.

Everything is read from files below /sys and /proc. What they do not say is unknown.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Interfaces that lead to no other machine.
_VIRTUAL = re.compile("lo|docker|veth|virbr|br-|cni|flannel|cali|ifb|dummy|tunl|kube")

_STATES_UP = "up", "unknown"  # some drivers do not say

_LIMITS = {"Max open files": "open files", "Max locked memory": "locked memory"}


class Adapter(NamedTuple):
    """An adapter of RDMA.

    Attributes:
        name: such as mlx5_0.
        kind: "InfiniBand", "RoCE" or "EFA"; "unknown" for another driver or link.
        is_active: whether a port of it is active; None: unknown.
    """

    name: str
    kind: str
    is_active: bool | None


class MachineLinks(NamedTuple):
    """What a machine has.

    Attributes:
        adapters: of RDMA, by name.
        interfaces: of IP, by name, that are up and may lead to another machine.
        has_nvlink: whether its GPUs are behind NVSwitches; None: unknown. Links between GPUs
            without a switch are in no file.
        limits: hard limits of this process, "open files" and "locked memory" in bytes; None:
            unlimited. A limit that is unknown is absent.
        shared_memory: the size of /dev/shm in bytes; None: unknown.
    """

    adapters: tuple[Adapter, ...]
    interfaces: tuple[str, ...]
    has_nvlink: bool | None
    limits: dict[str, int | None]
    shared_memory: int | None


def find_links(root: Path = Path("/")) -> MachineLinks:
    """Return what this machine has.

    Args:
        root: the folder that has ``sys`` and ``proc``.
    """
    adapters = _folders(root / "sys/class/infiniband")
    interfaces = _folders(root / "sys/class/net")
    has_switch = any(_folders(root / "proc/driver/nvidia-nvswitch/devices"))
    return MachineLinks(
        adapters=tuple(map(_adapter, adapters)),
        interfaces=tuple(path.name for path in interfaces if _may_lead_elsewhere(path)),
        has_nvlink=True if has_switch else None,
        limits=dict(_limits(_text(root / "proc/self/limits"))),
        shared_memory=_shared_memory(_text(root / "proc/self/mounts")),
    )


def _folders(path: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(path.iterdir())
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _adapter(path: Path) -> Adapter:
    ports = _folders(path / "ports")
    layers = {_text(port / "link_layer") for port in ports}
    states = {_text(port / "state") for port in ports} - {""}
    driver = ""
    with suppress(OSError):
        driver = (path / "device/driver").readlink().name
    kind = "unknown"
    if driver == "efa":
        kind = "EFA"
    elif "InfiniBand" in layers:
        kind = "InfiniBand"
    elif "Ethernet" in layers:
        kind = "RoCE"
    is_active = any(state.endswith("ACTIVE") for state in states) if states else None
    return Adapter(path.name, kind, is_active)


def _may_lead_elsewhere(path: Path) -> bool:
    return not _VIRTUAL.match(path.name) and _text(path / "operstate") in _STATES_UP


def _limits(text: str) -> Iterator[tuple[str, int | None]]:
    for line in text.splitlines():
        for title, name in _LIMITS.items():
            if line.startswith(title):
                _, hard, *_ = [*line.removeprefix(title).split(), "", ""]
                if hard == "unlimited" or hard.isdigit():
                    yield name, None if hard == "unlimited" else int(hard)


def _shared_memory(mounts: str) -> int | None:
    """Return the size in the last line that mounts /dev/shm, which is in effect."""
    size = None
    for line in mounts.splitlines():
        if line.split()[1:2] == ["/dev/shm"]:
            found = re.search(r"[ ,]size=(\d{1,15})k(?:[ ,]|$)", line)
            size = int(found[1]) << 10 if found else None
    return size
