"""The pool of workers: answers by rank, and failures that are quick, complete and about the cause."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.commands import train as job
from composer3d.recipe.resolve import load
from composer3d.runtime import launch
from composer3d.runtime.launch import Pool, WorkerError, run_ranks
from composer3d.runtime.process_group import check_same, pool_world
from composer3d.spec.errors import MeshError, RecipeError


def answer(base: int) -> tuple[int, str, str]:
    return base + int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


def refuse() -> None:
    if os.environ["RANK"] == "1":
        raise MeshError(["first line", "second line"])


def fail_while_others_wait(error: type[Exception]) -> None:
    with pool_world():
        if os.environ["RANK"] == "1":
            raise error("the cause")
        dist.all_reduce(torch.ones(1))


def fail_while_another_sleeps() -> None:
    if os.environ["RANK"] == "0":
        raise ValueError("the cause")
    time.sleep(100)


def die_while_others_wait() -> None:
    with pool_world():
        if os.environ["RANK"] == "2":
            os._exit(3)
        dist.all_reduce(torch.ones(1))


def die_halfway_through_the_answer() -> None:
    if os.environ["RANK"] == "1":
        frame: Any = sys._getframe(1)  # of the worker, which holds the pipe
        os.write(frame.f_locals["pipe"].fileno(), (1000).to_bytes(4, "big") + b"the beginning")
        os._exit(3)


def sleep(folder: Path) -> None:
    """Too long; rank 1 will not even be terminated."""
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)


def answer_what_no_pipe_carries() -> Any:
    return lambda: None


def see(values: list[object]) -> None:
    with pool_world():
        check_same("the data", values[dist.get_rank()])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failing(
    pool: Pool, function: Any, arguments: dict[str, Any], **how: Any
) -> tuple[WorkerError, float]:
    """The error of a task and the seconds it took."""
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(function, arguments, **how)
    return caught.value, time.monotonic() - begin


def test_answers_come_by_rank(pool: Pool) -> None:
    expected = [(10 + rank, "4", str(rank)) for rank in range(4)]
    assert pool.run(answer, {"base": 10}, world_size=4) == expected
    assert (
        pool.run(f"{__name__}:answer", {"base": 10}, world_size=4) == expected
    )  # by name: not imported here


def test_a_user_error_keeps_its_kind_and_its_lines(pool: Pool) -> None:
    error, _ = failing(pool, refuse, {}, world_size=2)
    assert isinstance(error.user_error, MeshError)
    assert error.user_error.lines == ("first line", "second line")
    assert set(error.failures) == {1}


@pytest.mark.parametrize("kind", [ValueError, MeshError])
def test_only_the_cause_is_told_and_soon(pool: Pool, kind: type[Exception]) -> None:
    error, seconds = failing(pool, fail_while_others_wait, {"error": kind}, world_size=3)
    assert set(error.failures) == {1}
    assert "the cause" in str(error)
    assert (error.user_error is None) == (kind is ValueError)
    assert seconds < 20  # the collective alone would wait 60


def test_a_rank_that_waits_for_nothing_is_given_up_on(pool: Pool) -> None:
    error, seconds = failing(pool, fail_while_another_sleeps, {}, world_size=2)
    assert set(error.failures) == {0}
    assert 'raise ValueError("the cause")' in str(error)  # a bug keeps its traceback
    assert seconds < 20


def test_a_rank_that_dies_is_named(pool: Pool) -> None:
    error, seconds = failing(pool, die_while_others_wait, {}, world_size=3)
    assert error.failures == {2: "the process died"}
    assert error.user_error is None
    assert seconds < 20


def test_a_rank_that_dies_halfway_through_its_answer_is_named(pool: Pool) -> None:
    error, _ = failing(pool, die_halfway_through_the_answer, {}, world_size=2)
    assert error.failures == {1: "the process died"}


def test_a_task_ends_at_its_limit_and_leaves_no_process(pool: Pool, tmp_path: Path) -> None:
    error, seconds = failing(pool, sleep, {"folder": tmp_path}, world_size=2, limit_s=3.0)
    assert error.failures == dict.fromkeys((0, 1), "no answer after 3 s")
    assert 3.0 <= seconds < 30
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert pool.run(answer, {"base": 0}, world_size=1) == [(0, "1", "0")]  # and the pool goes on


def test_an_answer_that_cannot_be_sent_is_a_failure(pool: Pool) -> None:
    error, _ = failing(pool, answer_what_no_pipe_carries, {}, world_size=1)
    assert "pickle" in str(error.failures[0])


def test_ranks_that_differ_are_named(pool: Pool) -> None:
    pool.run(see, {"values": [{"train": "a"}] * 2}, world_size=2)
    error, _ = failing(pool, see, {"values": ["a", "b", "a"]}, world_size=3)
    assert set(error.failures) == {0, 1, 2}  # no rank goes on alone
    assert isinstance(error.user_error, MeshError)
    assert error.user_error.lines == (
        "the data must be the same on every rank; give all nodes the same files",
        "ranks 0, 2 see 'a'",
        "ranks 1 see 'b'",
    )


def crash_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    time.sleep(60)
    return 0


def leave_with_2() -> int:
    return 2


@pytest.mark.parametrize(
    ("function", "status", "said"), [(crash_on_rank_1, 1, True), (leave_with_2, 2, False)]
)
def test_a_job_tells_the_reason_and_no_more(
    function: Callable[[], int], status: int, said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(function, {}, processes=2).status == status
    said_lines = capfd.readouterr().err.splitlines()
    if said:
        assert said_lines[0].startswith("Traceback")
        assert said_lines[-1] == "ValueError: the reason"
    else:
        assert said_lines == []


def wait_to_be_ended() -> int:
    time.sleep(100)
    return 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ranks_are_forked_reaches_all_of_them(number: int) -> None:
    """A rank inherits that the starter ignores it, until it has its own way: what comes then must not be lost."""
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
    try:
        for delay_s in (0.001, 0.02, 0.05, 0.2):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            began = time.monotonic()
            ended = run_ranks(wait_to_be_ended, {}, processes=4)
            assert (ended.status, ended.died, ended.stuck) == (128 + number, {}, [])
            assert time.monotonic() - began < 60
    finally:
        signal.signal(signal.SIGALRM, before)


def test_nohup_reaches_ranks(tmp_path: Path) -> None:
    code = (
        "import os, signal, threading\n"
        "from test_launch import hang_up\n"
        "from composer3d.runtime.launch import run_ranks\n"
        "print('status', run_ranks(hang_up, {}, processes=2).status)"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    result = subprocess.run(
        ["nohup", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert "status 0" in result.stdout, result.stderr


def hang_up() -> int:
    os.kill(os.getpid(), signal.SIGHUP)
    return 0


def die_while_the_others_lose_it() -> int:
    with pool_world():
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return 0


def test_a_rank_that_is_killed_is_told_apart_from_those_that_lose_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended = run_ranks(lose_a_peer_slowly, {}, processes=4)
    assert (ended.status, ended.died) == (1, {2: signal.SIGKILL})
    assert capfd.readouterr().err == ""


def lose_a_peer_slowly() -> int:
    """As a rank of a training: one that lost a peer takes its time before it says so."""
    try:
        return die_while_the_others_lose_it()
    except RuntimeError:
        time.sleep(3.0)
        raise


@pytest.mark.parametrize("died", [{3: 9}, {1: 9, 3: 9}, {1: 11}, {0: -4}])
def test_who_died_is_said_with_the_way_on(tmp_path: Path, died: dict[int, int]) -> None:
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n[mesh]\ndp_shard = 2\ntp = 2\n'
    )
    recipe = load(tmp_path / "r.toml", [f"run.out_dir={tmp_path}"]).recipe
    kept = tmp_path / "a" / "checkpoints"
    (line,) = job.lines_about(launch.JobResult(1, died), recipe)
    assert line.endswith(f"; there is no checkpoint in {kept}: the same command starts anew")
    for name in (
        "step-00000004",
        "step-00000012",
        "step-00000020.tmp",
        "step-00000016",
        "step-9999-mine",
    ):
        (kept / name).mkdir(parents=True)
        if name != "step-00000016":
            (kept / name / "manifest.json").write_text("{}")
    (line,) = job.lines_about(launch.JobResult(1, died), recipe)
    first, _, rest = line.partition("; the newest")
    assert rest == f" checkpoint is {kept}/step-00000012: the same command goes on from it"
    kill = "signal 9 (SIGKILL; often the kernel's answer to memory running out: see dmesg)"
    assert first == {
        (3,): f"rank 3 (pp0 dp1 cp0 tp1, node 0) was ended by {kill}",
        (
            1,
            3,
        ): f"rank 1 (pp0 dp0 cp0 tp1, node 0), rank 3 (pp0 dp1 cp0 tp1, node 0) were ended by {kill}",
        (1,): "rank 1 (pp0 dp0 cp0 tp1, node 0) was ended by signal 11 (SIGSEGV)",
        (0,): "rank 0 (pp0 dp0 cp0 tp0, node 0) ended with status 4",
    }[tuple(died)].replace(", node 0", "")


def answer_from_a_folder_of_this_process(folder: Path) -> list[str]:
    """Where this process listens, and what stands in the folder for temporary files."""
    with pool_world():
        dist.all_reduce(torch.ones(1))
        dist.new_group([0, 1])
        found = listening()
        dist.barrier()
    return found


def listening() -> list[str]:
    """The addresses at which this process waits for connections, in the kernel's hexadecimal form."""
    inodes = set()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(number))
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    state, listens = 3, "0A"
    return [
        row[1].partition(":")[0]
        for row in rows
        if row[state] == listens and f"socket:[{row[9]}]" in inodes
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="listening sockets are read from Linux's /proc")
def test_nothing_listens_but_on_loopback(pool: Pool, tmp_path: Path) -> None:
    loopback = "0100007F"
    found = pool.run(answer_from_a_folder_of_this_process, {"folder": tmp_path}, world_size=2)
    assert [set(each) for each in found] == [{loopback}] * 2
    assert listening() == []  # nor the process that owns them


