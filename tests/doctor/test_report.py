"""What is slow, skewed or full is named, and a row of hardware is made that ``plan`` reads."""

from pathlib import Path
from typing import Any

import pytest

from composer3d.doctor.facts import RankFacts, Speed
from composer3d.doctor.report import (
    Disk,
    DoctorReport,
    as_json_of,
    bus_bandwidth,
    make_report,
    text_of,
)
from composer3d.doctor.row import row_of, toml_of
from composer3d.facts.hardware import read_row
from composer3d.recipe.resolve import load
from tools.prove.paths import RECIPE

MIB = 1 << 20


def facts_of(rank: int, **changes: Any) -> RankFacts:
    """The facts of one of 8 ranks on 2 nodes, with tp 2 and groups that show the links."""
    speeds = [
        Speed("tp", "all_gather", 1 << 10, 1e-4),
        Speed("tp", "all_gather", 16 * MIB, 0.016),
        Speed("node", "all_gather", 16 * MIB, 0.008),
        Speed("node", "reduce_scatter", 16 * MIB, 0.024),
        Speed("node", "all_reduce", 1 << 10, 4e-4),
        Speed("node", "all_reduce", 16 * MIB, 0.016),
        Speed("between nodes", "all_reduce", 1 << 10, 3e-3),
        Speed("between nodes", "all_gather", 16 * MIB, 0.1),
        Speed("between nodes", "reduce_scatter", 16 * MIB, 0.3),
    ]
    facts = RankFacts(
        name=f"rank {rank} (x)",
        node=rank // 4,
        host=f"host{rank // 4}",
        device="CPU (x86_64)",
        generation="cpu",
        memory_gib=16.0,
        matrix_flops={"float32": 50e9},
        memory_bytes_s=17e9,
        first_ranks={"tp": rank - rank % 2, "node": rank - rank % 4, "between nodes": rank % 4},
        speeds=speeds,
        clock_s=None,
        clock_error_s=0.0,
        driver="",
        python="3.11.9",
        is_crowded=False,
    )
    return facts._replace(**changes)


SIZES = {"tp": 2, "node": 4, "between nodes": 2}
DISK = Disk("/runs", free_gib=10.0, checkpoint_gib=1.0, kept=3)


def report_of(changes: dict[int, dict[str, Any]] | None = None, disk: Disk = DISK) -> DoctorReport:
    recipe = load(RECIPE).recipe
    ranks = [facts_of(rank, **(changes or {}).get(rank, {})) for rank in range(8)]
    return make_report(recipe, ranks, SIZES, [], {"torch": "2.13.0"}, disk)


def test_equal_ranks_have_nothing_to_report() -> None:
    report = report_of()
    assert (report.problems, report.notes) == ([], [])
    assert report.nodes == 2
    answer = as_json_of(report)
    assert answer["passed"]
    tp = answer["axes"]["tp"]
    assert (tp["ranks"], tp["groups"], tp["nodes"]) == (2, 4, 1)
    assert tp["collectives"]["all_gather"]["latency_us"] == pytest.approx(100)
    # Half of 16 MiB comes from the other rank.
    rate = tp["collectives"]["all_gather"]["bus_gb_s"][str(16 * MIB)]
    assert rate == pytest.approx(8 * MIB / 0.016 / 1e9)
    assert "between nodes" in text_of(report)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_bandwidth("all_reduce", 4, 100, 1.0) == 150
    assert bus_bandwidth("all_gather", 4, 100, 1.0) == 75
    assert bus_bandwidth("reduce_scatter", 4, 100, 1.0) == 75
    assert bus_bandwidth("all_to_all", 4, 100, 1.0) == 75
    assert bus_bandwidth("send_recv", 4, 100, 1.0) == 100


def test_a_slow_device_is_named() -> None:
    report = report_of({5: {"matrix_flops": {"float32": 20e9}}})
    assert report.slowest_rank == 5
    (line,) = report.notes
    assert line == (
        "slow: rank 5 (x) multiplies float32 matrices at 0.02 TFLOP/s, and the median of the other "
        "ranks at 0.05"
    )
    assert report.problems == []
    assert as_json_of(report)["matrix"]["slowest_rank"] == 5
    # The plan is made for the device that all others wait for.
    assert row_of(report).matrix_tflops == {"float32": pytest.approx(0.02)}


def test_a_slow_group_is_named_and_ranks_that_share_cores_are_not_judged() -> None:
    slow = [*facts_of(3).speeds[:1], Speed("tp", "all_gather", 16 * MIB, 0.040)]
    report = report_of({3: {"speeds": slow}})
    (line,) = report.notes
    assert line == (
        "slow: all_gather over tp takes 2.50 times as long as the median of the other groups, in "
        "the group of rank 2 (x)"
    )
    report = report_of({3: {"speeds": slow}, 0: {"is_crowded": True}})
    assert report.notes == [
        "a node has more ranks than cores: ranks wait for cores, so none is judged to be slow"
    ]


