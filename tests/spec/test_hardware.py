"""The table of accelerators: rows are found by name, and their numbers agree."""

import subprocess
import sys

import pytest

from composer3d.spec.hardware import DEVICES, find, peak_flops


@pytest.mark.parametrize(
    ("device_name", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB PCIe"),
        ("NVIDIA H200", "H200-141GB SXM"),
        ("NVIDIA H200 NVL", "H200-141GB NVL"),
        ("nvidia b200", "B200-180GB SXM"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("AMD Instinct MI300X", "MI300X-192GB"),
        ("H200-141GB SXM", "H200-141GB SXM"),
    ],
)
def test_find_takes_the_longest_alias(device_name: str, row: str) -> None:
    found = find(device_name)
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize(
    "device_name",
    [
        "",
        "cpu",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_find_does_not_guess(device_name: str) -> None:
    assert find(device_name) is None


def test_every_row_finds_itself_by_name_and_aliases() -> None:
    for row in DEVICES:
        for name in (row.name, *row.aliases):
            assert find(f"Vendor {name}") is row


def test_peaks_are_dense_flops_by_dtype() -> None:
    h100 = find("NVIDIA H100 80GB HBM3")
    a100 = find("NVIDIA A100-SXM4-80GB")
    assert h100 is not None
    assert a100 is not None
    assert peak_flops(h100, "bfloat16") == peak_flops(h100, "float16") == 989e12
    assert peak_flops(h100, "float32") == 67e12
    assert peak_flops(a100, "fp8") is None
    assert peak_flops(a100, "float64") is None


def test_halves_of_a_row_agree() -> None:
    for row in DEVICES:
        assert row.peaks["tf32"] == pytest.approx(row.peaks["bfloat16"] / 2, rel=0.02), row.name
        assert row.peaks["float32"] < row.peaks["tf32"], row.name


def test_torch_stays_out() -> None:
    modules = "composer3d.spec.hardware, composer3d.runtime.log, composer3d.models.llama.counts"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
