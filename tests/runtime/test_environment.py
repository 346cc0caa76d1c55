"""Variables of a launcher are refused in one line each, before anything waits."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from composer3d import cli
from composer3d.facts.errors import LaunchError, MeshError, UserError
from composer3d.runtime import environment
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import open_store

RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ODD_NUMBERS = ("", "abc", "1.5", " 1", "1 ", "0x1", "+1", "-1", "1_0", "\u0661", "9" * 30, "\udcff")
NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)
ODD_TEXTS = {
    "OMP_NUM_THREADS": ("0", "5000", "2,", ",2"),
    "MASTER_ADDR": ("", " ", "a b", "tcp://a", "a:29500", "a/b", "a" * 300, "h\u00f6st"),
    "MASTER_PORT": ("0", "70000", "http"),
    "TORCHELASTIC_USE_AGENT_STORE": ("", "true", "1"),
    "TORCH_GLOO_LAZY_INIT": ("", "2", "maybe"),
    "CUDA_VISIBLE_DEVICES": ("abc", "0,abc", "0 1", "0,,1", "1.5"),
    "GLOO_SOCKET_IFNAME": ("", "eth99", "lo,", "lo eth0"),
    "COMPOSER3D_STORE": ("", "/nowhere/at/all"),
    "COMPOSER3D_START": ("", "abc", "nan", "inf"),
}
# Variables that are set beside those of RANK, and the variables that the errors name.
TOGETHER = (
    ({"RANK": None}, ["RANK"]),
    ({"WORLD_SIZE": None}, ["WORLD_SIZE"]),
    ({"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": "0"}, ["RANK", "WORLD_SIZE"]),
    ({"RANK": None, "WORLD_SIZE": None, "LOCAL_WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE"]),
    ({"RANK": None, "WORLD_SIZE": None, "COMPOSER3D_STORE": "/tmp/x"}, ["RANK", "WORLD_SIZE"]),
    ({"RANK": "2"}, ["RANK"]),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK"]),
    ({"LOCAL_RANK": "2"}, ["LOCAL_RANK"]),
    ({"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE"]),
    ({"GROUP_RANK": "2"}, ["GROUP_RANK"]),
    ({"GROUP_WORLD_SIZE": "3"}, ["GROUP_WORLD_SIZE"]),
    ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
    ({"MASTER_PORT": None}, ["MASTER_PORT"]),
    ({"MASTER_ADDR": None, "MASTER_PORT": None}, ["MASTER_ADDR", "MASTER_PORT"]),
    ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": None}, ["MASTER_PORT"]),
    ({"RANK": "5", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "4"}, ["RANK", "LOCAL_RANK", "LOCAL_W"]),
)
LEGAL: tuple[dict[str, str | None], ...] = (
    {},
    {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "OMP_NUM_THREADS": "4,2"},
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": None, "MASTER_PORT": None},
    {"MASTER_ADDR": "::1"},
    {"MASTER_ADDR": "fe80::1%eth0", "CUDA_VISIBLE_DEVICES": ""},
    {"MASTER_ADDR": "node-1.cluster_a.local", "CUDA_VISIBLE_DEVICES": "GPU-8932f937,1"},
    {"CUDA_VISIBLE_DEVICES": "NoDevFiles", "TORCH_GLOO_LAZY_INIT": "False"},
    # The image of a cluster sets these for processes that are no ranks.
    {"RANK": None, "WORLD_SIZE": None, "MASTER_PORT": None, "OMP_NUM_THREADS": "8"},
)


def set_variables(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str | None]) -> None:
    for name in (*NUMBERS, *ODD_TEXTS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def problems() -> tuple[str, ...]:
    try:
        environment.check()
    except LaunchError as error:
        return error.lines
    return ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in NUMBERS for value in ODD_NUMBERS),
        *((name, value) for name, values in ODD_TEXTS.items() for value in values),
    ],
)
def test_an_odd_value_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    set_variables(monkeypatch, RANK | {name: value})
    (line,) = problems()
    start, _, rest = line.partition(": ")
    assert start.startswith(f"{name} = '")
    assert rest.startswith("it must ")
    assert "set" in rest.partition("; ")[2]
    assert len(line) < 300


@pytest.mark.parametrize(("changed", "named"), TOGETHER)
def test_variables_that_do_not_fit_together_are_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], named: list[str]
) -> None:
    set_variables(monkeypatch, {**RANK, **changed})
    lines = problems()
    assert len(lines) == len(named)
    assert all(line.startswith(name) for line, name in zip(lines, named, strict=True))


@pytest.mark.parametrize("changed", LEGAL)
def test_what_launchers_set_is_taken(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]
) -> None:
    set_variables(monkeypatch, {**RANK, **changed})
    assert problems() == ()


@pytest.mark.parametrize(
    "command",
    [
        ["train", "debug-1-single"],
        ["verify", "debug-1-single", "--here"],
        ["verify", "debug-1-single"],
        ["doctor", "debug-1-single"],
        ["generate", "nowhere", "--prompt", "a"],
        ["eval", "nowhere", "nowhere"],
        ["eval", "nowhere", "nowhere", "--json"],
    ],
    ids=lambda command: " ".join((command[0], *command[-1:])),
)
@pytest.mark.parametrize("rank", ["abc", "7"])
def test_every_command_that_can_be_a_rank_refuses_a_wrong_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    rank: str,
) -> None:
    """Also rank 7, which says nothing of what all ranks know."""
    set_variables(monkeypatch, RANK | {"RANK": rank})
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("RANK = ")
    assert captured.out.startswith('{"ok": false' if "--json" in command else "")


def open_own_store(variables: list[dict[str, str]], timeout_s: float, errors: Path) -> None:
    """A task: open the store of a rank with the variables of a script instead of the pool's.

    Standard error goes to a file.
    """
    own = variables[int(os.environ["RANK"])]
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    del os.environ[environment.STORE_VARIABLE]
    os.environ |= RANK | own
    open_store(timeout_s=timeout_s)


def refusals(
    pool: Pool, folder: Path, variables: list[dict[str, str]], timeout_s: float
) -> Mapping[int, UserError | str]:
    """Return the errors of ranks with these variables, which print nothing, by their place."""
    errors = folder / "errors"
    arguments = {"variables": variables, "timeout_s": timeout_s, "errors": errors}
    with pytest.raises(WorkerError) as caught:
        pool.run(open_own_store, arguments, world_size=len(variables))
    # No frames of C++.
    assert errors.read_text() == ""
    return caught.value.failures


def free_port() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return str(unused.getsockname()[1])


@pytest.mark.parametrize(
    ("ranks", "sizes", "told"),
    [
        ((0, 1, 1), (3, 3, 3), "RANK = 1 is set for two processes, process "),
        ((0, 1), (2, 3), "WORLD_SIZE = 2 on rank 0, but 3 on rank 1: "),
        # The other one waits, for longer than the pool.
        ((0, 0), (2, 2), "rank 0 cannot open the job's store at 127.0.0.1:"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(
    pool: Pool, tmp_path: Path, ranks: tuple[int, ...], sizes: tuple[int, ...], told: str
) -> None:
    port = free_port()
    variables = [
        {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    refused = refusals(pool, tmp_path, variables, timeout_s=60.0)
    assert len(refused) == (1 if ranks == (0, 0) else len(ranks))
    for error in refused.values():
        assert isinstance(error, MeshError)
        assert str(error).startswith(told)


@pytest.mark.parametrize("case", ["unknown name", "nobody listens", "another service"])
def test_a_store_that_nobody_opens_is_named_within_the_time_out(
    pool: Pool, tmp_path: Path, case: str
) -> None:
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        if case == "unknown name":
            variables["MASTER_ADDR"] = "nohost.invalid"
        if case == "another service":
            variables["MASTER_PORT"] = str(service.getsockname()[1])
        refused = refusals(pool, tmp_path, [variables], timeout_s=2.0)
    shown = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    reasons = {
        "unknown name": "nohost.invalid is not known (",
        "nobody listens": "nobody listens there (",
        "another service": "what listens there is not the store of a job",
    }
    line = str(refused[0])
    assert line.startswith(
        f"rank 1 did not meet all 2 ranks within 2 s at {shown}, the job's store"
    )
    assert reasons[case] in line


def test_the_variables_of_ranks_are_read_in_one_place() -> None:
    read = re.compile(
        r"""environ(\.get\(|\[)["']((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|GROUP_\w+|MASTER_)"""
    )
    package = Path(environment.__file__).parents[1]
    found = {path.name for path in package.rglob("*.py") if read.search(path.read_text())}
    assert found == {"environment.py"}
