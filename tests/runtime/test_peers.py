"""Who is missing when a collective fails: named once, whether it died, is stopped, or hangs somewhere else."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.checkpoint import Store
from composer3d.runtime import peers
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.process_group import agree_on_round, on_all, open_store, pool_world, world


def lose_a_peer(how: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers.GRACE_S = 2.0  # less than the pool leaves to ranks that lost another
    watch = peers.explain_lost_peers(
        open_store(),
        rank=rank,
        size=size,
        describe=lambda peer: f"rank {peer} (x)",
        advice=lambda: "try again",
    )
    with watch, pool_world(timeout_s=4.0):
        dist.barrier()
        if rank == 1:
            if how == "dies":
                os._exit(3)
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "raises":
                raise ValueError(
                    "connection closed by peer"
                )  # no word of a collective, whatever it says
            on_all("hanging", lambda: time.sleep(100))
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "rank 1 (x) does not answer: it has died, or is stopped; try again"),
        ("stops", "rank 1 (x) does not answer: it has died, or is stopped; try again"),
        ("raises", "rank 1 (x) does not answer: it has died, or is stopped; try again"),
        ("hangs", "a collective failed: rank 1 (x) at runtime/process_group.py:"),
    ],
)
def test_the_missing_rank_is_named_once(pool: Pool, how: str, said: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(lose_a_peer, {"how": how}, world_size=3, limit_s=60.0)
    lines = [line for rank in (0, 2) for line in lines_of(caught.value.failures.get(rank))]
    assert len(lines) == 1
    assert lines[0].startswith(said)
    assert "Traceback" not in lines[0]
    if how == "raises":
        assert "ValueError" in str(caught.value.failures[1])


def lines_of(failure: Any) -> tuple[str, ...]:
    return getattr(failure, "lines", ())


def of_another_kind() -> None:
    with peers.explain_lost_peers(open_store(), rank=0, size=2, describe=str, advice=str):
        raise RuntimeError("shapes do not fit")


def test_another_error_stays_as_it_is(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="RuntimeError: shapes do not fit"):
        pool.run(of_another_kind, {}, world_size=1)


def time_outs(folder: Path) -> list[float]:
    with world(torch.device("cpu"), timeout_s=7.0):
        dist.barrier()
        made = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",)).get_group()
        groups = [
            dist.group.WORLD,
            dist.new_group([0, 1]),
            made,
            Store(folder, keep=1, timeout_s=9.0)._group,
        ]
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in groups
        ]


def test_every_group_has_the_time_out_of_its_world(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(time_outs, {"folder": tmp_path}, world_size=2) == [[7.0, 7.0, 7.0, 9.0]] * 2


def start(store: dist.Store, ranks: list[int], size: int) -> dict[int, str]:
    """The rounds that ranks of one start of a job come to."""
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        found[rank] = agree_on_round(store.clone(), rank, size, timeout_s=5.0)  # type: ignore[attr-defined]

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # so that those that come late meet what the others left
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_each_start_of_a_job_has_a_round_of_its_own(order: list[int]) -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    rounds = []
    for _ in range(3):
        found = start(store, order, 3)
        assert len(found) == 3
        assert len(set(found.values())) == 1
        rounds.append(found[0])
        assert not store.check([f"{found[0]}/anything"])
    assert len(set(rounds)) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ranks_that_met_in_part_do_not_hinder_the_next_start() -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    assert start(store, [1, 2], 3) == {}  # rank 0 died before it met them, and they give up
    found = start(store, [0, 2, 1], 3)
    assert len(found) == 3
    assert len(set(found.values())) == 1
