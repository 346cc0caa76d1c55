"""Build a ``Run`` from a recipe: one rank's model, optimizer, data, checkpoints and metrics."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

import composer3d
from composer3d.checkpoint import Store
from composer3d.convert.assets import make_assets
from composer3d.convert.start import load_hf
from composer3d.data import BatchesAhead, Blend, Corpus
from composer3d.facts import hardware
from composer3d.facts.errors import PlanError
from composer3d.facts.remote import RemotePath
from composer3d.models.contract import Decoder
from composer3d.models.registry import Architecture, architecture, resolve
from composer3d.parallel import ShardingPlan, Stages, StepShape, compose
from composer3d.parallel.compose import Materialise
from composer3d.parallel.context import implementation, kernels
from composer3d.parallel.freeze import freeze_others, require_matches
from composer3d.parallel.stages import Stage
from composer3d.recipe.advice import way_to_go_on
from composer3d.recipe.matrices import matrices_of
from composer3d.recipe.schema import Recipe
from composer3d.reliability.bad_steps import Ledger, StepHistory
from composer3d.reliability.lock import Claim
from composer3d.reliability.stragglers import peer_groups
from composer3d.runtime import log, process_group
from composer3d.runtime.agreement import check_agreement
from composer3d.runtime.exchanges import check_exchanges, collectives_of_training, groups_of
from composer3d.runtime.mesh import Mesh
from composer3d.training.batches import make_loader, open_data
from composer3d.training.observers.epochs import EpochLog, log_epochs, log_held_out
from composer3d.training.observers.metrics import Metrics, count_flops, further_metrics
from composer3d.training.observers.observer import Observers
from composer3d.training.observers.profiling import make_profiler
from composer3d.training.observers.replicas import ReplicaCheck
from composer3d.training.observers.run_copy import RunCopy
from composer3d.training.observers.stragglers import StragglerWatch
from composer3d.training.observers.timeline import make_timeline
from composer3d.training.optimizers import Optimizer, build_stages_optimizer
from composer3d.training.recovery import Recovery
from composer3d.training.resume import require_tokens_of_model, resume
from composer3d.training.run_folder import claim_folder, write_recipe
from composer3d.training.saving import Saver
from composer3d.training.validation import Validation


@dataclass
class Run:
    """Everything that one rank trains with.

    Attributes:
        saver: saves checkpoints when they are due.
        recovery: decides which steps are bad, and how the run goes on.
        observers: all that watches the run and changes none of its numbers.
        step: the number of optimizer steps done.
    """

    recipe: Recipe
    stages: Stages
    optimizer: Optimizer
    loader: BatchesAhead
    validation: Validation
    saver: Saver
    recovery: Recovery
    observers: Observers
    step: int


def build(
    recipe: Recipe, device: torch.device, resolved_toml: str, *, claimed: Path | None = None
) -> Run:
    """Build the run on this rank, and resume it if the recipe says so. Collective over all ranks.

    Args:
        recipe: the whole recipe.
        device: the device of this rank.
        resolved_toml: the recipe as text, kept in the run's folder and in its checkpoints.
        claimed: as ``told`` of ``claim_folder``.

    Raises:
        UserError: the data or a checkpoint do not fit the recipe, or another job uses the folder;
            or the recipe or the software differs between ranks; or a checkpoint of this run could
            not be read again.
        ExchangeError: a group has wrong ranks, or a collective of an axis gives wrong values.
    """
    with log.phase("checks of ranks and groups"):
        check_agreement(recipe)
        mesh = Mesh.build(recipe.mesh, device)
        groups = groups_of(mesh, has_experts=recipe.model.experts > 0)
        check_exchanges(mesh, groups, lambda axis: collectives_of_training(axis, recipe.parallel))
    is_main = mesh.rank == 0
    folder = recipe.run.folder
    claim = claim_folder(folder, claimed)
    copy = _copy_of_run(recipe) if is_main else None
    process_group.on_all("run.sync", copy.fetch if copy is not None else lambda: None)
    if claim is not None:
        log.keep_in(folder / log.FILE, claim.is_held)
        versions = f"composer3d {composer3d.__version__}, torch {torch.__version__}"
        log.keep([f"{versions}, {mesh.world_size} ranks on {device.type}"])

    with log.phase("data"):
        corpus, held_out = process_group.on_all("data", lambda: open_data(recipe))
        digests = {"train": corpus.digest, "validation": held_out and held_out.digest}
        process_group.check_same("the data", digests)
        make = partial(make_loader, recipe, mesh, corpus, seed=recipe.data.seed)
        loader = BatchesAhead(process_group.on_all("data", make), device)

    with log.phase("model"):
        implementation.activate(recipe.parallel.attention_kernel, device)
        stages = build_stages(recipe, mesh)
        optimizer = build_stages_optimizer(stages, recipe)

    store = Store(
        recipe.checkpoint_folder,
        keep=recipe.checkpoint.keep,
        background=recipe.checkpoint.async_save,
        timeout_s=60 * recipe.checkpoint.timeout_minutes,
    )
    store.way_to_go_on = way_to_go_on(recipe)
    if claim is not None:
        store.guard = claim.require_held
    history = StepHistory(recipe.reliability)
    with log.phase("checkpoint"):
        steps_done = resume(recipe, store, stages, optimizer, loader, history)
        process_group.on_all("run.sync", copy.begin if copy is not None else lambda: None)
        store.claim()
        if steps_done is None and recipe.model.hf is not None:
            process_group.on_main("tokenizers", partial(require_tokens_of_model, recipe))
            load_hf(recipe.model.hf, stages)
    find_assets = partial(make_assets, recipe, corpus.end_of_document, store.loaded)
    store.assets = process_group.on_all("assets", find_assets if is_main else dict)
    store.warm_up(stages, optimizer)
    saver = Saver(recipe, resolved_toml, store, claim)
    process_group.on_main("checkpoint", partial(saver.require_readable, loader, history))

    # Written only after resuming: a recipe that cannot resume must not replace the run's recipe.
    keep_recipe = partial(write_recipe, folder, resolved_toml, steps_done=steps_done or 0)
    process_group.on_all("recipe.toml", keep_recipe if is_main else lambda: None)
    ledger = _open_ledger(folder, claim, steps_done=steps_done or 0)
    _log_choices(recipe, device)
    log_epochs(recipe, loader.loader)
    validation = Validation(recipe, stages, held_out, store.loaded, loader.order)
    if validation.loader is not None:
        log_held_out(recipe, loader.loader, validation.loader)
    observers = Observers()
    if copy is not None:
        # The first one is closed last, and sends what the others have written.
        observers.add(copy)
    _add_observers(
        observers, recipe, stages, optimizer, loader, corpus, claim, steps_done=steps_done
    )
    run = Run(
        recipe=recipe,
        stages=stages,
        optimizer=optimizer,
        loader=loader,
        validation=validation,
        saver=saver,
        recovery=Recovery(recipe.reliability, history, ledger, store, stages, optimizer, observers),
        observers=observers,
        step=steps_done or 0,
    )
    log.say_phases()
    if copy is not None:
        copy.start()  # last: nothing would end its thread if this function failed
    return run


def _copy_of_run(recipe: Recipe) -> RunCopy | None:
    """Return the copy of the run's folder beside its checkpoints, or None if there is none."""
    place = recipe.checkpoint_folder
    if recipe.run.sync and isinstance(place, RemotePath):
        return RunCopy(recipe.run.folder, place)
    return None


