"""The one place where techniques are composed, in one order, each with the reason for its place."""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from composer3d.errors import PlanError
from composer3d.mesh import Mesh
from composer3d.models import Decoder, Seq
from composer3d.parallel import ac, cp, fsdp, init, pp, tp
from composer3d.parallel.plan import Plan
from composer3d.parallel.stages import Stage, Stages
from composer3d.recipe.schema import MemoryTable, ParallelTable, PrecisionTable
from composer3d.schedules import balanced_cut


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What one rank runs in a step: ``micro_batches`` of ``micro_batch`` samples of ``seq_len`` tokens."""

    micro_batch: int
    micro_batches: int
    seq_len: int


def compose(
    model: Decoder,
    plan: Plan,
    mesh: Mesh,
    *,
    parallel: ParallelTable,
    memory: MemoryTable | None = None,
    precision: PrecisionTable | None = None,
    step: StepShape,
    seed: int,
) -> Stages:
    """Make ``model`` this rank's part of a job.

    Args:
        model: a model of the contract (``first``, ``blocks``, ``last``), built on the meta device in
            ``precision.params``. It is taken apart.
        plan: what the model says of itself.
        mesh: the axes; collective, every rank of it calls.
        memory, precision: absent, nothing is computed twice, and everything in the model's dtype.
        seed: of the initial weights, which are the same whatever the layout.

    Raises:
        PlanError: the plan does not fit the model, there are fewer blocks than stages, or parts share a parameter that
            cannot be sharded so.
    """
    memory, precision = memory or MemoryTable(), precision or PrecisionTable()
    plan.check(model)  # on the whole model: no stage alone can tell a glob that matches nothing
    stream = boundary(model, mesh, parallel, step)
    if precision.compute is not None:
        stream = stream.to(getattr(torch, precision.compute))
    ties = tied(model)
    data = fsdp.mesh_of(mesh, parallel, precision)
    check_ties(ties, mesh, sharded=data is not None)
    # 1. Cut into stages, before anything wraps a module: every later step then touches this rank's layers only.
    modules = cut(model, mesh, parallel)
    for module in modules:
        # 2. Tensor parallelism: it decides the shapes of parameters, which FSDP then shards further.
        if mesh.tp is not None:
            tp.apply(module, plan, mesh.tp, parallel)
            tie(module, ties)
        # 3. Context parallelism replaces what a block calls to attend, and nothing else.
        if mesh.cp_group is not None:
            attend_over(module, plan, mesh.cp_group)
        # 4. Checkpointing wraps what a block computes by now, so that backward repeats just that.
        ac.apply(module.blocks.values(), plan, memory)
        # 5. FSDP goes around whatever a block has become, and owns its parameters from here on.
        if data is not None:
            fsdp.apply(
                module,
                first=module.first,
                blocks=list(module.blocks.values()),
                last=module.last,
                mesh=data,
                parallel=parallel,
                precision=precision,
            )
        # 6. Memory is taken last: only this rank's shards ever exist.
        module.to_empty(device=mesh.device)
        tie(module, ties)
        # 7. Initial weights by global name and index, so that they are the same on every layout.
        init.initialise(module, plan, seed)
    return Stages(
        modules, mesh, parallel, micro_batch=step.micro_batch, micro_batches=step.micro_batches, stream=stream
    )


def cut(model: Decoder, mesh: Mesh, parallel: ParallelTable) -> list[Stage]:
    """This rank's stages: blocks as the recipe says, or in proportion to their parameters.

    Room is then left for the embedding and the head. The head multiplies all its parameters, as a block does; the
    embedding only looks them up but updates them all: half.
    """
    a_rank = parallel.stages_per_rank if mesh.table.pp > 1 else 1
    count = mesh.table.pp * a_rank
    if parallel.stages is not None and mesh.table.pp > 1:
        ends = list(accumulate(parallel.stages))
        if len(ends) != count or ends[-1] != len(model.blocks) or min(parallel.stages) < 1:
            raise PlanError(f"stages {parallel.stages} are no cut of {len(model.blocks)} blocks into {count} stages")
        ranges = [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
    else:
        costs = [_size(block) for block in model.blocks.values()]
        ranges = balanced_cut(_size(model.first) / 2, costs, _size(model.last), count)
    return [
        Stage(model, ranges[index], first=index == 0, last=index == count - 1)
        for index in pp.stage_indices(mesh, a_rank)
    ]


def attend_over(stage: nn.Module, plan: Plan, group: dist.ProcessGroup) -> None:
    """Put ring attention into the seam of every module of ``stage`` that the plan says attends across tokens."""
    if plan.attend is None:
        raise PlanError("the plan names no module that attends, which context parallelism needs; use mesh.cp = 1")
    for name, module in stage.named_modules():
        if plan.attends(name):
            module.attend = cp.ring_attend(group)


def tied(model: nn.Module) -> dict[str, str]:
    """The further names of shared parameters, each to the name that ``named_parameters`` gives it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def check_ties(ties: dict[str, str], mesh: Mesh, *, sharded: bool) -> None:
    """Refuse shared parameters that no one stage, or no one unit of FSDP, would own."""
    if ties and mesh.table.pp > 1:
        raise PlanError("stages cannot share a parameter; use a model that ties none, or mesh.pp = 1")
    if sharded and not all(a.startswith("last.") and name.startswith("first.") for a, name in ties.items()):
        raise PlanError(
            "FSDP shares a parameter between `first` and `last` alone; untie the others, or use mesh.dp_shard = 1"
        )


def tie(stage: nn.Module, ties: dict[str, str]) -> None:
    """Make the names of ``ties`` one parameter again, after something has made two of it."""
    for alias, name in ties.items():
        holder, _, attribute = alias.rpartition(".")
        stage.get_submodule(holder).register_parameter(attribute, stage.get_parameter(name))


def boundary(model: Decoder, mesh: Mesh, parallel: ParallelTable, step: StepShape) -> Tensor:
    """A meta tensor shaped like what one rank passes between blocks: one micro-batch of the residual stream.

    It is what the model's own ``first`` makes of tokens, cut along the sequence by cp, and by tp under sequence
    parallelism.
    """
    tokens_BT = torch.empty((step.micro_batch, step.seq_len), dtype=torch.int64, device="meta")
    with torch.no_grad():
        h_BTC = model.first(tokens_BT, Seq(tokens_BT))
    cuts = mesh.table.cp * (mesh.table.tp if parallel.sequence_parallel else 1)
    return h_BTC.new_empty((h_BTC.shape[0], h_BTC.shape[1] // cuts, *h_BTC.shape[2:]))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
