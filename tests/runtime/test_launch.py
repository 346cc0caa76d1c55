"""The pool of workers and the ranks of a job.

Answers come by rank. Failures are quick and complete, and they name the cause.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.facts.errors import MeshError, TrainingError
from composer3d.runtime import launch
from composer3d.runtime.launch import LOST_PEERS, Pool, WorkerError, run_ranks
from composer3d.runtime.process_group import pool_world
from composer3d.runtime.starter import REMOVE_AT_END, REQUEST
from tests.runtime import light_tasks, sockets


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
        frame: Any = sys._getframe(1)  # the starter's code that runs the task; it has the pipe
        os.write(frame.f_locals["pipe"].fileno(), (1000).to_bytes(4, "big") + b"the beginning")
        os._exit(3)


def sleep(folder: Path) -> None:
    """Sleep longer than the limit; rank 1 ignores SIGTERM too."""
    if os.environ["RANK"] == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)


def answer_with_something_unpicklable() -> Any:
    return lambda: None


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failing(
    pool: Pool, function: Any, arguments: dict[str, Any], **options: Any
) -> tuple[WorkerError, float]:
    """Run a task that fails; return its error and the seconds it took."""
    begin_s = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(function, arguments, **options)
    return caught.value, time.monotonic() - begin_s


def test_answers_come_by_rank(pool: Pool) -> None:
    expected = [(10 + rank, "4", str(rank)) for rank in range(4)]
    assert pool.run(light_tasks.answer, {"base": 10}, world_size=4) == expected
    # By name, the function's module is not imported here.
    assert pool.run(f"{light_tasks.__name__}:answer", {"base": 10}, world_size=4) == expected


def test_a_user_error_keeps_its_kind_and_its_lines(pool: Pool) -> None:
    error, _ = failing(pool, refuse, {}, world_size=2)
    assert isinstance(error.user_error, MeshError)
    assert error.user_error.lines == ("first line", "second line")
    assert set(error.failures) == {1}


@pytest.mark.parametrize("kind", [ValueError, MeshError])
def test_only_the_cause_is_reported_and_soon(pool: Pool, kind: type[Exception]) -> None:
    error, seconds = failing(pool, fail_while_others_wait, {"error": kind}, world_size=3)
    assert set(error.failures) == {1}
    assert "the cause" in str(error)
    assert (error.user_error is None) == (kind is ValueError)
    assert seconds < 20  # the collective alone would wait 60


def test_the_pool_does_not_wait_long_for_the_others_of_a_failed_rank(pool: Pool) -> None:
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
    assert error.timed_out
    assert 3.0 <= seconds < 30
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    # The pool still works.
    assert pool.run(light_tasks.answer, {"base": 0}, world_size=1) == [(0, "1", "0")]


def rest(number: int, seconds: float) -> tuple[int, float, float]:
    begin_s = time.monotonic()
    time.sleep(seconds)
    return number, begin_s, time.monotonic()


def test_calls_begin_when_others_end_and_their_values_come_in_order(pool: Pool) -> None:
    calls = [{"number": n, "seconds": 3.0 if n == 0 else 0.1} for n in range(5)]
    values = list(pool.run_each(rest, calls, at_once=2))
    assert [number for number, *_ in values] == list(range(5))
    ends = [(begin_s, 1) for _, begin_s, _ in values] + [(end_s, -1) for *_, end_s in values]
    assert max(accumulate(change for _, change in sorted(ends))) == 2
    # All others ran beside the first one.
    assert max(end_s for *_, end_s in values) == values[0][2]


def sleep_or_raise(folder: Path, number: int) -> None:
    if number == 2:
        while len([*folder.glob("*/0")]) < 2:
            time.sleep(0.1)
        raise ValueError("the cause")
    sleep(folder / str(number))


@pytest.mark.parametrize(("calls", "reason"), [(3, "the cause"), (2, "no answer after 3 s")])
def test_a_call_that_fails_or_hangs_ends_all(
    pool: Pool, tmp_path: Path, calls: int, reason: str
) -> None:
    for number in range(calls):
        (tmp_path / str(number)).mkdir()
    arguments = [{"folder": tmp_path, "number": number} for number in range(calls)]
    with pytest.raises(WorkerError, match=reason):
        list(pool.run_each(sleep_or_raise, arguments, at_once=calls, limit_s=3.0))
    pids = [int(file.read_text()) for file in tmp_path.glob("*/0")]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


def test_an_answer_that_cannot_be_sent_is_a_failure(pool: Pool) -> None:
    error, _ = failing(pool, answer_with_something_unpicklable, {}, world_size=1)
    assert "pickle" in str(error.failures[0])


def crash_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    time.sleep(60)
    return 0


def leave_with_2() -> int:
    return 2


@pytest.mark.parametrize(
    ("function", "status", "prints"), [(crash_on_rank_1, 1, True), (leave_with_2, 2, False)]
)
def test_a_job_prints_the_reason_and_no_more(
    function: Callable[[], int],
    status: int,
    prints: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "REPORT_S", 0.5)
    assert run_ranks(function, {}, processes=2).status == status
    lines = capfd.readouterr().err.splitlines()
    if prints:
        assert lines[0].startswith("Traceback")
        assert lines[-1] == "ValueError: the reason"
    else:
        assert lines == []


def leave_the_report_to_rank_0(closes_for_s: float, rank_0_reports: bool) -> int:
    """All ranks have an error. Rank 0 closes what it has, and then reports the error."""
    if os.environ["RANK"] == "0":
        time.sleep(closes_for_s)
        return 1 if rank_0_reports else LOST_PEERS
    raise TrainingError("a loss is not finite")


@pytest.mark.parametrize(
    ("closes_for_s", "limit_s", "rank_0_reports", "printed"),
    [
        # More than other ranks get after an error.
        (7.0, 60.0, True, ""),
        (100.0, 1.0, True, "rank 1: a loss is not finite\n"),
        # The error is that of one rank after all.
        (0.0, 60.0, False, "rank 1: a loss is not finite\n"),
    ],
)
def test_an_error_that_rank_0_reports_ends_the_job_with_its_status_and_no_restart(
    closes_for_s: float,
    limit_s: float,
    rank_0_reports: bool,
    printed: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "CLOSE_S", limit_s)
    arguments = {"closes_for_s": closes_for_s, "rank_0_reports": rank_0_reports}
    result = run_ranks(leave_the_report_to_rank_0, arguments, processes=3)
    assert (result.status, result.died, result.raised) == (1, {}, False)
    assert result.stuck == ([0] if closes_for_s > limit_s else [])
    assert not result.is_lost
    assert "".join(f"{line}\n" for line in result.reason) == capfd.readouterr().err == printed


def report_and_leave_a_rank_that_hangs() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(100)
    return 1


def test_a_rank_that_hangs_after_a_reported_error_is_ended_and_no_loss() -> None:
    result = run_ranks(report_and_leave_a_rank_that_hangs, {}, processes=2)
    assert (result.status, result.stuck, result.reason) == (1, [1], ())
    assert not result.is_lost


def wait_to_be_ended() -> int:
    time.sleep(100)
    return 0


@pytest.mark.parametrize(
    ("number", "delays_s"),
    [
        (signal.SIGINT, (0.001, 0.02, 0.05, 0.2)),
        (signal.SIGTERM, (0.02,)),
        (signal.SIGHUP, (0.05,)),
    ],
)
def test_a_signal_while_ranks_are_forked_reaches_all_of_them(
    number: int, delays_s: tuple[float, ...]
) -> None:
    """A new rank inherits that the starter ignores the signal. One that arrives then must count."""
    uncaught = signal.getsignal(number)

    def send(*_: Any) -> None:
        if signal.getsignal(number) == uncaught:
            # On a busy machine ``run_ranks`` has not begun yet: the signal would end the tests.
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        else:
            os.kill(os.getpid(), number)

    previous = signal.signal(signal.SIGALRM, send)
    try:
        for delay_s in delays_s:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            begin_s = time.monotonic()
            result = run_ranks(wait_to_be_ended, {}, processes=4)
            assert (result.status, result.died, result.stuck) == (128 + number, {}, [])
            assert time.monotonic() - begin_s < 60
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_whose_starter_still_imports(tmp_path: Path, number: int) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow_import.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'writing')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'writing')!r}, {str(begun)!r})\n"
        "time.sleep(100)\n"
    )
    code = (
        "from composer3d.runtime import launch\n"
        "launch._PRELOAD = 'slow_import'\n"
        f"print(launch.run_ranks('{light_tasks.__name__}:hang_up', {{}}, processes=2))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    ) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.05)
        began_s = time.monotonic()
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert f"status={128 + number}," in output
    assert f"stopped_by={number:d}," in output
    assert time.monotonic() - began_s < 30
    assert not is_running(int(begun.read_text()))


def save_and_be_ended_by_another_signal() -> int:
    """As rank 0, save after SIGUSR1 and leave; rank 1 is ended by SIGTERM when it has saved."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    while not seen:
        time.sleep(0.02)
    if os.environ["RANK"] == "1":
        time.sleep(100)
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    while len(seen) < 2:
        time.sleep(0.02)
    return 128 + signal.SIGUSR1


