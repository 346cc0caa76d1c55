"""The private API of torch exists, and each wrapper of it does what its docstring says.

A new version of torch is supported once these tests pass with it.
"""

import dataclasses
import importlib
import inspect
import logging
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.utils import _to_kwargs
from torch.testing._internal.distributed.fake_pg import FakeStore

from composer3d.runtime import torch_private
from composer3d.runtime.launch import Pool
from composer3d.runtime.process_group import pool_world

RANK, WORLD_SIZE = 5, 8


@pytest.fixture
def fake_world() -> Iterator[None]:
    """A world in which this process is rank 5 of 8, without other processes or sockets."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


def parameter_names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_storage_info_has_the_fields_of_a_checkpoint() -> None:
    info = torch_private.StorageInfo("__0_0.distcp", 16, 64)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 16, 64)
    names = [field.name for field in dataclasses.fields(torch_private.StorageInfo)]
    assert names[:3] == ["relative_path", "offset", "length"]
    # Pickled metadata names the class by this path.
    assert torch_private.StorageInfo.__module__ == "torch.distributed.checkpoint.filesystem"
    assert torch_private.StorageInfo.__qualname__ == "_StorageInfo"


@pytest.mark.usefixtures("fake_world")
def test_a_group_is_found_by_its_name() -> None:
    group = dist.new_group([1, 5])
    assert torch_private.group_by_name(group.group_name) is group
    assert torch_private.group_by_name(dist.group.WORLD.group_name) is dist.group.WORLD


def test_the_default_timeout_holds_inside_the_context_only() -> None:
    c10d = dist.distributed_c10d
    before = (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout)
    seven = timedelta(seconds=7)
    assert seven not in before
    with torch_private.default_timeout(seven):
        assert c10d._get_default_timeout("gloo") == seven
        assert c10d._get_default_timeout("nccl") == seven
    assert (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout) == before


@pytest.mark.usefixtures("fake_world")
def test_dims_of_a_mesh_are_joined_and_split() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))

    flat = torch_private.flatten_mesh(mesh, "all")
    assert flat.mesh_dim_names == ("all",)
    assert flat.mesh.tolist() == list(range(WORLD_SIZE))
    assert dist.get_process_group_ranks(flat.get_group()) == list(range(WORLD_SIZE))

    split = torch_private.unflatten_mesh(mesh["inner"], [2, 2], ["a", "b"])
    assert split.mesh_dim_names == ("a", "b")
    assert split.mesh.tolist() == [[4, 5], [6, 7]]
    assert dist.get_process_group_ranks(split["a"].get_group()) == [5, 7]
    assert dist.get_process_group_ranks(split["b"].get_group()) == [4, 5]


@pytest.mark.usefixtures("fake_world")
def test_the_offset_of_a_shard_is_a_global_index() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    # Rank 5 is at (1, 1).
    for placements, offset in (
        ([Replicate(), Replicate()], (0, 0)),
        ([Replicate(), Shard(0)], (2, 0)),
        ([Shard(1), Shard(0)], (2, 6)),
    ):
        shape = [8, 12]
        for placement, size in zip(placements, (2, 4), strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] //= size
        tensor = DTensor.from_local(torch.empty(shape), mesh, placements, run_check=False)
        assert tensor.shape == (8, 12)
        assert torch_private.offset_of(tensor) == offset


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_pipelines_cut_held_tensors_and_fsdp_does_not_find_them() -> None:
    torch_private.cut_by_pipelines(Holder, "tensor")
    held = Holder(torch.arange(4))
    _, parts = split_args_kwargs_into_chunks((), {"held": held}, 2)
    assert [part["held"].tensor.tolist() for part in parts] == [[0, 1], [2, 3]]
    # What FSDP moves inputs by.
    device = torch.device("meta")
    moved, _ = _to_kwargs((held,), {}, device, use_side_stream_for_tensor_copies=False)
    assert moved[0][0] is held


@pytest.mark.usefixtures("fake_world")
def test_a_schedule_runs_the_actions_of_a_list() -> None:
    group = dist.new_group([RANK, 0])
    example = torch.empty(1, requires_grad=True)
    stage_index = dist.get_rank(group)
    stage = PipelineStage(
        nn.Identity(),
        stage_index,
        2,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=group,
    )
    # It takes the arguments of the public class of all schedules with several stages.
    assert issubclass(torch_private.ScheduleOfActions, PipelineScheduleMulti)
    assert parameter_names(PipelineScheduleMulti)[:3] == ["stages", "n_microbatches", "loss_fn"]
    assert "scale_grads" in parameter_names(PipelineScheduleMulti)
    schedule = torch_private.ScheduleOfActions([stage], 2, lambda loss, _: loss, scale_grads=False)
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    torch_private.plan_actions(schedule, rows)

    # Compute actions stay in their order; torch adds the sends and receives.
    lowered = [str(action) for action in schedule.pipeline_order_with_comms[0]]
    assert [action for action in lowered if action in rows[0]] == rows[0]
    assert {"0SEND_F0", "0SEND_F1", "0RECV_B0", "0RECV_B1"} <= set(lowered)

    with pytest.raises(Exception, match="0X0"):
        torch_private.plan_actions(schedule, [["0X0"], []])


def test_own_parameters_are_live() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    linear = module[0]
    assert torch_private.own_parameters(module) == {}
    own = torch_private.own_parameters(linear)
    assert list(own) == ["weight", "bias"]
    assert own["weight"] is linear.weight
    assert own["bias"] is None

    other = nn.Parameter(torch.zeros(2, 2))
    own["weight"] = other
    assert linear.weight is other


def add_gradients_outside_of_a_backward(mixed: bool) -> torch.Tensor:
    """A task: return the gradient of two micro-batches with an extra gradient between them."""
    with pool_world():
        unit: Any = nn.Linear(2, 1, bias=False)
        policy = MixedPrecisionPolicy()
        if mixed:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

        unit.set_requires_gradient_sync(False)
        unit.set_reshard_after_backward(False)
        unit.set_is_last_backward(False)
        unit(torch.ones(1, 2)).sum().backward()

        weight = unit.weight
        torch.autograd.backward([weight], [torch.full_like(weight, 2**-10)])
        torch_private.accumulate_unsharded_grads(unit)
        torch_private.accumulate_unsharded_grads(unit)  # nothing is left to move

        unit.set_requires_gradient_sync(True)
        unit.set_reshard_after_backward(True)
        unit.set_is_last_backward(True)
        unit(torch.ones(1, 2)).sum().backward()
        return unit.weight.grad.full_tensor()


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_outside_of_a_backward_join_the_sum_in_the_wide_dtype(
    pool: Pool, mixed: bool
) -> None:
    (grad,) = pool.run(add_gradients_outside_of_a_backward, {"mixed": mixed}, world_size=1)
    assert grad.dtype == torch.float32
    # bfloat16 would round this sum to 2.
    assert torch.equal(grad, torch.full((1, 2), 2 + 2**-10))


def test_units_have_the_names_that_move_gradients() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    assert parameter_names(FSDPModule._get_fsdp_state) == ["self"]
    moves_by_itself = not hasattr(FSDPParam, "to_accumulated_grad_if_needed")
    if not moves_by_itself:
        assert parameter_names(FSDPParam.to_accumulated_grad_if_needed) == ["self"]
        assert parameter_names(FSDPParam.accumulate_unsharded_grad_if_needed) == ["self"]


class KeepOwnShard(torch_private.ReduceScatter):
    """Notes what FSDP asks for, and sums nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, dist.ProcessGroup, Any]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        self.calls.append((output_tensor.numel(), input_tensor.numel(), group, op))
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


