"""Two hosts: ``doctor`` and ``verify --here`` under torchrun, on a slow link and with a fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.prove.paths import ROOT
from tools.two_hosts import Host, run_job

COMPOSER3D = ["-m", "composer3d"]
SWAPPED = [str(Path(__file__).with_name("swap_groups.py"))]
RECIPE = str(ROOT / "recipes" / "debug-4-dp-tp.toml")


def run(
    hosts: tuple[Host, Host], program: list[str], command: str, *options: str
) -> tuple[list[int], dict[str, Any], str]:
    """Run a command on 4 ranks; returns the statuses, what it says as JSON, and its errors."""
    arguments = [*program, command, RECIPE, "--set", "run.device=cpu", "--json", *options]
    ended = run_job(hosts, 2, arguments, environment={"PYTHONPATH": str(ROOT)})
    outputs = [line for host in ended for line in host.output.splitlines()]
    answers = [json.loads(line) for line in outputs if line.startswith("{")]
    errors = "".join(host.errors for host in ended)
    assert len(answers) == 1, (outputs, errors)
    return [host.status for host in ended], answers[0], errors


def test_a_mesh_is_proven_where_it_runs(hosts: tuple[Host, Host]) -> None:
    statuses, verdict, _ = run(hosts, COMPOSER3D, "verify", "--here")
    assert statuses == [0, 0]
    assert verdict["passed"]
    assert verdict["world_size"] == 4
    assert verdict["layout"].startswith("here: dp_shard 2 tp 2 ")
    assert verdict["max_grad_rel_err"] < 1e-9


@pytest.mark.parametrize("command", ["verify", "doctor", "train"])
def test_a_rank_with_wrong_groups_is_named(
    hosts: tuple[Host, Host], command: str, tmp_path: Path
) -> None:
    tp = ": its group of tp has ranks 1, 3; it must have ranks 2-3, in this order"
    if command == "train":
        sets = ["--set", "run.device=cpu", "--set", f"run.out_dir={tmp_path}"]
        arguments = [*SWAPPED, "train", RECIPE, *sets]
        ended = run_job(hosts, 2, arguments, environment={"PYTHONPATH": str(ROOT)})
        assert [host.status for host in ended] == [1, 1]
        errors = "".join(host.errors for host in ended)
        lines = [line for line in errors.splitlines() if line.endswith(tp)]
        assert len(lines) == 1, errors
        assert lines[0].startswith("rank 3 (pp0 dp1 cp0 tp1, node ")
        return
    options = ["--here"] if command == "verify" else []
    statuses, answer, _ = run(hosts, SWAPPED, command, *options)
    assert statuses == [1, 1]
    assert not answer["passed"]
    error = answer["error"] if command == "verify" else " | ".join(answer["problems"])
    assert "rank 3 (pp0 dp1 cp0 tp1, node " in error
    assert tp in error


@pytest.mark.parametrize("hosts", [400.0], indirect=True)
def test_the_link_between_hosts_is_measured(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    options = ["--write", str(tmp_path / "row.toml")]
    statuses, answer, errors = run(hosts, COMPOSER3D, "doctor", *options)
    assert statuses == [0, 0], errors
    assert answer["nodes"] == 2
    assert answer["axes"]["tp"]["nodes"] == 1
    assert answer["axes"]["fsdp"]["nodes"] == 2
    # 400 Mbit/s that two ranks of each host share. Gloo's gathers and reductions send more than
    # bus bandwidth counts.
    assert 0.06 < answer["hardware"]["nic_gbit"] < 0.21
    slow = answer["axes"]["fsdp"]["collectives"]["all_gather"]["bus_gb_s"]["1048576"]
    fast = answer["axes"]["tp"]["collectives"]["all_gather"]["bus_gb_s"]["1048576"]
    assert fast > 1.5 * slow
    assert [clock["node"] for clock in answer["clocks"]] == [1]