OWNER = """
import sys
from pathlib import Path
from composer3d import launch

if __name__ == "__main__":
    with launch.Pool() as pool, launch.temporary_folder("composer3d-test-") as own:
        pool.run("test_launch:sit_in_a_folder", {"folder": Path(sys.argv[1]), "own": own}, world_size=2)
"""


def sit_in_a_folder(folder: Path, own: Path) -> None:
    (own / "file").write_text("")
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)  # it cannot even look whether its parent lives
    time.sleep(100)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_and_folders_go_with_their_owner(tmp_path: Path, number: int) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    pids, temporary = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "owner.py"), str(pids)]
    owner = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    workers = [int(text) for text in wait_until(lambda: texts(pids))]
    assert [path[:16] for path in ours(temporary)] == ["composer3d-test-"]
    owner.send_signal(number)
    assert owner.wait(timeout=10) != 0
    wait_until(lambda: not any(map(is_running, workers)), limit_s=10.0)
    wait_until(lambda: not ours(temporary), limit_s=5.0)


def ours(temporary: Path) -> list[str]:
    """Temporary folders, without the one that torch keeps for compiled code."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")]


def texts(folder: Path) -> list[str]:
    found = [path.read_text() for path in folder.iterdir()]
    return found if len(found) == 2 and all(found) else []


def wait_until(holds: Callable[[], Any], limit_s: float = 150.0) -> Any:
    until = time.monotonic() + limit_s
    while not (value := holds()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def test_workers_go_with_the_starter_and_the_next_world_has_another(tmp_path: Path) -> None:
    with Pool() as mine:
        assert mine.run(kill_the_starter, {}, world_size=1, limit_s=200.0) == [None]


def kill_the_starter() -> None:
    """In a process of its own, whose starter it is: the pool of the tests keeps its one."""
    with Pool() as inner:
        with pytest.raises(WorkerError) as caught:
            inner.run(kill_my_parent, {}, world_size=2)
        assert caught.value.failures == {0: "the process died", 1: "the process died"}
        assert inner.run(answer, {"base": 1}, world_size=1) == [(1, "1", "0")]


def kill_my_parent() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.parametrize(
    ("device", "sets", "refused"), [("cpu", [], True), ("cpu", ["run.oversubscribe=true"], False)]
)
def test_too_many_processes_for_the_cores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, sets: list[str], refused: bool
) -> None:
    monkeypatch.setattr(launch, "warm_up", lambda: None)
    monkeypatch.setattr(launch, "run_ranks", lambda *_, processes: launch.JobResult(processes % 251))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "r.toml").write_text(
        '[run]\nname = "a"\n[model]\npreset = "debug-tiny"\n[mesh]\ndp_shard = 33\n[data]\nglobal_batch = 33\n'
    )
    sets = [f"run.device={device}", f"run.out_dir={tmp_path}", *sets]
    if refused:
        with pytest.raises(RecipeError) as caught:
            job.main_train(str(tmp_path / "r.toml"), sets)
        assert (
            "needs 33 processes, but this machine has 2 cores: at most 32 processes"
            in caught.value.lines[0]
        )
        assert "run.oversubscribe = true" in caught.value.lines[0]
        sets += ["mesh.dp_shard=32", "data.global_batch=32"]
        assert job.main_train(str(tmp_path / "r.toml"), sets) == 32
    else:
        assert job.main_train(str(tmp_path / "r.toml"), sets) == 33