def test_the_second_signal_of_a_scheduler_does_not_look_like_a_lost_rank() -> None:
    numbers = [signal.SIGUSR1, signal.SIGTERM]

    def send_the_next(*_: object) -> None:
        if numbers:  # on a busy machine, the ranks may take longer to end
            os.kill(os.getpid(), numbers.pop(0))

    previous = signal.signal(signal.SIGALRM, send_the_next)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        result = run_ranks(save_and_be_ended_by_another_signal, {}, processes=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert (result.status, result.died) == (128 + signal.SIGUSR1, {})
    assert (result.stopped_by, result.is_lost) == (signal.SIGUSR1, False)


def save_slowly(folder: str, launcher: int, saves_for_s: float) -> int:
    """Rank 0 sends the signals. Each rank saves for some time after the first one."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    rank = os.environ["RANK"]
    (Path(folder) / rank).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.02)
    if rank == "0":
        os.kill(launcher, signal.SIGTERM)
    while not seen:
        time.sleep(0.02)
    time.sleep(saves_for_s)
    return 128 + signal.SIGTERM


def test_a_long_save_after_a_signal_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN_S", 0.6)
    arguments = {"folder": str(tmp_path), "launcher": os.getpid(), "saves_for_s": 3.0}
    result = run_ranks(save_slowly, arguments, processes=2, save_limit_s=90.0)
    assert (result.status, result.stuck, result.was_cut_off) == (143, [], False)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("2 ranks still run 1 s after signal 15: they finish a step or a save")


def test_a_save_that_is_cut_off_has_not_the_status_of_a_saved_run(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "launcher": os.getpid(), "saves_for_s": 60.0}
    result = run_ranks(save_slowly, arguments, processes=2, save_limit_s=1.0)
    assert (result.status, result.stuck, result.was_cut_off) == (1, [0, 1], True)
    assert (result.stopped_by, result.is_lost) == (signal.SIGTERM, False)


def end_otherwise_than_a_peer(folder: str, launcher: int, end: int) -> int:
    """Rank 1 has done its last step, or does not catch the signal yet. Rank 0 goes on for long."""
    rank, seen = os.environ["RANK"], []
    if rank == "0" or end == 0:
        signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    (Path(folder) / rank).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.02)
    if rank == "0":
        os.kill(launcher, signal.SIGTERM)
    while not seen:
        time.sleep(0.02)
    if rank == "0":
        time.sleep(60.0)
    return end


@pytest.mark.parametrize(
    ("end", "save_limit_s", "patience_s"),
    [
        pytest.param(signal.SIGTERM, 90.0, 1.0, id="before the first step"),
        pytest.param(0, 2.0, float("inf"), id="in the last step"),
    ],
)
def test_a_rank_that_is_killed_after_a_signal_need_not_have_been_cut_off(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: int,
    save_limit_s: float,
    patience_s: float,
) -> None:
    monkeypatch.setattr(launch, "REPORT_S", 1.0)
    arguments = {"folder": str(tmp_path), "launcher": os.getpid(), "end": end}
    result = run_ranks(end_otherwise_than_a_peer, arguments, processes=2, save_limit_s=save_limit_s)
    assert (result.status, result.stuck, result.was_cut_off) == (143, [0], False)
    assert (result.patience_s, result.stopped_by) == (patience_s, signal.SIGTERM)


def test_a_save_that_a_second_ctrl_c_ends_has_the_status_of_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INSIST_S", 0.2)
    arguments = {"folder": str(tmp_path), "launcher": os.getpid(), "saves_for_s": 60.0}

    def insist(*_: object) -> None:
        # On a busy machine, the first signal may not have come.
        if len(list(tmp_path.iterdir())) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGALRM, insist)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
        result = run_ranks(save_slowly, arguments, processes=2, save_limit_s=90.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert (result.status, result.stuck, result.was_insisted) == (130, [0, 1], True)


def lose_the_network() -> int:
    return LOST_PEERS


def test_a_collective_that_failed_on_all_ranks_is_a_loss_with_status_1() -> None:
    result = run_ranks(lose_the_network, {}, processes=2)
    assert (result.status, result.died, result.is_lost) == (1, {}, True)


def test_nohup_reaches_ranks() -> None:
    code = (
        "from composer3d.runtime import launch\n"
        "launch._PRELOAD = 'json'\n"
        f"print(launch.run_ranks('{light_tasks.__name__}:hang_up', {{}}, processes=2))"
    )
    result = subprocess.run(
        ["nohup", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "status=0" in result.stdout, result.stderr


def die_while_others_reduce() -> int:
    with pool_world():
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return 0


def test_a_killed_rank_is_told_from_ranks_that_lose_a_peer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = run_ranks(lose_a_peer_slowly, {}, processes=4)
    assert (result.status, result.died) == (1, {2: signal.SIGKILL})
    assert capfd.readouterr().err == ""


def be_stopped_before_the_first_step(folder: str, launcher: int) -> int:
    """Rank 1 does not catch the signal yet. The others do, and then lose their peer."""
    rank = os.environ["RANK"]
    if rank != "1":
        signal.signal(signal.SIGTERM, lambda *_: None)
        (Path(folder) / rank).touch()
    with pool_world():
        dist.barrier()
        if rank == "1":
            while len(list(Path(folder).iterdir())) < 2:
                time.sleep(0.05)
            os.kill(launcher, signal.SIGTERM)
            time.sleep(100.0)
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(1))
            return 0
    return LOST_PEERS


def test_a_stop_signal_that_a_rank_does_not_catch_yet_stops_the_job(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "launcher": os.getpid()}
    result = run_ranks(be_stopped_before_the_first_step, arguments, processes=3)
    assert (result.status, result.died, result.left) == (143, {}, {1: signal.SIGTERM})
    assert result.stopped_by == signal.SIGTERM
    assert not result.is_lost


def raise_before_a_peer_dies(folder: str) -> int:
    done = Path(folder) / "raised"
    if os.environ["RANK"] == "0":
        while not done.exists():
            time.sleep(0.05)
        os.abort()
    done.touch()
    raise ConnectionResetError(104, "Connection reset by peer")


def test_the_lost_connection_of_something_else_is_shown_though_a_rank_died(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run_ranks(raise_before_a_peer_dies, {"folder": str(tmp_path)}, processes=2)
    assert (result.status, result.died, result.raised) == (1, {0: signal.SIGABRT}, True)
    assert "ConnectionResetError: [Errno 104] Connection reset by peer" in capfd.readouterr().err


def lose_a_peer_slowly() -> int:
    """As in a training: a rank that lost a peer needs some time before it reports that."""
    try:
        return die_while_others_reduce()
    except RuntimeError:
        time.sleep(3.0)
        raise


def form_groups_and_listen() -> list[str]:
    """Return the addresses at which a rank with two groups listens."""
    with pool_world():
        dist.all_reduce(torch.ones(1))
        dist.new_group([0, 1])
        addresses = sockets.addresses(sockets.LISTENING)
        dist.barrier()
    return addresses


reads_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="listening sockets are read from Linux's /proc"
)


@reads_proc
def test_ranks_listen_on_loopback_only(pool: Pool) -> None:
    loopback = "0100007F"
    addresses = pool.run(form_groups_and_listen, {}, world_size=2)
    assert [set(of_rank) for of_rank in addresses] == [{loopback}] * 2


@reads_proc
def test_the_owner_of_ranks_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sockets.addresses(sockets.LISTENING)  # an earlier test may have left a server here
    starter = launch._Starter()
    monkeypatch.setattr(launch, "_PRELOAD", "json")
    monkeypatch.setattr(launch, "_starter", starter)
    with Pool() as pool:
        pool.run(light_tasks.answer, {"base": 1}, world_size=2)
        assert sockets.addresses(sockets.LISTENING) == before
    starter._close()


OWNER = f"""
import sys
from itertools import accumulate
from pathlib import Path
from composer3d.runtime import launch

if __name__ == "__main__":
    launch._PRELOAD = "json"
    with launch.Pool() as pool, launch.temporary_folder("composer3d-test-") as temporary:
        arguments = {{"pids": Path(sys.argv[1]), "temporary": temporary}}
        pool.run("{light_tasks.__name__}:write_and_sleep", arguments, world_size=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_and_folders_end_with_their_owner(tmp_path: Path, number: int) -> None:
    (tmp_path / "owner.py").write_text(OWNER)
    pids, temporary = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "owner.py"), str(pids)]
    owner = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    workers = [int(text) for text in wait_until(lambda: texts(pids))]
    assert [path.name[:16] for path in temporary.iterdir()] == ["composer3d-test-"]
    owner.send_signal(number)
    assert owner.wait(timeout=10) != 0
    wait_until(lambda: not any(map(is_running, workers)), limit_s=10.0)
    wait_until(lambda: not any(temporary.iterdir()), limit_s=5.0)


