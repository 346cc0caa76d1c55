"""Two hosts: ``doctor``, ``verify --here`` and ``train`` under torchrun, on a slow link."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tools.prove.paths import ROOT
from tools.two_hosts import NoHostsError, run_job, two_hosts

# The first test waits for five commands.
pytestmark = pytest.mark.timeout(480)

PROGRAM = str(Path(__file__).with_name("commands_in_turn.py"))
RECIPE = [str(ROOT / "recipes" / "debug-4-dp-tp.toml"), "--set", "run.device=cpu"]
RANKS = range(4)


class Ended(NamedTuple):
    """The status of each rank, what rank 0 says as JSON, and the errors of all ranks."""

    statuses: list[int]
    answer: dict[str, Any] | None
    errors: str


# Two hosts of one core each take a minute.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each command ended on 4 ranks, two on each host, by its name."""
    folder = tmp_path_factory.mktemp("two_hosts")
    commands = {
        "verify": ["verify", *RECIPE, "--here", "--json"],
        "doctor": ["doctor", *RECIPE, "--json", "--write", str(folder / "row.toml")],
        "verify-swapped": ["verify", *RECIPE, "--here", "--json"],
        "doctor-swapped": ["doctor", *RECIPE, "--json"],
        "train-swapped": ["train", *RECIPE, "--set", f"run.out_dir={folder}"],
    }
    arguments = [PROGRAM, str(folder), json.dumps(commands)]
    try:
        with two_hosts(400.0) as hosts:
            environment = {"PYTHONPATH": str(ROOT)}
            jobs = run_job(hosts, 2, arguments, environment=environment, limit_s=400.0)
    except NoHostsError as error:
        pytest.skip(str(error))
    assert [job.status for job in jobs] == [0, 0], jobs
    return {name: read_end(folder, name) for name in commands}


def read_end(folder: Path, name: str) -> Ended:
    def texts(kind: str) -> list[str]:
        return [(folder / f"{name}-{rank}.{kind}").read_text() for rank in RANKS]

    outputs = [line for text in texts("out") for line in text.splitlines()]
    answers = [json.loads(line) for line in outputs if line.startswith("{")]
    errors = "".join(texts("err"))
    assert len(answers) == (not name.startswith("train")), (outputs, errors)
    return Ended([int(text) for text in texts("status")], *(answers or [None]), errors)


def test_a_mesh_is_proven_where_it_runs(ended: dict[str, Ended]) -> None:
    statuses, verdict, errors = ended["verify"]
    assert statuses == [0] * 4, errors
    assert verdict is not None
    assert verdict["passed"]
    assert verdict["world_size"] == 4
    assert verdict["layout"].startswith("here: dp_shard 2 tp 2 ")
    assert verdict["max_grad_rel_err"] < 1e-9


@pytest.mark.parametrize("command", ["verify", "doctor", "train"])
def test_a_rank_with_wrong_groups_is_named(ended: dict[str, Ended], command: str) -> None:
    statuses, answer, errors = ended[f"{command}-swapped"]
    assert statuses == [1] * 4
    lines = errors.splitlines()
    if answer is not None:
        assert not answer["passed"]
        problems = answer["problems"] if command == "doctor" else answer["error"].split(" | ")
        lines = problems
    tp = ": its group of tp has ranks 1, 3; it must have ranks 2-3, in this order"
    (line,) = [line for line in lines if tp in line]
    assert line.startswith("rank 3 (pp0 dp1 cp0 tp1, node ")


def test_the_link_between_hosts_is_measured(ended: dict[str, Ended]) -> None:
    statuses, answer, errors = ended["doctor"]
    assert statuses == [0] * 4, errors
    assert answer is not None
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
