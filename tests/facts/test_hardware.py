"""The table of accelerators: rows are found by name, and their numbers agree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from composer3d.facts.calibration import PARTS, Observation, toml_of
from composer3d.facts.errors import DeviceError
from composer3d.facts.hardware import CPU, DEVICES, by_name, find, peak_flops, read_row


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
        ("NVIDIA H20", "H20-96GB"),
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
    modules = "composer3d.facts.hardware, composer3d.runtime.log, composer3d.models.counts"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_person_may_shorten_a_name() -> None:
    for name, row in (
        ("H100", "H100-80GB SXM"),
        ("h200", "H200-141GB SXM"),
        ("A100-80GB", "A100-80GB"),
        ("A100", "A100-40GB"),
        ("H100-96GB-HBM2e", "H100-96GB HBM2e"),
        ("MI300X", "MI300X-192GB"),
        ("H20", "H20-96GB"),
        ("cpu", "CPU"),
    ):
        found = by_name(name)
        assert found is not None
        assert found.name == row
    assert by_name("") is None
    assert by_name("H1") is None


def test_rows_have_what_the_planner_needs() -> None:
    for row in (*DEVICES, CPU):
        assert row.links is not None
        assert row.memory_bytes_s > 0
        # A measured rate cannot exceed the peak of the datasheet.
        assert row.matrix_rate("bfloat16") <= row.peaks["bfloat16"]
        assert row.links.ring_bytes_s <= row.links.nvlink_bytes_s
    with pytest.raises(DeviceError, match="A100-40GB has no peak for fp8"):
        DEVICES[0].matrix_rate("fp8")


GOOD_ROW = """
name = "Mine"
memory_gib = 96
memory_gb_s = 4000
nvlink_gb_s = 450
nic_gbit = 400
[matrix_tflops]
bfloat16 = 800
"""


KEPT = 'base = "H100"\n[[calibration]]\nerror = 0.1\nshares = { tp = 0.5 }\n'


def test_a_row_keeps_what_runs_measured(tmp_path: Path) -> None:
    path = tmp_path / "row.toml"
    seen = Observation(0.1 / 3, {**dict.fromkeys(PARTS, 0.0), "tp": 1 / 7})
    path.write_text('base = "H100"\n' + toml_of(seen) + toml_of(seen))
    row = read_row(str(path))
    assert row._replace(calibration=()) == by_name("H100")
    assert row.calibration == (seen, seen)
    path.write_text(GOOD_ROW + toml_of(seen))
    row = read_row(str(path))
    assert row.calibration == (seen,)
    # Its products were measured, and a limit of its power that nobody gave is not one.
    assert row.is_measured
    assert row.power_w == 0


def test_a_row_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "row.toml"
    path.write_text(GOOD_ROW)
    row = read_row(str(path))
    assert row.matrix_rate("bfloat16") == 800e12
    assert row.links is not None
    assert row.links.nic_bytes_s == 50e9
    assert row.links.ring_bytes_s == 0.8 * 450e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 96", "memory_gib = nan", "memory_gib = NaN must be a number above 0"),
        ("memory_gib = 96", "memory_gib = true", "memory_gib = true must be a number above 0"),
        ("bfloat16 = 800", "bfloat16 = -1", "matrix_tflops.bfloat16 = -1 must be"),
        ("nic_gbit = 400", "", "the key 'nic_gbit' is missing"),
        ("nic_gbit = 400", "nic_gbit = 400\ncolour = 1", "unknown key 'colour'"),
        ("nic_gbit = 400", 'nic_gbit = 400\ngeneration = "x"', 'generation = "x" must be one of'),
        ('name = "Mine"', "name = ", "cannot be read as a row of hardware"),
        ('name = "Mine"', 'name = "a\\u001b[31m"', "name must be a text of 1 to 80 printable"),
        ('name = "Mine"', "name = 3", "name must be a text of 1 to 80 printable"),
        ("memory_gib = 96", f"memory_gib = 1{'0' * 400}", "(line 3: 'memory_gib' must be"),
        ("memory_gib = 96", "memory_gib = 1e-300", "must be a number above 0: at least 1e-09"),
        ("bfloat16 = 800", "int4 = 800", "unknown dtype 'int4' in matrix_tflops; use bfloat16"),
        ("bfloat16 = 800", '"a\\u001b" = 8', "unknown dtype 'a\\x1b' in matrix_tflops"),
        ("nic_gbit = 400", "nic_gbit = 400\ndomain = 8.5", "domain = 8.5 must be a whole number"),
        ("nic_gbit = 400", "nic_gbit = 400\ndomain = true", "domain = true must be a whole"),
        ("nic_gbit = 400", f"nic_gbit = {'[' * 30000}", "cannot be read as a row of hardware"),
        ('name = "Mine"', 'base = "H100"', "beside base, a row has calibration alone, not '"),
        (GOOD_ROW, 'base = "abacus"', 'base = "abacus" must be a device: A100-40GB'),
        (GOOD_ROW, "base = 3", "base = 3 must be a device"),
        (GOOD_ROW, KEPT.replace("0.1", "1e9"), "calibration.error = 1000000000.0 must be a number"),
        (GOOD_ROW, KEPT.replace("0.1", "nan"), "calibration.error = NaN must be a number"),
        (GOOD_ROW, KEPT.replace("0.5", "-1"), "calibration.shares.tp = -1 must be a number from 0"),
        (GOOD_ROW, KEPT.replace("tp", "luck"), "unknown part 'luck' in calibration.shares; use tp"),
        (GOOD_ROW, KEPT.replace("error", "mistake"), "must have the keys error and shares"),
        (GOOD_ROW, KEPT.replace("{ tp = 0.5 }", "4"), "shares must be a table of numbers"),
        (GOOD_ROW, 'base = "H100"\ncalibration = 3', "calibration must be at most 16 tables"),
    ],
)
def test_broken_rows_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "row.toml"
    path.write_text(GOOD_ROW.replace(old, new))
    with pytest.raises(DeviceError, match=re.escape(message)):
        read_row(str(path))