@pytest.mark.usefixtures("fake_world")
def test_a_unit_calls_the_reduce_scatter_that_it_is_given() -> None:
    unit = fully_shard(nn.Linear(2, WORLD_SIZE, bias=False))
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    assert parameter_names(FSDPModule.set_custom_reduce_scatter) == ["self", "comm"]
    own = KeepOwnShard()
    unit.set_custom_reduce_scatter(own)
    unit(torch.tensor([[1.0, 2.0]])).sum().backward()
    ((shard, whole, group, op),) = own.calls
    assert (shard, whole, group.size(), op) == (2, 2 * WORLD_SIZE, WORLD_SIZE, dist.ReduceOp.SUM)
    assert torch.equal(unit.weight.grad.to_local(), torch.tensor([[1.0, 2.0]]))


@pytest.mark.usefixtures("fake_world")
def test_one_unit_shards_a_parameter_over_a_mesh_of_its_own() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    unit = nn.Linear(12, 8)
    of_weight = torch_private.shard_over(mesh["inner"], 1)

    def place(parameter: nn.Parameter) -> Any:
        return of_weight if parameter.ndim == 2 else None

    fully_shard(unit, mesh=mesh["outer"], shard_placement_fn=place)
    weight, bias = unit.weight, unit.bias
    assert isinstance(weight, DTensor)
    assert isinstance(bias, DTensor)
    assert (weight.device_mesh, weight.placements) == (mesh["inner"], (Shard(1),))
    assert weight.to_local().shape == (8, 3)
    assert (bias.device_mesh, bias.placements) == (mesh["outer"], (Shard(0),))
    assert bias.to_local().shape == (4,)

    # A mesh of two dims replicates over the first.
    unit = nn.Linear(12, 8, bias=False)
    of_weight = torch_private.shard_over(mesh, 1)
    fully_shard(unit, mesh=mesh["outer"], shard_placement_fn=lambda _: of_weight)
    weight = unit.weight
    assert isinstance(weight, DTensor)
    assert (weight.device_mesh, weight.placements) == (mesh, (Replicate(), Shard(1)))
    assert weight.to_local().shape == (8, 3)


