"""The process group of a job: rounds of torchrun's store, time-outs, and errors on all ranks."""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from composer3d.checkpoint import Store
from composer3d.checkpoint.manifest import TensorSpec
from composer3d.checkpoint.store import global_specs
from composer3d.facts.errors import DataError, DeviceError, MeshError, UserError
from composer3d.recipe.schema import MeshTable
from composer3d.runtime import devices, process_group
from composer3d.runtime.devices import Gpu
from composer3d.runtime.launch import Pool, WorkerError
from composer3d.runtime.mesh import Mesh
from composer3d.runtime.process_group import (
    agree_on_round,
    broadcast_object,
    check_same,
    distinct_objects,
    gather_objects,
    max_over_ranks,
    on_all,
    on_main,
    open_store,
    pick_device,
    pool_world,
    rank_0_holds_store,
    world,
)
from composer3d.runtime.starter import STORE_VARIABLE
from tests.runtime import sockets


def errors_of(functions: Sequence[Callable[[int], object]]) -> list[tuple[type, tuple[str, ...]]]:
    """Call functions with the rank, in a world; return the kinds and lines of their errors."""
    errors = []
    with pool_world():
        for function in functions:
            with pytest.raises(UserError) as caught:
                function(dist.get_rank())
            errors.append((caught.type, caught.value.lines))
    return errors


def compare() -> list[tuple[type, tuple[str, ...]]]:
    return errors_of([lambda rank: check_same("the data", ["a", "b", "a"][rank])])


def test_ranks_with_different_values_are_named(pool: Pool) -> None:
    lines = (
        "the data must be the same on every rank; give all nodes the same files",
        "ranks 0, 2 see 'a'",
        "ranks 1 see 'b'",
    )
    # No rank goes on alone.
    assert pool.run(compare, {}, world_size=3) == [[(MeshError, lines)]] * 3


def time_outs(folder: Path) -> list[float]:
    """The time-outs of the groups that are made in a world, in seconds."""
    with world(torch.device("cpu"), timeout_s=7.0):
        dist.barrier()
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        groups = [
            dist.group.WORLD,
            dist.new_group([0, 1]),
            mesh.get_group(),
            Store(folder, keep=1, timeout_s=9.0)._group,
        ]
        return [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in groups
        ]


