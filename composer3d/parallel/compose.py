"""Compose the parallelism techniques in one fixed order, with the reason for each position."""

from typing import Protocol

import torch

from composer3d.facts.schedules import SCHEDULES
from composer3d.models import claims, fit
from composer3d.models.contract import Decoder, ShardingPlan
from composer3d.parallel import checkpointing, compile, float8, init
from composer3d.parallel.context import api as context
from composer3d.parallel.context import latents
from composer3d.parallel.data import fsdp
from composer3d.parallel.executor import Executor, OneStage, StepShape
from composer3d.parallel.expert import api as expert
from composer3d.parallel.expert.balance import Balance, sizes_of_routers
from composer3d.parallel.pipeline import runtime as pipeline
from composer3d.parallel.pipeline import stage_cut, zero_bubble
from composer3d.parallel.pipeline.ties import Ties, check_ties, find_ties, split_ties, tie
from composer3d.parallel.stages import Stage, Stages
from composer3d.parallel.tensor import styles as tensor
from composer3d.planner.schedule import keeps_gradients_of_loss
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
        DeviceError: ``compiling`` is enabled, and a machine has no compiler, or cannot run
            ``parallel.async_tp``; or a GPU has no products in float8. Every rank raises it.
    """
    memory = memory or MemoryTable()
    precision = precision or PrecisionTable()
    compiling = compiling or CompileTable()

    # a. Check the plan on the whole model: in a single stage, a correct glob may match nothing.
    compile.check(model, plan, compiling, memory, parallel)
    fit.check(model, plan)
    claims.check(model, plan)
    float8.check(model, plan, mesh.sizes, precision, mesh.device)
    async_tp_group = mesh.tp.get_group() if parallel.async_tp and mesh.tp is not None else None
    compile.prepare(compiling, mesh.device, async_tp_group)

    # b. Note what only the whole model tells: the message between stages, ties and routers.
    activation = stage_cut.stage_activation(model, mesh, parallel, step)
    if precision.compute is not None:
        activation = activation.to(getattr(torch, precision.compute))
    ties = find_ties(model)
    router_sizes = sizes_of_routers(model)

    # c. Form the groups of experts and of FSDP. All ranks take part, whatever stages they hold.
    expert.form_groups(plan, mesh)
    shard_meshes = fsdp.meshes_of(mesh, plan, parallel, precision, memory)
    check_ties(ties, mesh, sharded=shard_meshes is not None)

    # d. Decide which rank holds which stages, and so in which order they run.
    placement = pipeline.place_stages(mesh.sizes.pp, parallel, step.micro_batches)
    if mesh.sizes.pp > 1:
        stage_cut.check_every_stage_trains(model, sum(map(len, placement.stages)), parallel)
    defers = mesh.sizes.pp > 1 and SCHEDULES[parallel.schedule].splits_backward
    step_tokens = step.micro_batch * step.micro_batches * step.seq_len * mesh.batch_ranks

    # e. Cut the loss into parts. Forward computes its gradients, too, if backward follows at once.
    checkpointing.set_loss_chunks(
        model,
        plan,
        memory.loss_chunks,
        keeps_gradients=keeps_gradients_of_loss(mesh.sizes.pp, parallel, step.micro_batches),
    )
    weight_gradient_builders = []

    # 1. Pipeline: cut into stages before anything wraps a module. All later steps then touch only
    #    the layers of this rank.
    modules = stage_cut.cut_into_stages(
        model, placement.stages, mesh.coords["pp"], parallel, step_tokens=step_tokens
    )
    for module in modules:
        module.tied_copies = split_ties(module, ties)

        # 2. Latents: let ranks of cp send them, before steps 3 to 5 change what reads them.
        is_float8 = precision.matmul == "float8"
        latents.apply(module, plan, mesh.cp_group, parallel, tp=mesh.sizes.tp, is_float8=is_float8)

        # 3. Float8: replace linear layers while they still are plain modules.
        float8.apply(module.blocks, plan, precision)

        # 4. Zero bubble: replace the linear layers of blocks, for the same reason.
        weight_gradient_builders.append(
            zero_bubble.defer_weight_grads(module, module.blocks) if defers else None
        )

        # 5. Tensor: it decides the shapes of the parameters, which FSDP then shards further.
        cut = tensor.Cut()
        if mesh.tp is not None:
            cut = tensor.apply(module, plan, mesh.tp, parallel)
            module.partial_gradients = cut.partial_gradients
            # Each name has got a parameter of its own: tied names become one again.
            tie(module, ties)

        # 6. Expert: put the experts on the ranks of ep, and let tokens travel to them.
        expert.apply(module, plan, mesh, parallel)

        # 7. Context: replace the function ``attend`` that blocks call, and nothing else.
        context.apply(module, plan, mesh.cp_group, parallel)

        # 8. Checkpointing: wrap the whole computation of a block, which backward repeats.
        checkpointing.apply(
            module.blocks, plan, memory, stage=module.number, async_tp=parallel.async_tp
        )

        # 9. Compile: one graph of a block with the changes above, and one of the loss. FSDP adds
        #    its hooks later, so they stay outside of the graph.
        compile.apply(module.blocks, compiling, cut.refreshes, fuse_tp=async_tp_group is not None)
        compile.apply_to_loss(module, plan, compiling)

        # 10. FSDP: wrap blocks in their final form. From here on, FSDP owns the parameters.
        if shard_meshes is not None:
            fsdp.apply(module, plan, shard_meshes, parallel, precision, memory)

        # 11. Materialise: memory is allocated last, so only this rank's shards ever exist.
        device = torch.device("cpu") if memory.cpu_offload else mesh.device
        materialise(module, device=device)
        tie(module, ties)

        # 12. Initial weights: by global name and index, so that they do not depend on the layout.
        init.initialise(module, plan, seed, skip=module.tied_copies)

    executor: Executor
    if mesh.sizes.pp > 1:
        executor = pipeline.Pipeline(
            modules, weight_gradient_builders, mesh, parallel, placement, step, activation
        )
    else:
        executor = OneStage(modules[0], parallel, step.micro_batch, mesh.device)
    return Stages(
        modules,
        mesh,
        executor,
        parallel,
        Ties(ties, modules, mesh, placement.stages) if ties and mesh.sizes.pp > 1 else None,
        Balance(router_sizes, modules, mesh) if router_sizes else None,
    )