def test_the_warning_of_selective_checkpointing_is_silenced() -> None:
    wrap = importlib.import_module("torch._higher_order_ops.wrap")
    assert wrap.log is logging.getLogger("torch._higher_order_ops.wrap")
    assert "context_fn is passed to torch.utils.checkpoint" in inspect.getsource(wrap)

    level = wrap.log.level
    try:
        wrap.log.setLevel(logging.NOTSET)
        torch_private.silence_selective_checkpoint_warning()
        assert not wrap.log.isEnabledFor(logging.WARNING)
        assert wrap.log.isEnabledFor(logging.ERROR)
    finally:
        wrap.log.setLevel(level)


@pytest.mark.usefixtures("fake_world")
def test_symmetric_memory_is_enabled_for_a_group() -> None:
    group = dist.new_group([1, 5])
    with symmetric_memory._test_mode({group.group_name}):
        assert torch_private.enable_symmetric_memory(group)
    with symmetric_memory._test_mode(set()):
        assert not torch_private.enable_symmetric_memory(group)
    assert group.group_name in symmetric_memory._group_name_to_store


def test_the_compiler_has_the_options_that_fuse() -> None:
    from torch._inductor import config

    known = config.get_config_copy()
    for name, value in torch_private.FUSE_TP.items():
        assert isinstance(known[name], type(value))


# --- dry runs ---