def _require_matrices(model_of: Architecture, recipe: Recipe) -> None:
    """Raise PlanError if a glob of ``optim.matrices`` matches no matrix of the model.

    ``check`` knows the matrices of our architectures, but not those of a user's own.
    """
    optim = recipe.optim
    for glob in (optim.matrices or ()) if optim.optimizer.has_matrices else ():
        if not matrices_of(model_of, recipe.model, replace(optim, matrices=(glob,))):
            raise PlanError(f"optim.matrices: {glob!r} matches no matrix of the model")


def whole_model(recipe: Recipe) -> Decoder:
    """Return the recipe's whole model on the meta device, in the dtype that it keeps weights in.

    Only what the recipe trains requires a gradient.

    Raises:
        ModelError: the architecture cannot be imported.
        PlanError: a glob of ``optim.train`` matches no parameter that can be trained.
    """
    model_of = architecture(recipe.model.architecture)
    dtype = getattr(torch, recipe.precision.params)
    model = model_of.build(recipe.model, dtype=dtype, device="meta")
    if recipe.optim.train is not None:
        freeze_others(model, recipe.optim.train)
    return model


def build_stages(
    recipe: Recipe,
    mesh: Mesh,
    *,
    change_plan: Callable[[ShardingPlan], ShardingPlan] = lambda plan: plan,
    materialise: Materialise = Stage.to_empty,
) -> Stages:
    """Compose the recipe's model on this rank. Collective over all ranks.

    Args:
        recipe: the whole recipe.
        mesh: the mesh of the job.
        change_plan: returns the plan to use in place of the architecture's own.
        materialise: as in ``compose``.

    Raises what ``compose`` raises, and ModelError if the architecture cannot be imported.
    """
    data, shape = recipe.data, recipe.model
    model_of = architecture(shape.architecture)
    model = whole_model(recipe)
    for group in recipe.optim.groups or ():
        # ``check`` knows the parameters of our architectures, but not those of a user's own.
        require_matches(model, group.train, key="optim.groups")
    _require_matrices(model_of, recipe)
    return compose(
        model,
        change_plan(resolve(model_of.plan)(shape)),
        mesh,
        parallel=recipe.parallel,
        memory=recipe.memory,
        precision=recipe.precision,
        compiling=recipe.compile,
        step=StepShape(
            micro_batch=data.micro_batch,
            micro_batches=recipe.micro_batches,
            seq_len=data.seq_len,
        ),
        seed=recipe.run.seed,
        materialise=materialise,
    )


