"""The one place where the techniques are composed, in one order, with the reason for each place."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from composer3d.models.contract import Decoder, SequenceInfo, ShardingPlan
from composer3d.parallel import checkpointing, compile, init
from composer3d.parallel.context import api as context
from composer3d.parallel.data import fsdp
from composer3d.parallel.expert import api as expert
from composer3d.parallel.expert.balance import Balance, RouterSize, routers_of
from composer3d.parallel.pipeline import runtime as pipeline
from composer3d.parallel.pipeline import zero_bubble
from composer3d.parallel.pipeline.ties import Ties, check_ties, find_ties, split_ties, tie
from composer3d.parallel.stages import Stage, Stages, StepShape
from composer3d.parallel.tensor import styles as tensor
from composer3d.parallel.tensor.vocab import set_loss_chunks
from composer3d.recipe.schema import CompileTable, MemoryTable, ParallelTable, PrecisionTable
from composer3d.runtime.mesh import Mesh
from composer3d.spec.errors import PlanError
from composer3d.spec.schedules import SCHEDULES, balanced_cut


def compose(
    model: Decoder,
    plan: ShardingPlan,
    mesh: Mesh,
    *,
    parallel: ParallelTable,
    memory: MemoryTable | None = None,
    precision: PrecisionTable | None = None,
    compiling: CompileTable | None = None,
    step: StepShape,
    seed: int,
) -> Stages:
    """Turn a whole model into this rank's part of a job. Collective over all ranks of ``mesh``.

    Args:
        model: on the meta device, in ``precision.params``. It is taken apart.
        plan: how the model may be cut.
        memory, precision, compiling: their defaults recompute nothing, keep everything in the
            dtype of the model, and run eagerly.
        seed: of the initial weights, which are the same on every layout.

    Raises:
        PlanError: the plan does not fit the model; there are fewer blocks than stages; or tied
            parameters cannot be sharded or separated.
        DeviceError: compilation is asked for, and this machine has no compiler.
    """
    memory = memory or MemoryTable()
    precision = precision or PrecisionTable()
    compiling = compiling or CompileTable()

    plan.check(model)  # on the whole model: a stage alone cannot show that a glob matches nothing
    activation = stage_activation(model, mesh, parallel, step)
    if precision.compute is not None:
        activation = activation.to(getattr(torch, precision.compute))
    set_loss_chunks(model, plan, memory.loss_chunks)
    ties = find_ties(model)
    shard_meshes = fsdp.meshes_of(mesh, plan, parallel, precision, memory)
    check_ties(ties, mesh, sharded=shard_meshes is not None)
    router_sizes = {
        name: RouterSize(router.experts, router.per_token)
        for name, router in routers_of(model).items()
    }
    step_tokens = step.micro_batch * step.micro_batches * step.seq_len * mesh.batch_ranks
    placement = pipeline.place_stages(mesh.sizes.pp, parallel, step.micro_batches)
    defers = mesh.sizes.pp > 1 and SCHEDULES[parallel.schedule].splits_backward
    dw_builders = []

    # 1. Pipeline: cut into stages before anything wraps a module. All later steps then touch only
    #    the layers of this rank.
    modules = cut_into_stages(
        model, placement.stages, mesh.coords["pp"], parallel, step_tokens=step_tokens
    )
    for module in modules:
        module.tied_copies = split_ties(module, ties)

        # 2. Zero bubble: replace the linear layers of blocks while they still are plain modules.
        dw_builders.append(
            zero_bubble.defer_weight_grads(module, module.blocks) if defers else None
        )

        # 3. Tensor: it decides the shapes of the parameters, which FSDP then shards further.
        refreshes: Mapping[str, Callable[[], None]] = {}
        if mesh.tp is not None:
            refreshes = tensor.apply(module, plan, mesh.tp, parallel)
            tie(module, ties)

        # 4. Expert: it decides which experts are here, and how tokens get to the others.
        expert.apply(module, plan, mesh, parallel)

        # 5. Context: it replaces what a block calls to attend, and nothing else.
        context.apply(module, plan, mesh.cp_group, parallel)

        # 6. Checkpointing: it wraps everything a block computes, and backward repeats that.
        checkpointing.apply(module.blocks.values(), plan, memory)

        # 7. Compile: one graph of all that. FSDP's hooks come later and stay outside of it.
        compile.apply(module.blocks, compiling, mesh.device, _in_blocks(refreshes))

        # 8. FSDP: it wraps whatever a block has become, and owns the parameters from here on.
        if shard_meshes is not None:
            fsdp.apply(module, plan, shard_meshes, parallel, precision, memory)

        # 9. Materialise: memory is allocated last, so only this rank's shards ever exist.
        module.to_empty(device="cpu" if memory.cpu_offload else mesh.device)
        tie(module, ties)

        # 10. Initial weights: by global name and index, so that they do not depend on the layout.
        init.initialise(module, plan, seed, skip=module.tied_copies)

    runtime = None
    if mesh.sizes.pp > 1:
        runtime = pipeline.Pipeline(
            modules, dw_builders, mesh, parallel, placement, step.micro_batches, activation
        )
    return Stages(
        modules,
        mesh,
        parallel,
        step,
        runtime,
        Ties(ties, modules, mesh, placement.stages),
        Balance(router_sizes, modules, mesh),
    )


def cut_into_stages(
    model: Decoder,
    stages: Sequence[Sequence[int]],
    rank: int,
    parallel: ParallelTable,
    *,
    step_tokens: int | None = None,
) -> list[Stage]:
    """Make the stages of pipeline rank ``rank``; ``stages`` are the stage numbers of each rank.

    Blocks are distributed as ``parallel.stages`` says, or else so that all stages have about the
    same number of parameters. The embedding counts half: forward only looks its parameters up, but
    the optimizer updates all of them. The head counts in full: it multiplies by all of them, as
    blocks do.

    Raises PlanError where the blocks cannot be distributed so.
    """
    count = sum(len(held) for held in stages)
    if parallel.stages is not None and count > 1:
        ends = list(accumulate(parallel.stages))
        if len(ends) != count or ends[-1] != len(model.blocks) or min(parallel.stages) < 1:
            raise PlanError(
                f"parallel.stages = {list(parallel.stages)} must be {count} numbers of at least 1, "
                f"with the sum {len(model.blocks)}, the number of blocks"
            )
        ranges = [range(begin, end) for begin, end in pairwise((0, *ends))]
    else:
        ranges = balanced_cut(
            _n_parameters(model.first) / 2,
            [_n_parameters(block) for block in model.blocks.values()],
            _n_parameters(model.last),
            count,
        )
    return [
        Stage(
            model,
            ranges[index],
            first=index == 0,
            last=index == count - 1,
            step_tokens=step_tokens,
        )
        for index in stages[rank]
    ]


def stage_activation(
    model: Decoder, mesh: Mesh, parallel: ParallelTable, step: StepShape
) -> Tensor:
    """A meta tensor like the residual stream of one micro-batch on one rank.

    Its shape is what the model's own ``first`` returns, cut along the sequence by cp, and by tp
    under sequence parallelism.
    """
    tokens_BT = torch.empty((step.micro_batch, step.seq_len), dtype=torch.int64, device="meta")
    with torch.no_grad():
        h_BTC = model.first(tokens_BT, SequenceInfo(tokens_BT))
    cuts = mesh.sizes.cp * (mesh.sizes.tp if parallel.sequence_parallel else 1)
    return h_BTC.new_empty((h_BTC.shape[0], h_BTC.shape[1] // cuts, *h_BTC.shape[2:]))


def _in_blocks(
    refreshes: Mapping[str, Callable[[], None]],
) -> dict[str, Callable[[], None]]:
    """Those of modules in blocks, by their names in ``blocks``."""
    return {
        name.removeprefix("blocks."): refresh
        for name, refresh in refreshes.items()
        if name.startswith("blocks.")
    }


def _n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
