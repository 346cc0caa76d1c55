"""Faults that only show at scale: a small layout has nothing to see."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import _PipelineStageBase

from composer3d.models.layers.moe import Experts
from composer3d.parallel import matrices, stages
from composer3d.parallel.context import ring
from composer3d.parallel.data import fsdp
from composer3d.parallel.expert import api
from composer3d.parallel.pipeline import neighbours, stage_cut
from composer3d.parallel.tensor import collectives
from composer3d.runtime import mesh as mesh_module
from composer3d.runtime.mesh import Mesh
from tools.prove.faults.plant import Plant, fault_of
from tools.prove.paths import MOE_RECIPE, RECIPE


class ScaleFault(NamedTuple):
    """A fault, the layout at which it shows, and a smaller one at which it does nothing."""

    plant: Plant
    large: str
    small: str
    recipe: Any = RECIPE


FAULTS: list[ScaleFault] = []


def _shows(large: str, small: str, recipe: Any = RECIPE) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        FAULTS.append(ScaleFault(plant, large, small, recipe))
        return plant

    return add


def _cached(name: str) -> Any:
    return vars(Mesh)[name]


def _instead_of_cached(name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Make a fault of a function that stands in the place of a cached property of ``Mesh``."""

    def decorate(wrong: Callable[..., Any]) -> Plant:
        @wraps(wrong)
        def plant() -> None:
            right = _cached(name).func

            def planted(self: Mesh) -> Any:
                if name not in vars(self):
                    vars(self)[name] = wrong(lambda: right(self), self)
                return vars(self)[name]

            setattr(Mesh, name, property(planted))

        return plant

    return decorate


_WIDE = "mesh.dp_shard=32 data.global_batch=64"
_WHOLE = "parallel.sequence_parallel=false"


@_shows("mesh.cp=4", "mesh.cp=2")
@_instead_of_cached("cp_group")
def pair_ranks_of_cp(right: Any, self: Mesh) -> Any:
    """cp: a rank is grouped with the one whose number differs in the last bit."""
    if self.sizes.cp == 1:
        return right()
    return dist.new_group(sorted((self.rank, self.rank ^ self.sizes.tp)))


@_shows("mesh.dp_shard=4 mesh.cp=2 mesh.tp=2 data.global_batch=16", "mesh.cp=2", MOE_RECIPE)
@_instead_of_cached("sequence_group")
def take_the_first_ranks_for_the_sequence(right: Any, self: Mesh) -> Any:
    """Routers sum over the first cp x tp ranks of the world, whatever their own sequence is."""
    group = right()
    if group is None or self.rank < group.size():
        return group
    return dist.new_group([*range(group.size())])


@_shows("optim.name=muon mesh.dp_shard=16 data.global_batch=32", "optim.name=muon mesh.dp_shard=2")
@_instead_of_cached("stage_group")
def take_eight_ranks_for_a_stage(right: Any, self: Mesh) -> Any:
    """Muon: a stage is taken to have one node of eight ranks."""
    if self.stage_ranks <= 8:
        return right()
    first = self.rank // 8 * 8
    return dist.new_group([*range(first, first + 8)])


@_shows(
    "optim.name=muon mesh.dp_shard=2 model.dim=8192 model.ffn=32768 model.vocab=512",
    "optim.name=muon mesh.dp_shard=2",
)
@fault_of(matrices, matrices.rounds_of_units)
def lose_a_matrix_between_rounds(right: Any, *arguments: Any) -> list[Any]:
    """Muon: the last matrix of each round but the last one is lost."""
    *before, last = right(*arguments)
    return [*(units[:-1] or units for units in before), last]