def test_of_two_the_slow_one_is_compared_with_the_other() -> None:
    recipe = load(RECIPE).recipe
    slow = facts_of(1, matrix_flops={"float32": 35e9})
    (line,) = make_report(recipe, [facts_of(0), slow], {}, [], {}, DISK).notes
    assert "at 0.035 TFLOP/s, and the median of the other ranks at 0.05" in line

    slow = facts_of(3, speeds=[*facts_of(3).speeds[:1], Speed("tp", "all_gather", 16 * MIB, 0.024)])
    ranks = [*map(facts_of, range(3)), slow]
    report = make_report(recipe, ranks, {"tp": 2}, [], {}, DISK)
    assert report.axes["tp"].slowest["all_gather"][16 * MIB].ratio == pytest.approx(1.5)
    assert "with rank 2, 1.50 x the median of the others" in text_of(report)
    (line,) = report.notes
    assert "takes 1.50 times as long" in line


def test_a_full_disk_fails() -> None:
    report = report_of(disk=DISK._replace(free_gib=2.5))
    (problem,) = report.problems
    assert problem.startswith("/runs has 2.5 GiB free, and 3 checkpoints of about 1.0 GiB need 3.0")
    assert not as_json_of(report)["passed"]
    assert "lower checkpoint.keep" in problem
    assert "WRONG   /runs has" in text_of(report)


def test_only_room_for_checkpoints_that_are_not_there_is_needed() -> None:
    disk = DISK._replace(free_gib=1.5, present=2)
    assert report_of(disk=disk).problems == []
    assert "at most 3 at a time, 2 there now" in text_of(report_of(disk=disk))
    (problem,) = report_of(disk=disk._replace(free_gib=0.5)).problems
    assert problem.startswith("/runs has 0.5 GiB free, and 1 more checkpoint of about 1.0 GiB ")
    # The room of a new checkpoint is needed with any number of them.
    assert "keep" not in problem


def test_checkpoints_in_an_object_store_need_no_disk() -> None:
    report = report_of(disk=DISK._replace(folder="s3://bucket/run", free_gib=None))
    assert report.problems == []
    assert "checkpoints: in s3://bucket/run, and none on this disk; a checkpoint" in text_of(report)
    assert as_json_of(report)["disk"]["free_gib"] is None


def test_clocks_and_software_that_differ_are_noted() -> None:
    report = report_of(
        {4: {"clock_s": -2.0, "clock_error_s": 0.001, "python": "3.12.1", "driver": "1.2"}}
    )
    clock, driver, python = report.notes
    assert clock == (
        "the clock of node 1 (host1) is 2.00 s behind that of node 0 (host0), to 0.001 s"
    )
    assert driver == "the driver differs between ranks: , 1.2"
    assert python == "Python differs between ranks: 3.11.9, 3.12.1"
    assert report_of({4: {"clock_s": 0.5}}).notes == []


def test_a_row_has_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "row.toml"
    path.write_text(toml_of(row_of(report_of())))
    row = read_row(str(path))
    assert row.name == "CPU (x86_64), measured"
    assert row.generation == "cpu"
    assert row.matrix_rates == {"float32": 50e9}
    assert row.memory_gib == 16
    # The planner takes 0.85 of it.
    assert row.memory_bytes_s == pytest.approx(20e9)
    assert row.links is not None
    # As much in a gather as in a reduction, which takes three times as long.
    assert row.links.ring_bytes_s == pytest.approx(12 * MIB / 0.016, rel=1e-4)
    assert row.links.all_reduce_bytes_s == pytest.approx(24 * MIB / 0.016, rel=1e-4)
    assert row.links.nic_bytes_s == pytest.approx(8 * MIB / 0.2, rel=1e-4)
    # Of 4 ranks on a node, and 2 across nodes.
    assert row.links.latency_s == pytest.approx(2e-4)
    assert row.links.nic_latency_s == pytest.approx(3e-3)


def test_a_row_says_what_it_takes_from_the_table(tmp_path: Path) -> None:
    h100 = {"device": "NVIDIA H100 80GB HBM3", "generation": "hopper", "memory_gib": 79.1}
    h100 |= {"matrix_flops": {"bfloat16": 700e12}, "speeds": [], "first_ranks": {}}
    recipe = load(RECIPE).recipe
    ranks = [facts_of(rank, **h100)._replace(node=0) for rank in range(2)]
    report = make_report(recipe, ranks, {}, [], {"torch": "2.13.0"}, DISK)
    path = tmp_path / "row.toml"
    path.write_text(toml_of(row_of(report)))
    assert "nic_gbit = 400  # from composer3d's table: not measured" in path.read_text()
    row = read_row(str(path))
    assert row.matrix_rates == {"bfloat16": 700e12}
    assert row.peaks["bfloat16"] == 989e12
    assert row.memory_bytes_s == 3.35e12
    assert row.links is not None
    assert row.links.nvlink_bytes_s == 450e9
    assert row.links.latency_s is None
