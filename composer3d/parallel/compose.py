"""The one place where techniques are composed, in one order, each with the reason for its place."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from composer3d.errors import PlanError
from composer3d.mesh import Mesh
from composer3d.models import Decoder, Seq
from composer3d.parallel import ac, compile, cp, deferred, fsdp, init, pp, tp, vocab
from composer3d.parallel.plan import Plan
from composer3d.parallel.stages import Stage, Stages, StepShape
from composer3d.parallel.ties import Ties, check_ties, part, tie, tied
from composer3d.recipe.schema import CompileTable, MemoryTable, ParallelTable, PrecisionTable
from composer3d.schedules import SCHEDULES, balanced_cut


def compose(
    model: Decoder,
    plan: Plan,
    mesh: Mesh,
    *,
    parallel: ParallelTable,
    memory: MemoryTable | None = None,
    precision: PrecisionTable | None = None,
    compiling: CompileTable | None = None,
    step: StepShape,
    seed: int,
) -> Stages:
    """Make ``model`` this rank's part of a job.

    Args:
        model: a model of the contract (``first``, ``blocks``, ``last``), built on the meta device in
            ``precision.params``. It is taken apart.
        plan: what the model says of itself.
        mesh: the axes; collective, every rank of it calls.
        memory, precision, compiling: absent, nothing is computed twice, everything in the model's dtype and eagerly.
        seed: of the initial weights, which are the same whatever the layout.

    Raises:
        PlanError: the plan does not fit the model, there are fewer blocks than stages, or parts share a parameter that
            cannot be sharded so.
        DeviceError: this machine cannot compile.
    """
    memory, precision, compiling = memory or MemoryTable(), precision or PrecisionTable(), compiling or CompileTable()
    plan.check(model)  # on the whole model: no stage alone can tell a glob that matches nothing
    stream = boundary(model, mesh, parallel, step)
    if precision.compute is not None:
        stream = stream.to(getattr(torch, precision.compute))
    vocab.loss_in_parts(model, plan, memory.loss_chunks)
    ties = tied(model)
    data = fsdp.mesh_of(mesh, parallel, precision, memory)
    check_ties(ties, mesh, sharded=data is not None)
    placement = pp.place(mesh.table.pp, parallel, step.micro_batches)
    splits = mesh.table.pp > 1 and SCHEDULES[parallel.schedule].splits
    builders = []
    # 1. Cut into stages, before anything wraps a module: every later step then touches this rank's layers only.
    modules = cut(model, placement.stages, mesh.at["pp"], parallel)
    for module in modules:
        module.followers = part(module, ties)
        # 1b. Weight gradients are put off where the schedule wants it, by what linear layers are from here on.
        builders.append(deferred.put_off(module, module.blocks) if splits else None)
        # 2. Tensor parallelism: it decides the shapes of parameters, which FSDP then shards further.
        if mesh.tp is not None:
            tp.apply(module, plan, mesh.tp, parallel)
            tie(module, ties)
        # 3. Context parallelism replaces what a block calls to attend, and nothing else.
        cp.apply(module, plan, mesh.cp_group, parallel)
        # 4. Checkpointing wraps what a block computes by now, so that backward repeats just that.
        ac.apply(module.blocks.values(), plan, memory)
        # 5. Compilation makes one graph of all this, which FSDP's hooks, coming after, cannot break.
        compile.apply(module.blocks.values(), compiling, mesh.device)
        # 6. FSDP goes around whatever a block has become, and owns its parameters from here on.
        if data is not None:
            fsdp.apply(module, data, parallel, precision, memory)
        # 7. Memory is taken last: only this rank's shards ever exist.
        module.to_empty(device="cpu" if memory.cpu_offload else mesh.device)
        tie(module, ties)
        # 8. Initial weights by global name and index, so that they are the same on every layout.
        init.initialise(module, plan, seed, skip=module.followers)
    pipeline = None
    if mesh.table.pp > 1:
        pipeline = pp.Pipeline(modules, builders, mesh, parallel, placement, step.micro_batches, stream)
    return Stages(modules, mesh, parallel, step, pipeline, Ties(ties, modules, mesh, placement.stages))


def cut(model: Decoder, stages: Sequence[Sequence[int]], rank: int, parallel: ParallelTable) -> list[Stage]:
    """The stages of pipeline rank ``rank``: blocks as the recipe says, or in proportion to their parameters.

    Room is then left for the embedding and the head. The head multiplies all its parameters, as a block does; the
    embedding only looks them up but updates them all: half.
    """
    count = sum(len(held) for held in stages)
    if parallel.stages is not None and count > 1:
        ends = list(accumulate(parallel.stages))
        if len(ends) != count or ends[-1] != len(model.blocks) or min(parallel.stages) < 1:
            raise PlanError(f"stages {parallel.stages} are no cut of {len(model.blocks)} blocks into {count} stages")
        ranges = [range(begin, end) for begin, end in pairwise((0, *ends))]
    else:
        costs = [_size(block) for block in model.blocks.values()]
        ranges = balanced_cut(_size(model.first) / 2, costs, _size(model.last), count)
    return [Stage(model, ranges[index], first=index == 0, last=index == count - 1) for index in stages[rank]]


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