def test_every_group_has_the_time_out_of_its_world(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(time_outs, {"folder": tmp_path}, world_size=2) == [[7.0, 7.0, 7.0, 9.0]] * 2


def test_a_store_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    assert rank_0_holds_store()
    with pytest.raises(MeshError) as caught:
        open_store(timeout_s=0.5)
    (line,) = caught.value.lines
    assert line.startswith("rank 1 did not meet all 2 ranks within 0.5 s at 127.0.0.1:")
    assert line.endswith("on all of its nodes, and see that they can reach that address")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not rank_0_holds_store()


def start_ranks(store: dist.Store, ranks: list[int], size: int) -> dict[int, str]:
    """Start some ranks of a job; return the names of the rounds that they join, by rank."""
    rounds: dict[int, str] = {}

    def join(rank: int) -> None:
        own_store: dist.Store = store.clone()  # type: ignore[attr-defined]
        rounds[rank] = agree_on_round(own_store, rank, size, timeout_s=5.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)  # a later rank sees the keys of the earlier ones
    for thread in threads:
        thread.join()
    return rounds


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_each_start_of_a_job_has_a_round_of_its_own(order: list[int]) -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    rounds = []
    for _ in range(3):
        found = start_ranks(store, order, 3)
        assert len(found) == 3
        assert len(set(found.values())) == 1
        rounds.append(found[0])
        assert not store.check([f"{found[0]}/anything"])
    assert len(set(rounds)) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_start_does_not_hinder_the_next_one() -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    # Rank 0 died before it met them, and they give up.
    assert start_ranks(store, [1, 2], 3) == {}
    found = start_ranks(store, [0, 2, 1], 3)
    assert len(found) == 3
    assert len(set(found.values())) == 1


# By the rank that fails: the line of its error, or "" for an OSError. And what all ranks report.
FAILURES: list[tuple[dict[int, str], tuple[str, ...]]] = [
    ({1: "wrong"}, ("rank 1: wrong", "rank 1: another line")),
    ({0: "wrong", 2: "wrong"}, ("rank 0, 2: wrong", "rank 0, 2: another line")),
    ({0: "wrong", 1: "wrong", 2: "wrong"}, ("wrong", "another line")),
    (
        {1: "wrong", 2: ""},
        (
            "rank 1: wrong",
            "rank 1: another line",
            "rank 2: data: [Errno 2] No such file or directory: 'x.bin'",
        ),
    ),
]


def fail_on_some(failing_ranks: dict[int, str], rank: int) -> int:
    def work() -> int:
        if rank in failing_ranks and not failing_ranks[rank]:
            raise FileNotFoundError(2, "No such file or directory", "x.bin")
        if rank in failing_ranks:
            raise DataError([failing_ranks[rank], "another line"])
        return rank

    return on_all("data", work)


def fail_in_turn() -> list[tuple[type, tuple[str, ...]]]:
    """A task: each of ``FAILURES``, and one of rank 0 alone."""
    return errors_of(
        [
            *(partial(fail_on_some, failing_ranks) for failing_ranks, _ in FAILURES),
            lambda rank: on_main("data", lambda: Path(f"missing-{rank}").stat()),
        ]
    )


def test_a_failure_on_one_rank_is_raised_on_all(pool: Pool) -> None:
    of_main = ("data: [Errno 2] No such file or directory: 'missing-0'",)
    expected = [(DataError, lines) for _, lines in FAILURES] + [(UserError, of_main)]
    assert pool.run(fail_in_turn, {}, world_size=3) == [expected] * 3


def test_the_hosts_of_an_error_are_named_if_the_job_has_several() -> None:
    errors = [None, *(DataError("wrong") for _ in range(11))]
    hosts = [f"node-{rank // 2}" for rank in range(12)]
    report = process_group._report_of(errors[:5], hosts[:5])
    assert report.lines == ("rank 1, 2, 3, 4 on node-0, node-1, node-2: wrong",)
    ranks = ", ".join(map(str, range(1, 12)))
    assert process_group._report_of(errors, ["node"] * 12).lines == (f"rank {ranks}: wrong",)
    hosts = [f"node-{rank}" for rank in range(12)]
    line = process_group._report_of(errors, hosts).lines[0]
    assert line.endswith("node-7, node-8 and 3 more: wrong")


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("composer3d.runtime.process_group.count_gpus", lambda: 0)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(
        DeviceError, match="local rank 0 needs a GPU of its own, but this node shows 0;"
    ):
        pick_device("cuda")

    monkeypatch.setenv("WORLD_SIZE", "4")
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match='"auto" found no GPU on this node, but other nodes'):
        pick_device("auto")

    monkeypatch.setattr("composer3d.runtime.process_group.count_gpus", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 1)
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        DeviceError, match="local rank 2 needs a GPU of its own, but this node shows 2;"
    ):
        pick_device("auto")
    # A scheduler shows each task one GPU.
    monkeypatch.setattr("composer3d.runtime.process_group.count_gpus", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 0)


def gather_over_a_part() -> None:
    with pool_world():
        group = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            with pytest.raises(ValueError, match="the group has 2 of 3 ranks; it must have all"):
                gather_objects("x", group)
        dist.barrier()  # the ranks of the group may still form it


def settled_connections() -> int:
    """Count the connections of this process once their number has stood for half a second.

    A rank whose peer connects to it holds the connection only when its own thread accepts it, which
    no collective waits for.
    """
    count, since = 0, time.monotonic()
    while time.monotonic() - since < 0.5:
        if (now := len(sockets.addresses(sockets.CONNECTED))) != count:
            count, since = now, time.monotonic()
        time.sleep(0.02)
    return count


