"""The pool of workers: answers by rank, and failures that are quick, complete and about the cause."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.dist import check_same, pool_world
from composer3d.errors import MeshError
from composer3d.launch import Pool, WorkerError, run_elastic


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


def failing(pool: Pool, function: Any, arguments: dict[str, Any], **how: Any) -> tuple[WorkerError, float]:
    """The error of a task and the seconds it took."""
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.run(function, arguments, **how)
    return caught.value, time.monotonic() - begin


def test_answers_come_by_rank(pool: Pool) -> None:
    expected = [(10 + rank, "4", str(rank)) for rank in range(4)]
    assert pool.run(answer, {"base": 10}, world_size=4) == expected
    assert pool.run(f"{__name__}:answer", {"base": 10}, world_size=4) == expected  # by name: not imported here


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


def crash_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the reason")
    time.sleep(60)


def leave_with_2() -> None:
    raise SystemExit(2)


@pytest.mark.parametrize(("function", "status", "said"), [(crash_on_rank_1, 1, True), (leave_with_2, 2, False)])
def test_elastic_job_tells_the_reason_and_no_more(
    function: Callable[[], None], status: int, said: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_elastic(function, (), processes=2) == status
    said_lines = capfd.readouterr().err.splitlines()
    if said:
        assert said_lines[0].startswith("Traceback")
        assert said_lines[-1] == "ValueError: the reason"
    else:
        assert said_lines == []