def test_a_fake_world_has_any_size_and_ends() -> None:
    with torch_private.fake_world(70_000, 100_000):
        assert (dist.get_rank(), dist.get_world_size()) == (70_000, 100_000)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_fake_tensors_have_storages_but_no_data() -> None:
    real, meta = torch.ones(3), torch.ones(3, device="meta")
    without_data = torch_private.fake_tensors()
    with without_data:
        x = torch.empty(1 << 50)
        y = real + 1
        with torch_private.with_data():
            given = torch.ones(2)
    assert isinstance(x, torch_private.FAKE_TENSOR)
    assert x.untyped_storage().nbytes() == 4 << 50
    assert [torch_private.has_data(tensor) for tensor in (x, y, meta, real, given)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    with without_data:  # it may be entered again
        assert (x[:2] + y[:2]).shape == (2,)
        assert torch_private.fake_mode_of(torch.ones(1)) is torch_private.fake_mode_of(x)
    with torch_private.fake_tensors():
        assert torch_private.fake_mode_of(torch.ones(1)) is not torch_private.fake_mode_of(x)
    assert torch_private.fake_mode_of(x) is not None
    assert torch_private.fake_mode_of(real) is None


@torch.library.custom_op("composer3d_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Return 2 x."""
    return 2 * x


def test_the_body_of_a_custom_operator_is_found() -> None:
    body = torch_private.body_of(torch.ops.composer3d_tests.double.default)
    assert body is not None
    assert body(torch.ones(2)).tolist() == [2, 2]
    assert torch_private.body_of(torch.ops.aten.mm.default) is None


@pytest.mark.usefixtures("fake_world")
def test_a_dispatch_mode_sees_collectives_with_their_group() -> None:
    group = dist.new_group([1, 5])
    seen = []

    class Mode(torch_private.DispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any, _: Any) -> Any:
            seen.append((operator.name(), arguments))
            return operator(*arguments)

    with Mode():
        dist.all_reduce(torch.ones(2), group=group)
    ((name, arguments),) = [call for call in seen if call[0].startswith("c10d::")]
    assert name == "c10d::allreduce_"
    assert torch_private.group_of_argument(arguments[1]).group_name == group.group_name


def test_resizes_of_storages_are_seen() -> None:
    seen = []
    x = torch.empty(4)
    with torch_private.watch_resizes(lambda storage: seen.append(storage.nbytes())):
        x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(16)
    assert seen == [0]


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    notes.append("begin")
    yield
    notes.append("end")


@pytest.mark.usefixtures("fake_world")
def test_propagation_of_shapes_is_surrounded() -> None:
    notes: list[str] = []
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    x = DTensor.from_local(torch.ones(3, 5), mesh, [Shard(0)], run_check=False)
    with torch_private.around_shape_propagation(lambda: noted(notes)):
        _ = torch.linalg.vector_norm(x, dim=1)  # no other test calls it so
    assert notes == ["begin", "end"] * (len(notes) // 2)
    assert notes


def test_the_start_and_the_work_of_a_pipeline_are_surrounded(pool: Pool) -> None:
    for rank, work in enumerate(pool.run(note_pipeline_work, {}, world_size=2)):
        inside, remains, starts = work
        actions = [name for name in inside if name not in ("messages", "gradients")]
        assert actions == [f"{rank}{kind}{index}" for kind in "FB" for index in range(2)]
        # A message in each direction for each micro-batch, at the sender and at the receiver.
        assert inside.count("messages") == 4
        assert inside.count("gradients") == 1
        assert not remains
        # The start is a part of every step; only the first one does something.
        assert starts == ["begin", "end"] * 3


def note_pipeline_work() -> tuple[list[str], bool, list[str]]:
    """Run three steps of a pipeline of two stages.

    Returns:
        The work in the second one, whether something is still replaced, and the starts of all.
    """
    names: list[str] = []
    starts: list[str] = []

    @contextmanager
    def noted_name(name: str) -> Iterator[None]:
        names.append(name)
        yield

    with pool_world() as device, torch_private.around_pipeline_start(lambda: noted(starts)):
        rank = dist.get_rank()
        x = torch.ones(2, 3)
        example = torch.ones(1, 3, requires_grad=True)
        stage = PipelineStage(
            nn.Linear(3, 3), rank, 2, device, input_args=(example,), output_args=(example,)
        )
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: out.sum())
        methods = set(vars(stage))
        wait = torch_private.schedules._wait_batch_p2p
        for is_noted in (False, True, False):
            around = torch_private.around_pipeline_work([stage], noted_name)
            with around if is_noted else nullcontext():
                schedule.step(*((x,) if rank == 0 else ()), target=x if rank else None)
    is_replaced = torch_private.schedules._wait_batch_p2p is not wait
    return names, is_replaced or bool(set(vars(stage)) - methods), starts


def wait_in_threads() -> tuple[list[float], bool]:
    """A task: rank 1 comes 0.2 s late to collectives of three kinds; return rank 0's waits."""
    seen: list[float] = []
    wait = dist.Work.wait
    with pool_world():
        rank = dist.get_rank()

        def meet() -> None:
            if rank == 1:
                time.sleep(0.2)
            dist.all_reduce(torch.ones(3))

        with torch_private.watch_waits(seen.append):
            meet()
            work = dist.all_reduce(torch.ones(3), async_op=True)
            if rank == 1:
                time.sleep(0.2)
                dist.send(torch.ones(3), 0)
            else:
                receive = dist.P2POp(dist.irecv, torch.empty(3), 1)
                (request,) = dist.batch_isend_irecv([receive])
                request.wait()
            work.wait()
            thread = threading.Thread(target=meet)
            thread.start()
            thread.join()
        meet()
    return seen, dist.Work.wait is wait


def test_waits_of_one_thread_are_seen(pool: Pool) -> None:
    (seen, is_restored), (others, _) = pool.run(wait_in_threads, {}, world_size=2)
    assert is_restored
    in_all, in_message, late = seen
    assert 0.1 < in_all < 5
    assert 0.1 < in_message < 5
    # Both ranks had started this collective, so nothing was left to wait for.
    assert late < 0.1
    assert sum(others) < 0.15


@pytest.mark.usefixtures("fake_world")
def test_gathered_parameters_are_those_of_the_unit() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    unit = fully_shard(nn.Linear(8, 16, bias=False), mesh=mesh)
    assert torch_private.gathered_parameters(unit) == []
    unit(torch.ones(2, 8))
    (weight,) = torch_private.gathered_parameters(unit)
    assert weight.shape == (16, 8)


@pytest.mark.usefixtures("fake_world")
def test_modules_that_are_sharded_together_are_one_unit() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    stage = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    first, second, third = stage
    fully_shard([first, second], mesh=mesh)
    fully_shard(third, mesh=mesh)
    fully_shard(stage, mesh=mesh)
    for module, modules in (
        (first, (first, second)),
        (second, (first, second)),
        (third, (third,)),
        (stage, (stage,)),
    ):
        assert isinstance(module, FSDPModule)
        assert torch_private.modules_of_unit(module) == modules
    stage(torch.ones(2, 8))
    assert torch_private.gathered_parameters(first) == torch_private.gathered_parameters(second)
    assert len(torch_private.gathered_parameters(first)) == 2


def test_the_flight_recorder_of_nccl_is_a_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.is_nccl_available():
        trace = torch_private.dump_nccl_trace()
        assert trace is not None
        # Of this process, so it may be unpickled.
        assert {"version", "entries"} <= pickle.loads(trace).keys()
        return
    assert torch_private.dump_nccl_trace() is None
    seen = []

    def dump(*, includeStackTraces: bool) -> bytes:
        seen.append(includeStackTraces)
        return b"trace"

    module = torch._C._distributed_c10d
    monkeypatch.setattr(module, "_dump_nccl_trace", dump, raising=False)
    assert torch_private.dump_nccl_trace() == b"trace"
    assert seen == [False]