def count_connections(all_pairs: bool) -> list[int]:
    """A task: the connections of a world, after one more group is formed, and after its use."""
    if not all_pairs:
        process_group._MOST_RANKS_ALL_PAIRS = 2
    with pool_world():
        dist.barrier()
        counts = [settled_connections()]
        dist.barrier()  # no rank forms the group while another still counts
        group = process_group.form_group(backend="gloo")
        dist.barrier()
        counts.append(settled_connections())
        dist.barrier(group)
        dist.all_reduce(torch.ones(1), group=group)
        counts.append(settled_connections())
        dist.barrier()
        return counts


@pytest.mark.parametrize("all_pairs", [True, False])
@pytest.mark.skipif(not Path("/proc/self/net/tcp").is_file(), reason="Linux has it")
def test_the_ranks_of_a_group_connect_when_it_is_formed(pool: Pool, all_pairs: bool) -> None:
    """A large group does not connect all of its pairs: their number grows with its square."""
    counts = pool.run(count_connections, {"all_pairs": all_pairs}, world_size=8)
    for rank, (formed, grouped, used) in enumerate(counts):
        # Those at distances of 1, 2 and 4 on both sides, and rank 0.
        expected = 7 if all_pairs or rank == 0 else len({1, 7, 2, 6, 4, rank})
        assert (grouped - formed, used - grouped) == (expected, 0)


def use_a_mesh() -> list[int]:
    """A task: the connections of this process when a mesh is formed, and after its groups' use."""
    with pool_world() as device:
        groups = Mesh.build(MeshTable(dp_shard=2, tp=2), device).groups(has_experts=False)
        dist.barrier()
        counts = [settled_connections()]
        dist.barrier()  # no rank uses a group while another still counts
        for group in groups.values():
            dist.all_reduce(torch.ones(1), group=group)
        counts.append(settled_connections())
        dist.barrier()
        return counts


@pytest.mark.skipif(not Path("/proc/self/net/tcp").is_file(), reason="Linux has it")
def test_the_groups_of_a_mesh_connect_when_it_is_formed(pool: Pool) -> None:
    for formed, used in pool.run(use_a_mesh, {}, world_size=4):
        assert formed == used


def test_groups_are_formed_only_by_functions_that_connect_them() -> None:
    """A group that is formed elsewhere would wait five time-outs for a rank that hangs."""
    makers = re.compile(
        r"\b(new_group|new_subgroups\w*|split_group|init_device_mesh|(un)?flatten_mesh)\("
    )
    package = Path(process_group.__file__).parents[1]
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if makers.search(line) and not line.lstrip().startswith(("#", "def "))
    }
    assert found == {"runtime/mesh.py", "runtime/process_group.py"}
    # In the mesh, all of them are in a call of ``form_mesh``.
    text = (package / "runtime/mesh.py").read_text()
    calls = re.findall(r"(form_mesh\(\s*lambda: )?\b(init_device|flatten|unflatten)_mesh\(", text)
    assert len(calls) == 4
    assert all(is_formed for is_formed, _ in calls)


def exchange_objects() -> list[object]:
    """A task: send values of different sizes, and return what this rank gets."""
    with pool_world():
        return [*_exchanged(), *gather_bytes()]


def _exchanged() -> list[object]:
    rank = dist.get_rank()
    return [
        gather_objects("x" * 100 * rank),
        broadcast_object({"from": rank}, source=2),
        broadcast_object([rank], keep=rank != 1),
        distinct_objects(["b", "a", "b"][rank]),
        on_main("data", lambda: rank),
    ]