def texts(folder: Path) -> list[str]:
    """The texts of the two files in ``folder``; empty before both are written."""
    contents = [path.read_text() for path in folder.iterdir()]
    return contents if len(contents) == 2 and all(contents) else []


def wait_until(condition: Callable[[], Any], limit_s: float = 150.0) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return value


def test_workers_end_with_the_starter_and_the_next_world_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starter = launch._Starter()
    monkeypatch.setattr(launch, "_PRELOAD", "json")
    monkeypatch.setattr(launch, "_starter", starter)
    with Pool() as pool:
        error, _ = failing(pool, light_tasks.kill_my_parent, {}, world_size=2)
        assert error.failures == {0: "the process died", 1: "the process died"}
        assert pool.run(light_tasks.answer, {"base": 1}, world_size=1) == [(1, "1", "0")]
    starter._close()


def test_the_starter_ends_with_its_owner_while_it_imports(tmp_path: Path) -> None:
    """The import of torch takes seconds, in which nothing reads the socket."""
    (tmp_path / "slow_to_import.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n"
    )
    ours, theirs = socket.socketpair()
    paths = [str(tmp_path), *sys.path]
    code = (
        f"import sys; sys.path[:] = {paths!r}; from composer3d.runtime.starter import serve; "
        f"serve({theirs.fileno()}, 'slow_to_import')"
    )
    with theirs, ours:
        starter = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], cwd=tmp_path
        )
        # What waits to be read does not hide the end.
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        path = os.fsencode(temporary)
        ours.send(REQUEST.pack(REMOVE_AT_END, len(path)) + path)
        while not (tmp_path / "begun").exists():
            assert starter.poll() is None
            time.sleep(0.05)
    try:
        assert starter.wait(10) == 1
        assert not temporary.exists()
    finally:
        starter.kill()
        starter.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_stop_signal_ends_the_starter_while_it_begins(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Ctrl-C of the terminal reaches the starter before it can ignore it."""
    connection = launch._Starter()
    connection.ensure_running()
    process = connection._process
    assert process is not None
    try:
        for _ in range(50):
            process.send_signal(number)
            time.sleep(0.01)
        assert process.poll() is None
    finally:
        connection._close()
    assert capfd.readouterr().err == ""
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {number}