def _open_ledger(folder: Path, claim: Claim | None, *, steps_done: int) -> Ledger:
    """Read the bad steps of this run, and log how many batches it will leave out again."""
    ledger = Ledger(folder, claim.require_held if claim is not None else None)
    begin = partial(ledger.begin, resumes=steps_done > 0)
    ledger.lines = process_group.on_main(ledger.path.name, begin)
    ahead = [entry for entry in ledger.lines if entry.step > steps_done]
    if ahead:
        log.get().info(
            f"{ledger.path} lists {len(ahead)} bad steps after step {steps_done}: their batches "
            "are left out again"
        )
    return ledger


def _log_choices(recipe: Recipe, device: torch.device) -> None:
    """Log the kernel of attention if torch does not compute it on whole sequences.

    Log the package that has it if it is none of torch's own. Warn of choices that may cost time.
    """
    description = describe_attention(recipe, device)
    if description is not None:
        log.get().info(f"attention: {description}")
    if recipe.parallel.attention_kernel != "torch":
        log.get().info(f"attention: kernels of {recipe.parallel.attention_kernel} in their places")
    for line in doubtful_choices(recipe):
        log.get().warning(line)


def doubtful_choices(recipe: Recipe) -> list[str]:
    """Return a line for each choice that is meant to save time and may cost some."""
    tp = recipe.mesh.tp
    if recipe.precision.matmul == "float8" and tp > 1:
        return [
            f'precision.matmul = "float8" with mesh.tp = {tp} may be slower than bfloat16 '
            "(docs/performance.md): measure both"
        ]
    return []