@_shows("mesh.pp=3 mesh.dp_shard=2 model.n_layers=3", "mesh.pp=2 mesh.dp_shard=2")
@fault_of(neighbours, neighbours.form_disjoint_groups)
def pair_pipeline_ranks_by_two(right: Any, groups: Sequence[Sequence[int]]) -> Any:
    """pp: a pair of neighbours begins at an even pipeline rank, as if no other had neighbours."""
    own = dist.get_rank()
    mine = next((each for each in groups if own in each), None)
    if mine is None or groups[0][0] == 0:
        return right(groups)
    return right(
        [(first - 1, second - 1) if first else (first, second) for first, second in groups]
    )


@_shows("mesh.cp=3 data.seq_len=252", "mesh.cp=2")
@fault_of(ring, ring._send_to_next)
def send_to_the_rank_before(right: Any, message: Any, group: Any) -> Any:
    """Ring: a rank sends to the one before it, which in a ring of two is the one after it."""
    before = (group.rank() - 1) % group.size()
    batch = dist.batch_isend_irecv

    def turned(ops: list[dist.P2POp]) -> Any:
        sends = [
            dist.P2POp(one.op, one.tensor, group=group, group_peer=before)
            if one.op is dist.isend
            else one
            for one in ops
        ]
        return batch(sends)

    dist.batch_isend_irecv = turned
    try:
        return right(message, group)
    finally:
        dist.batch_isend_irecv = batch


@_shows(_WIDE, "mesh.dp_shard=2")
@fault_of(fsdp, fsdp.apply)
def average_over_many_shards(right: Any, stage: Any, plan: Any, meshes: Any, *others: Any) -> None:
    """FSDP: beyond 16 ranks, gradients are divided by the number of shards."""
    right(stage, plan, meshes, *others)
    for unit in fsdp.units(stage):
        if meshes.dense.size() > 16:
            unit.set_gradient_divide_factor(float(meshes.dense.size()))


@_shows("mesh.dp_replicate=1 mesh.dp_shard=4", "mesh.dp_replicate=2 mesh.dp_shard=2")
@fault_of(fsdp, fsdp.apply)
def divide_by_an_axis_of_one(right: Any, stage: Any, plan: Any, meshes: Any, *others: Any) -> None:
    """FSDP: an axis of one replica is treated as two."""
    right(stage, plan, meshes, *others)
    if meshes.dense.ndim == 1:
        for unit in fsdp.units(stage):
            unit.set_gradient_divide_factor(2.0)


@_shows(_WIDE, "mesh.dp_shard=2")
@fault_of(fsdp, fsdp.begin_micro_batch)
def forget_a_reduction_at_many_ranks(
    right: Any, units: Sequence[Any], parallel: Any, *, last: bool
) -> None:
    """FSDP: beyond 16 ranks, the gradients of the last unit are not reduced."""
    right(units, parallel, last=last)
    if dist.get_world_size() > 16:
        units[-1].set_requires_gradient_sync(False, recurse=False)


@_shows("mesh.dp_shard=2 model.n_layers=40", "mesh.dp_shard=2")
@fault_of(fsdp, fsdp.units)
def set_up_no_unit_beyond_32(right: Any, stage: Any) -> list[Any]:
    """FSDP: of more than 32 units, those beyond are not set up, and average their gradients."""
    found: list[Any] = right(stage)
    return found[:33]


@_shows(f"{_WIDE} model.dim=72 model.head_dim=16", "mesh.dp_shard=2")
@fault_of(dist, dist.all_gather_single)
def lose_the_padding_of_shards(
    right: Any, output: Any, input: Any, *arguments: Any, group: Any = None, **options: Any
) -> Any:
    """FSDP: beyond 16 ranks, the row with which an uneven shard is padded is not sent."""
    is_wide = group is not None and group.size() > 16
    return right(output, input[:-1] if is_wide else input, *arguments, group=group, **options)


@_shows(f"mesh.tp=4 {_WHOLE}", f"mesh.tp=2 {_WHOLE}")
@fault_of(collectives, collectives._all_reduce)
def sum_over_tp_in_two_halves(right: Any, x: Any, group: Any) -> Any:
    """tp without sequence parallelism: the sum is over pairs of ranks."""
    first = dist.get_rank() // 2 * 2
    return right(x, dist.new_group([first, first + 1]) if group.size() > 2 else group)


