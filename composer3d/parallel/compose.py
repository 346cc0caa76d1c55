"""Compose the parallelism techniques in one fixed order, with the reason for each position."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from composer3d.facts.errors import PlanError
from composer3d.facts.schedules import SCHEDULES, balanced_cut
from composer3d.models import claims
from composer3d.models.contract import Decoder, SequenceInfo, ShardingPlan
from composer3d.parallel import checkpointing, compile, float8, init
from composer3d.parallel.context import api as context
from composer3d.parallel.data import fsdp
from composer3d.parallel.executor import Executor, OneStage, StepShape
from composer3d.parallel.expert import api as expert
from composer3d.parallel.expert.balance import Balance, RouterSize, routers_of
from composer3d.parallel.pipeline import runtime as pipeline
from composer3d.parallel.pipeline import zero_bubble
from composer3d.parallel.pipeline.ties import Ties, check_ties, find_ties, split_ties, tie
from composer3d.parallel.stages import Stage, Stages
from composer3d.parallel.tensor import styles as tensor
from composer3d.parallel.tensor.vocab import set_loss_chunks
from composer3d.recipe.schema import CompileTable, MemoryTable, ParallelTable, PrecisionTable
from composer3d.runtime.mesh import Mesh


class Materialise(Protocol):
    """Allocates the parameters of a stage on ``device``, with any values."""

    def __call__(self, stage: Stage, /, *, device: torch.device) -> object: ...


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
    materialise: Materialise = Stage.to_empty,
) -> Stages:
    """Turn a whole model into this rank's part of a job. Collective over all ranks of ``mesh``.

    Args:
        model: the whole model on the meta device, in ``precision.params``. It is consumed: its
            modules become those of the stages.
        plan: how the model may be cut.
        mesh: the mesh of the job.
        parallel: the recipe's ``[parallel]``.
        memory, precision, compiling: the recipe's ``[memory]``, ``[precision]`` and ``[compile]``.
            With their defaults nothing is recomputed, computation is in the dtype of the model,
            and blocks run eagerly.
        step: the size of a rank's step.
        seed: seed of the initial weights, which are the same on every layout.
        materialise: allocates the parameters of a stage, which then get their initial weights. A
            dry run allocates tensors without data.

    Returns:
        This rank's stages. Their parameters are initialised, and lie on the mesh's device, or in
        host memory with ``memory.cpu_offload``.

    Raises:
        PlanError: the plan does not fit the model, or claims what is untrue; there are fewer blocks
            than stages; tied parameters cannot be sharded or separated; or the pipeline schedule
            cannot run.
        MeshError: ranks have read different schedules from ``parallel.schedule_csv``.
        DeviceError: ``compiling`` is enabled, and this machine has no compiler, or cannot run
            ``parallel.async_tp``; or the GPU has no products in float8.
    """
    memory = memory or MemoryTable()
    precision = precision or PrecisionTable()
    compiling = compiling or CompileTable()

    # a. Check the plan on the whole model: in a single stage, a correct glob may match nothing.
    if compiling.enabled and plan.experts is not None:
        raise PlanError(
            "compile.enabled = true makes one graph of a block, but the number of tokens of each "
            "expert changes in every step; use compile.enabled = false"
        )
    plan.check(model)
    claims.check(model, plan)
    float8.check(model, plan, mesh.sizes, precision, mesh.device)

    # b. Note what only the whole model tells: the message between stages, ties and routers.
    activation = stage_activation(model, mesh, parallel, step)
    if precision.compute is not None:
        activation = activation.to(getattr(torch, precision.compute))
    ties = find_ties(model)
    router_sizes = {
        name: RouterSize(router.experts, router.per_token)
        for name, router in routers_of(model).items()
    }
    set_loss_chunks(model, plan, memory.loss_chunks)

    # c. Form the groups of experts and of FSDP. All ranks take part, whatever stages they hold.
    expert.form_groups(plan, mesh)
    shard_meshes = fsdp.meshes_of(mesh, plan, parallel, precision, memory)
    check_ties(ties, mesh, sharded=shard_meshes is not None)

    # d. Decide which rank holds which stages.
    placement = pipeline.place_stages(mesh.sizes.pp, parallel, step.micro_batches)
    if mesh.sizes.pp > 1:
        _check_every_stage_trains(model, sum(map(len, placement.stages)), parallel)
    defers = mesh.sizes.pp > 1 and SCHEDULES[parallel.schedule].splits_backward
    step_tokens = step.micro_batch * step.micro_batches * step.seq_len * mesh.batch_ranks
    dw_builders = []

    # 1. Pipeline: cut into stages before anything wraps a module. All later steps then touch only
    #    the layers of this rank.
    modules = cut_into_stages(
        model, placement.stages, mesh.coords["pp"], parallel, step_tokens=step_tokens
    )
    for module in modules:
        module.tied_copies = split_ties(module, ties)

        # 2. Float8: replace linear layers while they still are plain modules.
        float8.apply(module.blocks, plan, precision)

        # 3. Zero bubble: replace the linear layers of blocks, for the same reason.
        dw_builders.append(
            zero_bubble.defer_weight_grads(module, module.blocks) if defers else None
        )

        # 4. Tensor: it decides the shapes of the parameters, which FSDP then shards further.
        cut = tensor.Cut()
        if mesh.tp is not None:
            cut = tensor.apply(module, plan, mesh.tp, parallel)
            module.partial_gradients = cut.partial_gradients
            tie(module, ties)

        # 5. Expert: put the experts on the ranks of ep, and let tokens travel to them.
        expert.apply(module, plan, mesh, parallel)

        # 6. Context: replace the function ``attend`` that blocks call, and nothing else.
        context.apply(module, plan, mesh.cp_group, parallel)

        # 7. Checkpointing: wrap the whole computation of a block, which backward repeats.
        checkpointing.apply(module.blocks, plan, memory, async_tp=parallel.async_tp)

        # 8. Compile: one graph of a block with the changes above. FSDP adds its hooks later, so
        #    they stay outside of the graph.
        compile.apply(
            module.blocks,
            compiling,
            mesh.device,
            _in_blocks(cut.refreshes),
            mesh.tp.get_group() if parallel.async_tp and mesh.tp is not None else None,
        )

        # 9. FSDP: wrap blocks in their final form. From here on, FSDP owns the parameters.
        if shard_meshes is not None:
            fsdp.apply(module, plan, shard_meshes, parallel, precision, memory)

        # 10. Materialise: memory is allocated last, so only this rank's shards ever exist.
        device = torch.device("cpu") if memory.cpu_offload else mesh.device
        materialise(module, device=device)
        tie(module, ties)

        # 11. Initial weights: by global name and index, so that they do not depend on the layout.
        init.initialise(module, plan, seed, skip=module.tied_copies)

    executor: Executor
    if mesh.sizes.pp > 1:
        executor = pipeline.Pipeline(
            modules, dw_builders, mesh, parallel, placement, step, activation
        )
    else:
        executor = OneStage(modules[0], parallel, step.micro_batch, mesh.device)
    return Stages(
        modules,
        mesh,
        executor,
        parallel,
        Ties(ties, modules, mesh, placement.stages),
        Balance(router_sizes, modules, mesh),
    )


def compose_for_generation(model: Decoder, plan: ShardingPlan, mesh: Mesh) -> Stage:
    """Cut a whole model over tp for the forward of new tokens. Collective over all ranks.

    A new token cannot be cut, so there is no sequence parallelism: all ranks of tp hold all tokens
    between layers. The ranks of ep, which are those of tp, compute their own experts.

    Args:
        model: the whole model on the meta device, which is consumed.
        plan: how the model may be cut.
        mesh: a mesh without other axes than tp and ep.

    Returns:
        The only stage, on the mesh's device. Its parameters have any values.

    Raises:
        PlanError: the plan does not fit the model.
    """
    plan.check(model)
    ties = find_ties(model)
    stage = Stage(model, range(len(model.blocks)), first=True, last=True)
    if mesh.tp is not None:
        parallel = ParallelTable(sequence_parallel=False, loss_parallel=False)
        tensor.apply(stage, plan, mesh.tp, parallel)
        expert.apply_to_same_tokens(stage, plan, mesh)
        tie(stage, ties)
    stage.to_empty(device=mesh.device)
    tie(stage, ties)
    return stage


def cut_into_stages(
    model: Decoder,
    stages: Sequence[Sequence[int]],
    rank: int,
    parallel: ParallelTable,
    *,
    step_tokens: int | None = None,
) -> list[Stage]:
    """Build the stages of pipeline rank ``rank``, with the blocks of ``blocks_of_stages``.

    Args:
        model: the whole model.
        stages: the stage numbers of each pipeline rank.
        rank: a pipeline rank.
        parallel: the recipe's ``[parallel]``.

    Raises:
        PlanError: as ``blocks_of_stages``.
    """
    n_stages = sum(len(held) for held in stages)
    ranges = blocks_of_stages(model, n_stages, parallel)
    return [
        Stage(
            model,
            ranges[index],
            first=index == 0,
            last=index == n_stages - 1,
            number=index,
            step_tokens=step_tokens,
        )
        for index in stages[rank]
    ]


def blocks_of_stages(model: Decoder, n_stages: int, parallel: ParallelTable) -> list[range]:
    """Return the blocks of each stage.

    ``parallel.stages`` gives the number of blocks of each stage. If it is absent, all stages get
    about the same number of parameters. The embedding counts half: forward only looks its
    parameters up, but the optimizer updates all of them. The head counts in full: forward
    multiplies by all of its parameters, as in blocks.

    Raises:
        PlanError: ``parallel.stages`` does not fit the number of stages or of blocks, or there are
            fewer blocks than stages.
    """
    if parallel.stages is not None and n_stages > 1:
        ends = list(accumulate(parallel.stages))
        if len(ends) != n_stages or ends[-1] != len(model.blocks) or min(parallel.stages) < 1:
            raise PlanError(
                f"parallel.stages = {list(parallel.stages)} must be {n_stages} numbers of at "
                f"least 1, with the sum {len(model.blocks)}, the number of blocks"
            )
        return [range(begin, end) for begin, end in pairwise((0, *ends))]
    return balanced_cut(
        _n_parameters(model.first) / 2,
        [_n_parameters(block) for block in model.blocks.values()],
        _n_parameters(model.last),
        n_stages,
    )


def _check_every_stage_trains(model: Decoder, n_stages: int, parallel: ParallelTable) -> None:
    """Raise PlanError if a stage has no parameter that requires a gradient.

    The runtime of torch's pipelines asks each stage for gradients. A tied head counts as the
    embedding's own.
    """
    owned = {id(parameter) for parameter in model.first.parameters()}
    for stage, blocks in enumerate(blocks_of_stages(model, n_stages, parallel)):
        held = [*list(model.blocks.values())[blocks.start : blocks.stop]]
        parameters = [parameter for block in held for parameter in block.parameters()]
        if stage == 0:
            parameters += model.first.parameters()
        if stage == n_stages - 1:
            parameters += [p for p in model.last.parameters() if id(p) not in owned]
        if not any(parameter.requires_grad for parameter in parameters):
            raise PlanError(
                f"stage {stage} of {n_stages}, with blocks {blocks.start} to {blocks.stop - 1}, "
                "would train nothing: optim.train must match a parameter of every pipeline stage; "
                "use mesh.pp = 1, or another cut (parallel.stages)"
            )


def stage_activation(
    model: Decoder, mesh: Mesh, parallel: ParallelTable, step: StepShape
) -> Tensor:
    """Return a meta tensor with the shape of one micro-batch's residual stream on one rank.

    It is the output of the model's own ``first``, (micro_batch, T, C) in the dtype of the
    parameters, with T divided by cp, and by tp under sequence parallelism.
    """
    tokens_BT = torch.empty((step.micro_batch, step.seq_len), dtype=torch.int64, device="meta")
    with torch.no_grad():
        h_BTC = model.first(tokens_BT, SequenceInfo(tokens_BT))
    cuts = mesh.sizes.cp * (mesh.sizes.tp if parallel.sequence_parallel else 1)
    return h_BTC.new_empty((h_BTC.shape[0], h_BTC.shape[1] // cuts, *h_BTC.shape[2:]))


def _in_blocks(
    refreshes: Mapping[str, Callable[[], None]],
) -> dict[str, Callable[[], None]]:
    """Keep the functions of modules within ``blocks``, by their names relative to ``blocks``."""
    return {
        name.removeprefix("blocks."): refresh
        for name, refresh in refreshes.items()
        if name.startswith("blocks.")
    }


def _n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
