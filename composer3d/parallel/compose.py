"""The one place where techniques are composed, in one order, each with the reason for its place."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from composer3d.mesh import Mesh
from composer3d.models import Decoder, Seq
from composer3d.parallel import fsdp, init, tp
from composer3d.parallel.plan import Plan
from composer3d.parallel.stages import Stage, Stages
from composer3d.recipe.schema import ParallelTable
from composer3d.schedules import balanced_cut


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What one rank runs in a step: ``micro_batches`` of ``micro_batch`` samples of ``seq_len`` tokens."""

    micro_batch: int
    micro_batches: int
    seq_len: int


def compose(model: Decoder, plan: Plan, mesh: Mesh, *, parallel: ParallelTable, step: StepShape, seed: int) -> Stages:
    """Make ``model`` this rank's part of a job.

    Args:
        model: a model of the contract (``first``, ``blocks``, ``last``), built on the meta device. It is taken apart.
        plan: what the model says of itself.
        mesh: the axes; collective, every rank of it calls.
        seed: of the initial weights, which are the same whatever the layout.

    Raises:
        PlanError: the plan does not fit the model, or there are fewer blocks than stages.
    """
    plan.check(model)  # on the whole model: no stage alone can tell a glob that matches nothing
    stream = boundary(model, mesh, parallel, step)
    # 1. Cut into stages, before anything wraps a module: every later step then touches this rank's layers only.
    module = cut(model, mesh)
    # 2. Tensor parallelism: it decides the shapes of parameters, which FSDP then shards further.
    if mesh.tp is not None:
        tp.apply(module, plan, mesh.tp, parallel)
    # 3. FSDP goes around whatever a block has become, and owns its parameters from here on.
    if mesh.fsdp is not None:
        fsdp.apply(
            module,
            first=module.first,
            blocks=module.blocks.values(),
            last=module.last,
            mesh=mesh.fsdp,
            parallel=parallel,
        )
    # 4. Memory is taken last: only this rank's shards ever exist.
    module.to_empty(device=mesh.device)
    # 5. Initial weights by global name and index, so that they are the same on every layout.
    init.initialise(module, plan, seed)
    return Stages(module, mesh, parallel, micro_batch=step.micro_batch, micro_batches=step.micro_batches, stream=stream)


def cut(model: Decoder, mesh: Mesh) -> Stage:
    """This rank's stage: blocks in proportion to their parameters, room left for the embedding and the head.

    The head multiplies all its parameters, as a block does; the embedding only looks them up but updates them all:
    half.
    """
    stages, index = mesh.table.pp, mesh.at["pp"]
    costs = [_size(block) for block in model.blocks.values()]
    ranges = balanced_cut(_size(model.first) / 2, costs, _size(model.last), stages)
    return Stage(model, ranges[index], first=index == 0, last=index == stages - 1)


def boundary(model: Decoder, mesh: Mesh, parallel: ParallelTable, step: StepShape) -> Tensor:
    """A meta tensor shaped like what one rank passes between blocks: one micro-batch of the residual stream.

    It is what the model's own ``first`` makes of tokens, cut along the sequence by tp under sequence parallelism.
    """
    tokens_BT = torch.empty((step.micro_batch, step.seq_len), dtype=torch.int64, device="meta")
    with torch.no_grad():
        h_BTC = model.first(tokens_BT, Seq(tokens_BT))
    cuts = mesh.table.tp if parallel.sequence_parallel else 1
    return h_BTC.new_empty((h_BTC.shape[0], h_BTC.shape[1] // cuts, *h_BTC.shape[2:]))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