def describe_attention(recipe: Recipe, device: torch.device) -> str | None:
    """Return how attention is computed, or None if torch computes it on whole sequences.

    The kernel that is named computes the blocks in which each query sees all keys before it.
    """
    cp, parallel = recipe.mesh.cp, recipe.parallel
    has_window = any(0 < window < recipe.data.seq_len for window in recipe.model.windows)
    # ``ring_attention`` leaves only these scores to torch, without documents, windows and sinks.
    is_plain = recipe.data.packing == "none" and not has_window and not recipe.model.has_sinks
    if cp == 1 and is_plain:
        return None
    if cp == 1:
        place = "whole sequences"
    else:
        place = f"{parallel.cp_method} over cp {cp}, {parallel.cp_balance}"
    if parallel.cp_method == "ulysses" and is_plain:
        return f"{place}; its kernel: scaled_dot_product_attention of torch"
    dtype = getattr(torch, recipe.precision.computes_in)
    # Queries of one chunk.
    shape = (0, recipe.data.seq_len // recipe.sequence_chunks, recipe.model.head_width)
    kernel = kernels.kernel_of(torch.empty(shape, dtype=dtype, device=device))
    is_cut = recipe.data.packing != "none" or all(
        0 < window < recipe.data.seq_len for window in recipe.model.windows
    )
    if kernel is kernels.Kernel.CUDNN and is_cut:
        kernel = kernels.Kernel.CUDA_FLASH  # it computes documents and windows (``segment_kernel``)
    return f"{place}; its kernel: {kernel.value}"


def _add_observers(
    observers: Observers,
    recipe: Recipe,
    stages: Stages,
    optimizer: Optimizer,
    loader: BatchesAhead,
    corpus: Corpus | Blend,
    claim: Claim | None,
    *,
    steps_done: int | None,
) -> None:
    """Add what watches the run, in the order in which it sees each step.

    Collective over all ranks.
    """
    mesh, folder = stages.mesh, recipe.run.folder
    # Metrics come first: the line of a step stands before what else is said of it.
    metrics = process_group.on_all(
        "metrics", lambda: _make_metrics(recipe, stages, claim, start_step=steps_done or 0)
    )
    observers.add(metrics)
    _tell_start(recipe, mesh, metrics, steps_done)
    observers.add(EpochLog(loader.loader))
    has_documents = recipe.data.packing != "none"
    peers = peer_groups(recipe.mesh, recipe.parallel, has_documents=has_documents)
    observers.add(StragglerWatch(recipe.reliability, mesh, peers, tell=observers.report))
    if recipe.metrics.profile_steps is not None:
        profiler = process_group.on_all("profile", lambda: make_profiler(recipe, stages, folder))
        if profiler is not None:
            observers.add(profiler)
    if recipe.metrics.timeline_steps is not None:
        timeline = process_group.on_all("timeline", lambda: make_timeline(recipe, stages, folder))
        if timeline is not None:
            observers.add(timeline)
    if recipe.reliability.digest_every:
        observers.add(ReplicaCheck(recipe, stages, optimizer, corpus, observers))


def _tell_start(recipe: Recipe, mesh: Mesh, metrics: Metrics, steps_done: int | None) -> None:
    """Write to the run's events that a job starts, where, and from which step."""
    axes = [f"{axis} {size}" for axis, size in asdict(recipe.mesh).items() if size > 1]
    ranks = "1 rank" if mesh.world_size == 1 else f"{mesh.world_size} ranks"
    layout = f"{ranks} ({', '.join(axes)})" if axes else ranks
    origin = "the beginning" if steps_done is None else f"a checkpoint of step {steps_done}"
    device = _device_name(mesh.device)
    metrics.event(
        steps_done or 0,
        "start",
        f"{layout} on {device or 'cpu'}, from {origin}; torch {torch.__version__}",
        device=device or "cpu",
    )


def _device_name(device: torch.device) -> str:
    """Return the name of a GPU; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _make_metrics(
    recipe: Recipe, stages: Stages, claim: Claim | None, *, start_step: int
) -> Metrics:
    mesh = stages.mesh
    row = hardware.find(_device_name(mesh.device))
    return Metrics(
        recipe.run.folder,
        recipe.metrics,
        total_steps=recipe.run.steps,
        tokens_per_step=recipe.data.global_batch * recipe.data.seq_len,
        world_size=mesh.world_size,
        flops_per_token=count_flops(recipe),
        peak_flops=hardware.peak_flops(row, recipe.precision.computes_in) if row else None,
        device_type=mesh.device.type,
        main=mesh.rank == 0,
        may_write=claim.is_held if claim is not None else None,
        start_step=start_step,
        further=partial(further_metrics, recipe, stages),
    )