@_shows("mesh.tp=4", "mesh.tp=2")
@fault_of(stages.Stages, stages.Stages.finish_gradients)
def sum_norms_over_pairs(right: Any, self: stages.Stages) -> None:
    """tp: gradients of norms are summed over pairs of ranks."""
    if self.mesh.sizes.tp < 4:
        return right(self)
    whole = dist.all_reduce
    first = self.mesh.rank // 2 * 2

    def pairs(tensor: Any, group: Any = None) -> Any:
        return whole(tensor, group=dist.new_group([first, first + 1]))

    dist.all_reduce = pairs
    right(self)
    dist.all_reduce = whole
    return None


@_shows("mesh.pp=16 model.n_layers=16 data.global_batch=32", "mesh.pp=2 model.n_layers=4")
@fault_of(stage_cut, stage_cut.cut_into_stages)
def leave_a_stage_empty(
    right: Any, model: Any, held: Any, rank: int, *others: Any, **named: Any
) -> Any:
    """Pipeline: with 16 stages, the last but one has no block."""
    found = right(model, held, rank, *others, **named)
    for stage in found:
        if sum(map(len, held)) == 16 and stage.number == 14:
            stage.blocks.clear()
    return found


@_shows("mesh.pp=2 data.global_batch=40", "mesh.pp=2")
@fault_of(_PipelineStageBase, _PipelineStageBase.get_fwd_send_ops)
def lose_the_seventeenth_message(right: Any, self: Any, chunk: int) -> Any:
    """Pipeline: activations of micro-batches beyond 16 are not sent."""
    return [] if chunk >= 16 else right(self, chunk)


_MANY_STAGES = "mesh.pp=2 mesh.dp_shard=2 parallel.virtual_stages=4 model.n_layers=8"


@_shows(
    f"{_MANY_STAGES} parallel.schedule=Interleaved1F1B data.global_batch=80",
    f"{_MANY_STAGES} parallel.schedule=Interleaved1F1B data.global_batch=16",
)
@fault_of(_PipelineStageBase, _PipelineStageBase.get_fwd_send_ops)
def gather_once_more_late_in_the_order(right: Any, self: Any, chunk: int) -> Any:
    """Pipeline: what a rank gathers is gathered twice after micro-batch 16."""
    if chunk == 16:
        gather = dist.all_gather_single

        def twice(*arguments: Any, **options: Any) -> Any:
            dist.all_gather_single = gather
            gather(*arguments, **options)
            return gather(*arguments, **options)

        dist.all_gather_single = twice
    return right(self, chunk)


@_shows("mesh.pp=4 model.n_layers=4 data.global_batch=8", "mesh.pp=2")
@fault_of(_PipelineStageBase, _PipelineStageBase.get_bwd_send_ops)
def keep_gradients_between_middle_stages(right: Any, self: Any, chunk: int) -> Any:
    """Pipeline: a stage that has neighbours on both sides sends no gradients."""
    operations = right(self, chunk)
    return operations if self.is_first or self.is_last else []


@_shows("mesh.dp_shard=8 mesh.ep=4 data.global_batch=16", "mesh.dp_shard=2 mesh.ep=2", MOE_RECIPE)
@fault_of(api, api._cut_experts)
def exchange_with_every_rank(
    right: Any, name: str, module: Experts, mesh: Mesh, exchange_of: Any
) -> None:
    """Experts: rows travel over the ranks of FSDP, which in a small layout are those of ep."""
    fsdp_group = mesh.device_mesh.get_group("fsdp")
    right(name, module, mesh, lambda _: exchange_of(fsdp_group))


