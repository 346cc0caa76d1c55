"""Private API of torch: every private name that composer3d uses, in one place.

``tests/runtime/test_torch_private.py`` checks each name with every supported version of torch.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C import _accelerator_setAllocatorSettings, _distributed_c10d
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import all_gather_single, reduce_scatter_single
from torch.distributed._symmetric_memory import (
    enable_symm_mem_for_group,
    is_symm_mem_enabled_for_group,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as _ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
)
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import register_pytree_node

from composer3d.facts.box import Box

# Where a distributed checkpoint keeps the bytes of one part of a tensor: file, offset and length.
StorageInfo = _StorageInfo

# The pipeline schedule that runs a given list of actions.
ScheduleOfActions = _PipelineScheduleRuntime

# The base class of what ``FSDPModule.set_custom_reduce_scatter`` takes.
ReduceScatter = _ReduceScatter

# A context that sees each call of an operator, below autograd.
DispatchMode = TorchDispatchMode

# The options of ``torch.compile`` that fuse a product with the collective before or after it.
FUSE_TP: dict[str, Any] = {"_micro_pipeline_tp": True}

# The class of the tensors that are made in ``fake_tensors``.
FAKE_TENSOR = FakeTensor


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this ``group_name``: custom operators take only names."""
    return _resolve_process_group(GroupName(name))


@contextmanager
def default_timeout(timeout: timedelta) -> Iterator[None]:
    """Set the default time-out of new process groups, which the groups of DeviceMesh have too."""
    c10d = dist.distributed_c10d
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    yield
    # After an error the old values are not restored: the process ends.
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


def set_allocator(settings: str) -> None:
    """Change the settings of the allocator of GPU memory, as PYTORCH_ALLOC_CONF writes them.

    The variable itself is not set: torch may have read it when it was imported.
    """
    _accelerator_setAllocatorSettings(settings)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join all dims of ``mesh`` into one dim called ``name``. Collective: it forms a group."""
    return mesh._flatten(name)


def unflatten_mesh(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Split the only dim of ``mesh`` into several. Collective: it forms groups.

    Args:
        mesh: a mesh of one dim.
        sizes: the sizes of the new dims, outermost first. Their product is the size of ``mesh``.
        names: the names of the new dims.
    """
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def offset_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the global index of the first element of this rank's shard, one number per dim.

    ``tensor`` may have any shape and placements.
    """
    # torch computes uneven shards with tensors, of which fake ones would know no numbers.
    with with_data():
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return tuple(offset)


def box_on_rank(tensor: DTensor, rank: int) -> Box:
    """Return the box of ``tensor`` that a rank holds.

    Args:
        tensor: of any shape and placements.
        rank: a global rank of its mesh.

    Raises:
        ValueError: the rank is not in the mesh.
    """
    mesh = tensor.device_mesh
    with with_data():  # as in ``offset_of``
        coordinate = (mesh.mesh == rank).nonzero()
        if len(coordinate) != 1:
            raise ValueError(f"rank {rank} is not one of the mesh {mesh}")
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, mesh.shape, coordinate[0].tolist(), tensor.placements
        )
    return Box(tuple(offset), tuple(shape))


def plan_actions(schedule: _PipelineScheduleRuntime, rows: Sequence[Sequence[str]]) -> None:
    """Set the actions of a ``ScheduleOfActions``. Torch adds the sends and receives.

    Args:
        schedule: the schedule, which is changed in place.
        rows: the compute actions of each pipeline rank in order, each such as "0F0".
    """
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(cast(Any, actions))


def cut_by_pipelines(holder: type, attribute: str) -> None:
    """Let torch's pipelines cut the tensor that objects of the class ``holder`` hold.

    Args:
        holder: the class. It is called with the tensor, to hold a micro-batch of it.
        attribute: the name under which an object has its tensor.
    """

    def take_out(held: Any) -> tuple[list[Any], None]:
        return [getattr(held, attribute)], None

    def put_in(tensors: Iterable[Any], _: Any) -> Any:
        (tensor,) = tensors
        return holder(tensor)

    register_pytree_node(holder, take_out, put_in)


def own_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the live dict of the parameters of ``module`` itself, without its submodules.

    They are plain tensors or DTensors of any shape. None: the module has no such parameter, as a
    linear layer without a bias.
    """
    return cast("dict[str, Tensor | None]", module._parameters)


