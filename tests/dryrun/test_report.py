"""Reports of dry runs: JSON, tables, and the rows of experts."""

import re
from dataclasses import replace

from composer3d.dryrun.report import (
    DryRun,
    Memory,
    Operation,
    StageReport,
    memory_table,
    traffic_table,
)
from composer3d.dryrun.routing import most_skew, rows_of_experts
from composer3d.recipe.resolve import load
from tools.prove.paths import ROOT

GIB = 1 << 30
REPORT = StageReport(
    stage=0,
    ranks=4,
    memory=Memory(params=GIB, grads=2 * GIB, optimizer=GIB // 2, activations=0, peak=3 * GIB),
    comm={"tp": {"all_gather": Operation(3, 6_000_000, across_nodes=False)}},
    operators=1234,
)


def test_json_has_the_documented_keys() -> None:
    run = DryRun(world_size=8, seconds=1.26, stages=(REPORT, replace(REPORT, stage=1)))
    assert run.as_json() == {
        "world_size": 8,
        "seconds": 1.3,
        "stages": [
            {
                "stage": stage,
                "ranks": 4,
                "params_gib": 1.0,
                "grads_gib": 2.0,
                "optimizer_gib": 0.5,
                "activations_gib": 0.0,
                "peak_gib": 3.0,
                "operators": 1234,
                "comm": {"tp": {"all_gather": {"count": 3, "bytes": 6_000_000}}},
            }
            for stage in (0, 1)
        ],
    }


def test_the_page_names_the_keys_of_the_json() -> None:
    page = (ROOT / "docs" / "dryrun.md").read_text()
    (shown,) = re.findall(r"^\{\"world_size.*?^```", page, re.MULTILINE | re.DOTALL)
    (stage,) = DryRun(world_size=8, seconds=1.26, stages=(REPORT,)).as_json()["stages"]
    assert set(re.findall(r'"(\w+)"', shown)) == {
        *("world_size", "seconds", "stages"),
        *stage,
        *stage["comm"]["tp"]["all_gather"],
    }


def test_tables_are_aligned() -> None:
    assert memory_table([REPORT]) == [
        "stage  ranks  params  grads  optimizer  activations  peak  operators",
        "    0      4    1.00   2.00       0.50         0.00  3.00      1,234",
    ]
    head, row = traffic_table(REPORT, compute_s=0.5)
    assert head.split("  ")[0] == "axis"
    assert row.split() == [
        *("tp", "all-gather", "3", "2", "MB", "6", "MB", "0.01", "GB/s", "inside", "a", "node")
    ]


def test_rows_are_even_or_skewed_towards_the_first_rank() -> None:
    assert rows_of_experts(10, 4, 1, 1.0) == [3, 3, 2, 2]
    assert rows_of_experts(64, 8, 4, 1.0) == [8] * 8
    assert rows_of_experts(64, 8, 4, 2.0) == [16, 16, 6, 6, 5, 5, 5, 5]
    assert rows_of_experts(64, 8, 4, 4.0) == [32, 32, 0, 0, 0, 0, 0, 0]


def test_the_largest_skew_is_that_of_the_experts_of_one_rank() -> None:
    recipe = load(ROOT / "recipes" / "mixtral-8x7b-64-4d.toml").recipe
    # One expert on each of 8 ranks; a token chooses two experts, so at most half of its rows.
    assert most_skew(recipe) == 4
