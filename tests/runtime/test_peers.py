"""When a collective fails, the missing rank is named once: it died, is stopped, or hangs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from composer3d.facts.errors import LostPeersError
from composer3d.facts.interrupts import STOP_SIGNALS
from composer3d.recipe.schema import MeshTable
from composer3d.runtime import launch, peers
from composer3d.runtime import mesh as meshes
from composer3d.runtime.launch import LOST_PEERS, Pool, WorkerError, run_ranks
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import on_all, open_store, pool_world, world
from composer3d.runtime.situation import Situation
from tests.long import some_of


def make_watch(store: dist.Store, rank: int, size: int, **options: Any) -> peers.PeerWatch:
    return peers.PeerWatch(
        store,
        rank=rank,
        size=size,
        describe=lambda rank: f"rank {rank}",
        advice=lambda: "try again",
        **options,
    )


def lose_peers(events: dict[int, str]) -> None:
    """A task: something happens to these ranks before an all-reduce of all ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Less than the time that the pool gives ranks that lost another.
    peers.GRACE_S = 2.0
    with make_watch(open_store(), rank, size), pool_world(timeout_s=4.0):
        dist.barrier()
        event = events.get(rank)
        if event == "dies":
            os._exit(3)
        if event == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if event == "raises":
            # Not the error of a collective, whatever its text says.
            raise ValueError("connection closed by peer")
        if event == "hangs":
            on_all("hanging", lambda: time.sleep(100))
        dist.all_reduce(torch.ones(1))


@some_of(
    1,
    ("events", "start"),
    [
        (
            {1: "dies", 2: "stops", 4: "raises"},
            "rank 1, rank 2, rank 4 do not answer: they have died, or are stopped; try again",
        ),
        ({1: "stops"}, "rank 1 does not answer: it has died, or is stopped; try again"),
        ({1: "hangs"}, "a collective failed: rank 1 at runtime/process_group.py:"),
    ],
)
def test_the_missing_ranks_are_named_once(pool: Pool, events: dict[int, str], start: str) -> None:
    size = max(events) + 2
    with pytest.raises(WorkerError) as caught:
        pool.run(lose_peers, {"events": events}, world_size=size, limit_s=60.0)
    failures = caught.value.failures
    lines = [line for rank in set(range(size)) - set(events) for line in lines_of(failures[rank])]
    assert len(lines) == 1
    assert lines[0].startswith(start)
    assert "Traceback" not in lines[0]
    assert all("ValueError" in failures[rank] for rank in events if events[rank] == "raises")


def hang_while_groups_are_formed(folder: Path, place: str) -> None:
    """A task: rank 1 hangs at ``place``. The others write what they are told, and how late."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    begin_s = time.monotonic()

    def hang_after(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*arguments: Any, **keywords: Any) -> Any:
            made = function(*arguments, **keywords)
            nonlocal begin_s
            begin_s = time.monotonic()
            if rank == 1:
                hang(folder)
            return made

        setattr(owner, name, run)

    store: Any = open_store(timeout_s=TIMEOUT_S)
    try:
        with make_watch(store.clone(), rank, size):
            if place == "in the script" and rank == 1:
                hang(folder)
            if place == "world":
                hang_after(dist, "init_process_group")
            with world(torch.device("cpu"), timeout_s=TIMEOUT_S, store=store):
                if place == "mesh":
                    hang_after(meshes, "flatten_mesh")
                mesh = Mesh.build(MeshTable(dp_shard=2, tp=2, ep=2), torch.device("cpu"))
                mesh.groups(has_experts=True)
                mesh.replicas()
    except LostPeersError as error:
        text = f"{time.monotonic() - begin_s}\n{error}"
        (folder / f"{rank}{'-line' if error.lines else ''}").write_text(text)
        raise


def hang(folder: Path) -> None:
    """Wait until the other three ranks know."""
    until_s = time.monotonic() + 100
    while len(list(folder.iterdir())) < 3 and time.monotonic() < until_s:
        time.sleep(0.1)
    os._exit(1)


TIMEOUT_S = 6.0


@some_of(1, "place", ["in the script", "world", "mesh"])
def test_a_rank_that_hangs_before_the_first_exchange_of_a_group_is_named_in_one_time_out(
    pool: Pool, tmp_path: Path, place: str
) -> None:
    arguments = {"folder": tmp_path, "place": place}
    with pytest.raises(WorkerError):
        pool.run(hang_while_groups_are_formed, arguments, world_size=4, limit_s=100.0)
    (told,) = tmp_path.glob("*-line")
    seconds, line = told.read_text().splitlines()
    assert line.startswith("a collective failed: rank 1 at ")
    assert len(list(tmp_path.iterdir())) == 3
    # One time-out and the time for answers; gloo itself would wait for five time-outs.
    assert float(seconds) < 4 * TIMEOUT_S - 1


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("Wait timeout"), True),
        (RuntimeError("Socket Timeout"), True),
        (RuntimeError("[/x/gloo/transport/tcp/pair.h:311] Connect timeout [none]"), True),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]"), True),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /composer3d/world/all"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (dist.DistBackendError("NCCL communicator: remote process exited"), True),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
        (RuntimeError("the compiler timed out"), False),
        (TimeoutError("Connection closed by peer"), False),
    ],
)
def test_the_errors_that_tell_of_a_lost_peer(error: BaseException, is_lost: bool) -> None:
    assert peers.is_lost_peer(error) == is_lost
    outer = ValueError("of a thread")
    outer.__cause__ = error
    assert peers.is_lost_peer(outer) == is_lost


def end_before_an_all_reduce(folder: str) -> int:
    """As rank 1, die; as rank 2, raise an error; as rank 3, leave. The others lose their peers."""
    rank = int(os.environ["RANK"])
    peers.GRACE_S = 200.0  # longer than the launcher waits

    def write_report(text: str) -> str:
        path = Path(folder) / "report.txt"
        path.write_text(text)
        return str(path)

    try:
        options = {"write_report": write_report, "has_launcher": True}
        with make_watch(open_store(), rank, 5, **options), pool_world(timeout_s=20.0):
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2:
                raise ValueError("boom")
            if rank == 3:
                return 0
            dist.all_reduce(torch.ones(1))
    except LostPeersError as error:
        return 3 if error.lines else LOST_PEERS
    return 0


def test_nobody_waits_for_ranks_that_have_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher tells how they ended. The others say what they did, before it kills them."""
    monkeypatch.setattr(launch, "REPORT_S", 40.0)
    result = run_ranks(end_before_an_all_reduce, {"folder": str(tmp_path)}, processes=5)
    assert result.stuck == []
    assert result.is_lost
    assert (result.died, result.raised, result.left) == ({1: signal.SIGKILL}, True, {3: 0})
    assert "ValueError: boom" in capfd.readouterr().err
    finding, _, _, errors, *rest = (tmp_path / "report.txt").read_text().splitlines()
    assert (finding, errors) == (
        "rank 1, rank 2, rank 3 have ended",
        "Errors, by the clocks of the machines:",
    )
    assert {f"rank {rank} has ended" for rank in (1, 2, 3)} <= set(rest)
    assert any(line.startswith(("rank 0 on ", "rank 4 on ")) for line in rest)