def gather_bytes() -> list[object]:
    """Gather bytes on rank 0 while another collective runs."""
    gathering = process_group.Gathering(bytes([dist.get_rank(), 255]))
    same = torch.ones(())
    dist.all_reduce(same)
    return [gathering.await_contents(), gathering.has_arrived(), same.item()]


def test_objects_and_bytes_reach_only_the_ranks_that_need_them(pool: Pool) -> None:
    first, second, third = pool.run(exchange_objects, {}, world_size=3)
    contents = [b"\x00\xff", b"\x01\xff", b"\x02\xff"]
    texts = ["", "x" * 100, "x" * 200]
    assert first == [texts, {"from": 2}, [0], ["b", "a"], 0, contents, True, 3.0]
    assert second == [None, {"from": 2}, None, ["b", "a"], 0, None, True, 3.0]
    assert third == [None, {"from": 2}, [0], ["b", "a"], 0, None, True, 3.0]


def form_like_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    """A backend for GPUs alone: it has none for tensors in host memory, as NCCL."""
    return FakeProcessGroup._create_internal(rank, size)


def form_on_gpus(gpus: list[Gpu], folder: Path) -> list[object]:
    """A task: form the world of GPUs that exist in name only, and use its group for objects."""
    dist.Backend.register_backend("gpus", form_like_nccl, devices=["cuda"])
    process_group._BACKENDS["cuda"] = "gpus"
    rank = int(os.environ["RANK"])
    torch.cuda.set_device = lambda device: None
    torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
    torch.accelerator.device_count = lambda: 1
    devices.gpu_of = lambda device: gpus[rank]
    with world(torch.device("cuda", 0), timeout_s=20.0):
        assert dist.get_backend() == "gpus"
        values = _exchanged()
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.ones(()))
        check_same("the data", "same")
        values.append(max_over_ranks([rank, -rank]))
        values.append(on_all("data", lambda: rank))
        store = Store(folder, keep=1)
        values += [store.newest_whole(), global_specs({f"weight-{rank}": torch.ones(rank, 2)})]
        with pytest.raises(MeshError, match="the data must be the same on every rank"):
            check_same("the data", rank)
        with pytest.raises(DataError, match=r"rank 2: wrong"):
            on_all("data", lambda: fail() if rank == 2 else None)
    assert process_group._host_group is None
    return values


def fail() -> None:
    raise DataError("wrong")


def test_the_world_of_gpus_has_a_group_for_objects(pool: Pool, tmp_path: Path) -> None:
    """The default group takes no tensors of the host, as that of NCCL."""
    gpus = [Gpu("a", "1"), Gpu("a", "2"), Gpu("b", "1")]
    specs = {f"weight-{rank}": TensorSpec((rank, 2), "float32") for rank in range(3)}
    seen = pool.run(form_on_gpus, {"gpus": gpus, "folder": tmp_path}, world_size=3)
    for rank, values in enumerate(seen):
        kept = [0] if rank != 1 else None
        gathered = ["", "x" * 100, "x" * 200] if rank == 0 else None
        assert values == [
            *[gathered, {"from": 2}, kept, ["b", "a"], 0],
            *[[2.0, 0.0], rank, None, specs],
        ]


def test_a_world_whose_ranks_share_a_gpu_is_not_formed(pool: Pool, tmp_path: Path) -> None:
    gpus = [Gpu("a", "1"), Gpu("a", "2"), Gpu("a", "2")]
    with pytest.raises(WorkerError) as caught:
        pool.run(form_on_gpus, {"gpus": gpus, "folder": tmp_path}, world_size=3)
    errors = caught.value.failures
    assert {rank: type(error) for rank, error in errors.items()} == dict.fromkeys(
        range(3), DeviceError
    )
    assert "ranks 1 and 2 would share the GPU 2 of a" in str(errors[0])


def test_objects_are_not_gathered_over_a_part_of_the_ranks(pool: Pool) -> None:
    assert pool.run(gather_over_a_part, {}, world_size=3) == [None] * 3