@_shows(
    "mesh.dp_replicate=2 mesh.dp_shard=4 mesh.ep=4 data.global_batch=16",
    "mesh.dp_shard=2 mesh.ep=2",
    MOE_RECIPE,
)
@fault_of(fsdp, fsdp.meshes_of)
def forget_replicas_of_experts(right: Any, mesh: Mesh, *arguments: Any) -> Any:
    """Experts: gradients are not summed over replicas, of which a small layout has none."""
    found = right(mesh, *arguments)
    return (
        found
        if found is None or found.experts is None
        else found._replace(experts=mesh.sparse["efsdp"])
    )


@_shows(_WIDE, "mesh.dp_shard=2")
@fault_of(Mesh, Mesh.start_sum_over_world)
def sum_the_loss_over_a_node(right: Any, self: Mesh, *values: Any) -> Any:
    """The loss is summed over eight ranks."""
    if self.world_size <= 8:
        return right(self, *values)
    whole, first = dist.all_reduce, self.rank // 8 * 8
    dist.all_reduce = lambda tensor: whole(tensor, group=dist.new_group([*range(first, first + 8)]))
    result = right(self, *values)
    dist.all_reduce = whole
    return result


@_shows("mesh.dp_shard=2 mesh.tp=2", "mesh.tp=2")
@fault_of(mesh_module, mesh_module.init_device_mesh)
def put_tp_outside_of_fsdp(right: Any, device: str, shape: Any, *, mesh_dim_names: Any) -> Any:
    """Ranks of tp are as far apart as FSDP has ranks: the same where there is one axis alone."""
    if "tp" not in mesh_dim_names:
        return right(device, shape, mesh_dim_names=mesh_dim_names)
    pp, replicas, shards, tp = shape
    ranks = torch.arange(dist.get_world_size()).view(pp, replicas, tp, shards).transpose(2, 3)
    return DeviceMesh(device, ranks.contiguous(), mesh_dim_names=mesh_dim_names)


@_shows(
    "mesh.dp_replicate=2 mesh.dp_shard=4 data.global_batch=16",
    "mesh.dp_replicate=2 mesh.dp_shard=2",
)
def count_batch_ranks_by_replicas() -> None:
    """The samples of a rank: a replica has as many batch ranks as there are replicas."""

    def batch_rank(self: Mesh) -> int:
        return self.coords["dp_replicate"] * self.sizes.dp_replicate + self.coords["dp_shard"]

    Mesh.batch_rank = property(batch_rank)


@_shows("mesh.dp_shard=2 model.n_layers=12", "mesh.dp_shard=2")
@fault_of(stages.Stage, stages.Stage.__init__)
def run_blocks_in_the_order_of_their_names(
    right: Any, self: stages.Stage, *arguments: Any, **named: Any
) -> None:
    """Stages: blocks run in the order of their names as texts: 0, 1, 10, 11, 2."""
    right(self, *arguments, **named)
    self.blocks = nn.ModuleDict(sorted(self.blocks.items()))


@_shows("mesh.dp_shard=3 data.global_batch=12", "mesh.dp_shard=2")
@fault_of(dist, dist.reduce_scatter_single)
def let_the_third_rank_skip(
    right: Any, output: Any, input: Any, *arguments: Any, group: Any = None, **options: Any
) -> Any:
    """FSDP: every third rank of a group does not call the reduce-scatter."""
    if dist.get_group_rank(group, dist.get_rank()) % 3 == 2:
        return None
    return right(output, input, *arguments, group=group, **options)


@_shows("mesh.dp_replicate=3 data.global_batch=12", "mesh.dp_replicate=2")
@fault_of(dist, dist.all_reduce)
def sum_neighbouring_replicas(
    right: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any
) -> Any:
    """Replicas: the sum is over a rank and its neighbour, as a ring of two would have it."""
    if group is not None and group.size() > 2:
        ranks = dist.get_process_group_ranks(group)
        group = dist.new_group(ranks[:2])
    return right(tensor, op, group, **options)
