"""What a machine has is read from files below /sys and /proc: here, of made-up machines."""

from pathlib import Path

from composer3d.doctor.links import Adapter, MachineLinks, find_links

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 {files}              files
Max locked memory         8388608              {locked}             bytes
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_adapter(root: Path, name: str, layer: str, state: str, driver: str) -> None:
    """Make an adapter with one port."""
    folder = root / "sys/class/infiniband" / name
    write(folder / "ports/1/link_layer", layer)
    write(folder / "ports/1/state", state)
    (folder / "device").mkdir()
    (folder / "device/driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")


def add_interface(root: Path, name: str, state: str) -> None:
    write(root / "sys/class/net" / name / "operstate", state)


def add_process(root: Path, files: str, locked: str, mounts: str) -> None:
    write(root / "proc/self/limits", LIMITS.format(files=files, locked=locked))
    write(root / "proc/self/mounts", mounts)


def test_a_machine_with_infiniband_and_switches(tmp_path: Path) -> None:
    add_adapter(tmp_path, "mlx5_0", "InfiniBand", "4: ACTIVE", "mlx5_core")
    add_adapter(tmp_path, "mlx5_1", "Ethernet", "1: DOWN", "mlx5_core")
    add_adapter(tmp_path, "odd", "Unspecified", "4: ACTIVE", "other")
    for name in ("lo", "docker0", "vethabc", "ib0", "eth0"):
        add_interface(tmp_path, name, "unknown" if name == "lo" else "up")
    add_interface(tmp_path, "eth1", "down")
    write(tmp_path / "proc/driver/nvidia-nvswitch/devices/0000:01:00.0", "")
    add_process(tmp_path, "1048576", "unlimited", "tmpfs /dev/shm tmpfs rw,nosuid 0 0")
    assert find_links(tmp_path) == MachineLinks(
        adapters=(
            Adapter("mlx5_0", "InfiniBand", True),
            Adapter("mlx5_1", "RoCE", False),
            Adapter("odd", "unknown", True),
        ),
        interfaces=("eth0", "ib0"),
        has_nvlink=True,
        limits={"open files": 1 << 20, "locked memory": None},
        shared_memory=None,
    )


def test_a_container_with_efa(tmp_path: Path) -> None:
    add_adapter(tmp_path, "rdmap79s0", "Unspecified", "4: ACTIVE", "efa")
    add_interface(tmp_path, "ens32", "up")
    mounts = "tmpfs /dev/shm tmpfs rw,size=1k 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k 0 0"
    add_process(tmp_path, "4096", "65536", mounts)
    found = find_links(tmp_path)
    assert found.adapters == (Adapter("rdmap79s0", "EFA", True),)
    assert found.shared_memory == 64 << 20
    assert found.limits == {"open files": 4096, "locked memory": 65536}


def test_what_no_file_says_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    write(tmp_path / "proc/self/limits", "Max open files  many  too many  files\nMax locked memory")
    assert find_links(tmp_path) == MachineLinks(
        adapters=(Adapter("mlx5_0", "unknown", None),),
        interfaces=(),
        has_nvlink=None,
        limits={},
        shared_memory=None,
    )


def test_this_machine_can_be_read() -> None:
    assert find_links().limits["open files"] is None or find_links().limits["open files"]