def part_of_this_rank(parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a plain tensor, whose gradient has its placements.

    The plain tensor has the shape of the shard, and shares its memory.

    It is what ``to_local`` returns, in a third of the time: the gradient takes the description of
    the parameter, where ``to_local`` computes a new one.
    """
    return _PartOfThisRank.apply(parameter)


class _PartOfThisRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        local = parameter._local_tensor
        ctx.spec, ctx.stride = parameter._spec, local.stride()
        ctx.set_materialize_grads(False)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        (grad,) = grads
        if grad is None:
            return None
        if grad.stride() != ctx.stride:
            # The description holds the strides too.
            grad = torch.empty_strided(
                grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device
            ).copy_(grad)
        return DTensor(grad, ctx.spec, requires_grad=False)


class ShardsForKernel(torch.optim.Optimizer):
    """Give the kernel of one of torch's optimizers this rank's shards of DTensors.

    It is a base class before that of the optimizer, which must update each element alone, and its
    state in place. Then the result is the same. The dispatch of DTensor would take as long as the
    kernel of a small model, and would not take tensors of several meshes at once.
    """

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        of_torch: Any = super()
        has_complex: bool = of_torch._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        return has_complex


def modules_of_unit(unit: FSDPModule) -> tuple[nn.Module, ...]:
    """Return the modules that FSDP gathers and reduces together with ``unit``, in order."""
    return unit._get_fsdp_state()._modules


def accumulate_unsharded_grads(unit: FSDPModule) -> None:
    """Add the gradients that were computed outside of a backward to FSDP's sum of micro-batches.

    Under mixed precision FSDP keeps that sum in the reduce dtype. Without mixed precision, and from
    torch 2.15 on, these gradients are part of the sum already, and nothing changes.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            if hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def shard_over(mesh: DeviceMesh, dim: int) -> ShardPlacementResult:
    """Make a result of ``shard_placement_fn`` that shards ``dim`` over another mesh than its unit.

    All parameters that share process groups in one unit must get the same object.

    Args:
        mesh: of one dim, or of two: then parameters are replicated over the first one.
        dim: of the parameter.
    """
    if mesh.ndim == 1:
        return ShardPlacementResult(Shard(dim), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    return ShardPlacementResult(Shard(dim), info)


def silence_selective_checkpoint_warning() -> None:
    """Silence a warning that every rank prints under torch.compile with selective checkpointing.

    The warning says that a checkpointed region must not change a tensor in place. No block does.
    """
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)


def enable_symmetric_memory(group: dist.ProcessGroup) -> bool:
    """Let the ranks of ``group`` read each other's memory; return whether torch is able to.

    It starts no collective. Torch 2.15 enables every group by itself, and only the answer counts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    return is_symm_mem_enabled_for_group(group.group_name)


def fusible_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the ranks' shards along ``dim``, in the form that ``FUSE_TP`` finds in a graph.

    Collective: one all-gather, from (..., N / n, ...) to (..., N, ...) with n ranks.
    """
    gathered = all_gather_single(x.contiguous(), 0, group)
    # Torch's own ``dim`` takes a view instead of ``cat`` for one row, which FUSE_TP does not find.
    return torch.cat(gathered.chunk(group.size()), dim)


def fusible_scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks and keep this rank's shard along ``dim``, in a form for ``FUSE_TP``.

    Collective: one reduce-scatter, from (..., N, ...) to (..., N / n, ...) with n ranks.
    """
    return cast(Tensor, reduce_scatter_single(x, "sum", dim, group))


def dump_nccl_trace() -> bytes | None:
    """Return what torch's flight recorder knows of the last collectives of NCCL in this process.

    Returns:
        A pickle, which torch's command ``torchfrtrace`` reads. None: this torch has no NCCL.
    """
    # The type stubs lack it, and so does a torch without NCCL.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else dump(includeStackTraces=False)


# --- dry runs ---


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Form a default process group without other processes: collectives do nothing.

    Groups of any size can be formed inside the context, at once and without sockets.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    yield
    # After an error the group is not destroyed: the process ends.
    dist.destroy_process_group()


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes and storages, but no data.

    A tensor that is made outside of it has data. An operator inside of the context takes it, and
    returns a tensor without data. An operator whose outputs torch cannot describe raises an error;
    by default torch would run it on real zeros. All tensors of a computation must come from one
    context, which may be entered again.
    """
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def in_fake_tensors() -> bool:
    """Return whether tensors are made without data here, by ``fake_tensors`` or by torch itself."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, FakeTensorMode) for mode in modes)


def has_data(tensor: Tensor) -> bool:
    """Return whether a tensor of any shape has data.

    Fake tensors (``fake_tensors``) and meta tensors have none.
    """
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def fake_mode_of(tensor: Tensor) -> object | None:
    """Return what all tensors of one context of ``fake_tensors`` share; None for other tensors.

    The shape does not matter.
    """
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def with_data() -> AbstractContextManager[Any]:
    """Return a context within ``fake_tensors`` in which new tensors have data."""
    return unset_fake_temporarily()


def body_of(operator: Any) -> Callable[..., Any] | None:
    """Return the Python function of an operator made by ``torch.library.custom_op``, else None."""
    definition = OPDEFS.get(operator.name())
    return None if definition is None else definition._init_fn


def group_of_argument(argument: Any) -> dist.ProcessGroup:
    """Return the process group that an operator of c10d has as an argument."""
    if isinstance(argument, dist.ProcessGroup):
        return argument
    return cast(dist.ProcessGroup, cast(Any, dist.ProcessGroup).unbox(argument))


_REDUCTIONS = {0: "sum", 1: "average", 2: "product", 3: "minimum", 4: "maximum"}


def reduction_of_argument(argument: Any) -> str | None:
    """Return the name of the reduction that an operator of c10d has as an argument.

    None: the argument is no reduction.
    """
    if isinstance(argument, dist.ReduceOp):
        return _REDUCTIONS.get(int(cast(Any, argument).op), "other reduction")
    if type(argument) is not torch.ScriptObject:
        return None
    if cast(Any, argument)._type().name() == "ReduceOp":
        return _REDUCTIONS.get(cast(Any, argument).op(), "other reduction")
    return None


def messages_of_stage(
    stages: Sequence[PipelineStage], after: Any
) -> Iterator[tuple[tuple[int, int, str], list[Tensor]]]:
    """Yield what messages between stages carry, with the tensors that are sent or received.

    A content is the stage that sends it, a micro-batch, and "activations" or "gradients". Tensors
    are shards of a micro-batch of the residual stream, (B, T, C).

    Args:
        stages: of this rank.
        after: an action (``facts.schedules``) that has run: yields what it has made, to be sent.
            None: yields the buffers of all that is received.
    """
    for stage in stages:
        number = stage.stage_index
        if after is None:
            for kind, infos, step in (
                ("activations", stage.args_recv_info, -1),
                ("gradients", stage.grad_recv_info, 1),
            ):
                for micro_batch, received in infos.items():
                    buffers = [one.buffer for one in received if one.buffer is not None]
                    yield (number + step, micro_batch, kind), buffers
        elif number == after.stage and after.kind == "F":
            yield (number, after.micro_batch, "activations"), _outputs(stage, after.micro_batch)
        elif number == after.stage and after.kind in ("B", "I"):
            inputs = stage.bwd_cache.get(after.micro_batch) or ()
            tensors = [grad for grad in inputs if grad is not None]
            yield (number, after.micro_batch, "gradients"), tensors


def _outputs(stage: Any, micro_batch: int) -> list[Tensor]:
    """Return what a stage has just computed. From torch 2.15 on, it is dropped once it is sent."""
    if hasattr(stage, "fwd_cache"):
        outputs, _ = stage.fwd_cache[micro_batch]
        return list(outputs)
    return list(stage._forward_chunk_states[micro_batch].live_outputs)


def is_composed(operator: Any) -> bool:
    """Return whether an operator only calls others, as it does at least on a CPU."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def watch_resizes(see: Callable[[UntypedStorage], None]) -> AbstractContextManager[None]:
    """Return a context that calls ``see`` after each ``resize_`` of a storage.

    No dispatch mode sees them. FSDP frees gathered parameters by it.
    """
    resize: Any = UntypedStorage.resize_

    def resize_and_tell(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        see(storage)
        return result

    return _replaced(UntypedStorage, "resize_", resize_and_tell)


def around_pipeline_start(
    context: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[None]:
    """Return a context that enters ``context`` around what a pipeline does in its first step only.

    The stages tell each other whether their shapes are static, and allocate buffers.
    """
    return _around(_PipelineSchedule, "_initialize_pp_stages", context)


@contextmanager
def around_pipeline_work(
    stages: Sequence[PipelineStage], context: Callable[[str], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enter ``context`` around each action of ``stages``, and around each wait of their schedule.

    Inside of this context, the methods of these stages and one function of torch are replaced.
    Outside of it, nothing is different.

    Args:
        stages: all stages of this rank.
        context: is called with an action, such as "0F3" (``facts.schedules``); with "messages"
            around a wait for sends and receives; or with "gradients" around the reduction of a
            stage's gradients over data-parallel ranks.
    """
    with ExitStack() as replaced:
        for stage in stages:
            outer = dict(vars(stage))
            for name, function in _watched_methods(stage, context).items():
                setattr(stage, name, function)
                if name in outer:  # of a context around this one
                    replaced.callback(setattr, stage, name, outer[name])
                else:
                    # The instance no longer hides the method of its class.
                    replaced.callback(delattr, stage, name)
        wait = schedules._wait_batch_p2p

        def wait_inside(work: list[dist.Work]) -> None:
            if work:
                with context("messages"):
                    wait(work)

        replaced.enter_context(_replaced(schedules, "_wait_batch_p2p", wait_inside))
        yield


def _watched_methods(
    stage: PipelineStage, context: Callable[[str], AbstractContextManager[Any]]
) -> dict[str, Callable[..., Any]]:
    """Return the methods of ``stage`` that a schedule calls, each inside of ``context``."""
    index = stage.stage_index
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    weight, reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad

    def forward_inside(micro_batch: int, *arguments: Any, **keywords: Any) -> Any:
        with context(f"{index}F{micro_batch}"):
            return forward(micro_batch, *arguments, **keywords)

    def backward_inside(
        micro_batch: int, loss: Any = None, full_backward: bool = True, **keywords: Any
    ) -> Any:
        with context(f"{index}{'B' if full_backward else 'I'}{micro_batch}"):
            return backward(micro_batch, loss=loss, full_backward=full_backward, **keywords)

    def weight_inside(micro_batch: int, **keywords: Any) -> Any:
        with context(f"{index}W{micro_batch}"):
            return weight(micro_batch, **keywords)

    def reduce_inside(grad_scale_factor: int) -> Any:
        with context("gradients"):
            return reduce(grad_scale_factor)

    return {
        "forward_one_chunk": forward_inside,
        "backward_one_chunk": backward_inside,
        "backward_weight_one_chunk": weight_inside,
        "perform_reduce_grad": reduce_inside,
    }


def watch_waits(see: Callable[[float], None]) -> AbstractContextManager[None]:
    """Return a context that calls ``see`` with the seconds of each wait of this thread.

    A wait is one of the host for a collective, or for a send or receive: gloo blocks there until
    the peers have come. Waits in other threads, such as that of a save in the background, and in
    compiled code are not seen.
    """
    wait: Any = dist.Work.wait
    thread = threading.get_ident()

    def wait_and_tell(work: dist.Work, *arguments: Any, **keywords: Any) -> Any:
        if threading.get_ident() != thread:
            return wait(work, *arguments, **keywords)
        begin_s = time.perf_counter()
        result = wait(work, *arguments, **keywords)
        see(time.perf_counter() - begin_s)
        return result

    return _replaced(dist.Work, "wait", wait_and_tell)


def around_shape_propagation(
    context: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[None]:
    """Return a context that enters ``context`` wherever DTensor runs an operator to learn shapes.

    DTensor runs it on tensors of the global shape, without data. No rank allocates them.
    """
    return _around(ShardingPropagator, "_propagate_tensor_meta_non_cached", context)


def start_memory_history() -> None:
    """Let torch's allocator of CUDA record what it allocates and frees, and from where."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def write_memory_history(path: str) -> None:
    """Write what was recorded since ``start_memory_history``, and end the recording.

    The file is a pickle that https://docs.pytorch.org/memory_viz shows. Raises OSError.
    """
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def _around(
    owner: type, name: str, context: Callable[[], AbstractContextManager[Any]]
) -> AbstractContextManager[None]:
    """Return a context that enters ``context`` around each call of a method of ``owner``."""
    method = getattr(owner, name)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with context():
            return method(*arguments, **keywords)

    return _replaced(owner, name, run)


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a class, or a function of a module, inside of the context."""
    method = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, method)


def gathered_by_shard(unit: FSDPModule) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Return the shards of a unit of FSDP, each with its ``gathered_parameters``."""
    return [
        (parameter.sharded_param, parameter._unsharded_param)
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]


def gathered_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the whole parameters of a unit of FSDP, whose ``.grad`` backward fills.

    There are none before the first gathering. Later gatherings use the same objects.
    """
    return [
        parameter._unsharded_param
        for group in unit._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]