def test_a_rank_that_has_ended_does_not_hide_one_that_is_stopped() -> None:
    store = dist.HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30.0)
    store.set("process/1", str(ended.pid))
    store.set("process/2", str(os.getpid()))
    with make_watch(store, 0, 3, has_launcher=True) as watch:
        (line,) = watch._search(RuntimeError("gloo: timed out"), "try again").lines
    assert line == ("rank 1, rank 2 do not answer: they have died, or are stopped; try again")


def lines_of(failure: Any) -> tuple[str, ...]:
    return getattr(failure, "lines", ())


def test_another_error_stays_as_it_is() -> None:
    expected = pytest.raises(RuntimeError, match="shapes do not fit")
    with expected, make_watch(dist.HashStore(), 0, 2):
        raise RuntimeError("shapes do not fit")


def test_the_cause_is_the_error_and_not_its_note() -> None:
    error = RuntimeError("Timed out")
    error.add_note("[rank 0]")
    store = dist.HashStore()
    elsewhere = Situation("b", "training/loop.py:5", "step 7", "", {})
    store.set("here/1", elsewhere.to_json())
    with make_watch(store, 0, 2) as watch:
        (line,) = watch._search(error, "try again").lines
    assert line == (
        "a collective failed: rank 1 at training/loop.py:5 did not join it "
        "(RuntimeError: Timed out); try again"
    )


@pytest.mark.parametrize("is_first_of_node", [True, False])
def test_without_a_store_the_first_rank_of_each_node_names_its_host(is_first_of_node: bool) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    options = {"store_host": "rank 0", "is_first_of_node": is_first_of_node}
    with make_watch(store, 9, 16, **options) as watch:
        del server
        lines = watch._search(RuntimeError("Connection closed by peer"), "try again").lines
    line = "the job's store does not answer: rank 0 has ended; try again"
    assert lines == ((line,) if is_first_of_node else ())


def test_the_report_names_the_last_collectives_of_each_rank(tmp_path: Path) -> None:
    """Rank 0 raises the alarm, and the others answer. Rank 2 cannot write its file."""
    store = dist.HashStore()
    reports: list[str] = []

    def keep_report(text: str) -> str:
        reports.append(text)
        return "report.txt"

    def watch_of(rank: int) -> peers.PeerWatch:
        def write_trace(moment: str) -> str:
            path = tmp_path / f"{moment}-rank-{rank}"
            if rank == 2:
                raise OSError("disk full")
            path.write_text("collectives")
            return str(path)

        return make_watch(store, rank, 3, write_report=keep_report, write_trace=write_trace)

    with ExitStack() as stack:
        watch, *_ = [stack.enter_context(watch_of(rank)) for rank in range(3)]
        (line,) = watch._search(RuntimeError("NCCL: timed out"), "try again").lines
    assert line.endswith("; what each rank did is in report.txt; try again")
    moment = store.get("alarm").decode()
    assert re.fullmatch(r"\d{8}T\d{6}Z", moment)
    found = re.findall(r"^(rank \d) on|^  last collectives of NCCL: (.*)$", reports[0], re.M)
    assert found == [
        ("rank 0", ""),
        ("", str(tmp_path / f"{moment}-rank-0")),
        ("rank 1", ""),
        ("", str(tmp_path / f"{moment}-rank-1")),
        ("rank 2", ""),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {f"{moment}-rank-{n}" for n in (0, 1)}


def hang_in_a_write(text: str) -> str:
    time.sleep(30.0)
    return "late.txt"


def fail(text: str) -> str:
    raise UnicodeEncodeError("utf-8", "", 0, 1, "a name that is no text")


@pytest.mark.parametrize("write_report", [hang_in_a_write, fail])
def test_a_report_that_hangs_or_fails_does_not_hide_the_missing_rank(
    write_report: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system may be what hangs, and then the store is not what is gone."""
    monkeypatch.setattr(peers, "GRACE_S", 0.3)
    store = dist.HashStore()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        watch = make_watch(store, 0, 2, write_report=write_report)
        with pytest.raises(LostPeersError) as caught, watch:
            raise RuntimeError("gloo: timed out")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert caught.value.lines == (
        "rank 1 does not answer: it has died, or is stopped; "
        "the report of what each rank did could not be written; try again",
    )
    assert store.check(["spoken"])
