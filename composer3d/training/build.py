"""Build a ``Run`` from a recipe: one rank's model, optimizer, data, checkpoints and metrics."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import composer3d
from composer3d.checkpoint import Store
from composer3d.convert.assets import make_assets
from composer3d.convert.start import load_hf
from composer3d.data import BatchesAhead, Corpus, Loader
from composer3d.models.registry import architecture, resolve
from composer3d.parallel import ShardingPlan, Stages, StepShape, compose
from composer3d.parallel.compose import Materialise
from composer3d.parallel.context import kernels
from composer3d.parallel.freeze import freeze_others
from composer3d.parallel.stages import Stage
from composer3d.recipe.advice import way_to_go_on
from composer3d.recipe.schema import Recipe
from composer3d.reliability.bad_steps import Ledger, StepHistory
from composer3d.reliability.lock import Claim
from composer3d.reliability.stragglers import StragglerWatch, peer_groups
from composer3d.runtime import log, process_group
from composer3d.runtime.agreement import check_agreement
from composer3d.runtime.exchanges import check_exchanges, collectives_of_training, groups_of
from composer3d.runtime.mesh import Mesh
from composer3d.spec import hardware
from composer3d.training.batches import make_loader, open_data
from composer3d.training.metrics import Metrics
from composer3d.training.optim import build_optimizer
from composer3d.training.profiling import Profiler, make_profiler
from composer3d.training.replicas import ReplicaCheck
from composer3d.training.resume import resume
from composer3d.training.run_folder import claim_folder, write_recipe
from composer3d.training.timeline import TimelineWriter, make_timeline


@dataclass
class Run:
    """Everything that one rank trains with.

    Attributes:
        resolved_toml: the recipe as text, with the origin of each value.
        claim: the lock on the run's folder, until the end of ``train`` or of the process. None on
            all ranks but 0.
        held_out: the validation data; None without validation.
        timeline: traces steps; None if this rank traces none.
        profiler: profiles steps; None if this rank profiles none.
        stragglers: measures this rank, and names slow ones.
        replicas: compares replicas; None if the recipe does not want it.
        history: decides from the steps before which loss or norm is a spike.
        ledger: lists the bad steps whose batches this run leaves out.
        step: the number of optimizer steps done.
    """

    recipe: Recipe
    resolved_toml: str
    claim: Claim | None
    stages: Stages
    optimizer: torch.optim.AdamW
    loader: BatchesAhead
    epochs_begun: Callable[[int], list[tuple[str, int]]]  # as in Loader
    held_out: Corpus | None
    store: Store
    metrics: Metrics
    timeline: TimelineWriter | None
    profiler: Profiler | None
    stragglers: StragglerWatch
    replicas: ReplicaCheck | None
    history: StepHistory
    ledger: Ledger
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
            or the recipe or the software differs between ranks.
        ExchangeError: a group has wrong ranks, or a collective of an axis gives wrong values.
    """
    with log.phase("checks of ranks and groups"):
        check_agreement(recipe)
        mesh = Mesh.build(recipe.mesh, device)
        groups = groups_of(mesh, has_experts=recipe.model.experts > 0)
        check_exchanges(mesh, groups, lambda axis: collectives_of_training(axis, recipe.parallel))
    is_main = mesh.rank == 0
    folder = Path(recipe.run.out_dir) / recipe.run.name
    claim = claim_folder(folder, claimed)
    if claim is not None:
        log.keep_in(folder / log.FILE, claim.is_held)
        versions = f"composer3d {composer3d.__version__}, torch {torch.__version__}"
        log.keep([f"{versions}, {mesh.world_size} ranks on {device.type}"])

    with log.phase("data"):
        corpus, held_out = process_group.on_all("data", lambda: open_data(recipe))
        digests = {"train": corpus.digest, "validation": held_out and held_out.digest}
        process_group.check_same("the data", digests)
        loader = BatchesAhead(make_loader(recipe, mesh, corpus, seed=recipe.data.seed), device)

    with log.phase("model"):
        stages = build_stages(recipe, mesh)
        optimizer = build_optimizer(stages.named_parameters(), recipe.optim)

    store = Store(
        folder / "checkpoints",
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
        if steps_done is None and recipe.model.hf is not None:
            load_hf(recipe.model.hf, stages)
    find_assets = partial(make_assets, recipe, corpus.end_of_document, store.loaded)
    store.assets = process_group.on_all("assets", find_assets if is_main else dict)
    store.warm_up(stages, optimizer)

    # Written only after resuming: a recipe that cannot resume must not replace the run's recipe.
    keep_recipe = partial(write_recipe, folder, resolved_toml, steps_done=steps_done or 0)
    process_group.on_all("recipe.toml", keep_recipe if is_main else lambda: None)
    ledger = _open_ledger(folder, claim, steps_done=steps_done or 0)
    _log_attention(recipe, device)
    _log_epochs(recipe, loader.loader)
    metrics = process_group.on_all(
        "metrics", lambda: _make_metrics(recipe, mesh, folder, claim, start_step=steps_done or 0)
    )
    _tell_start(recipe, mesh, metrics, steps_done)
    timeline = None
    if recipe.metrics.timeline_steps is not None:
        timeline = process_group.on_all("timeline", lambda: make_timeline(recipe, stages, folder))
    profiler = None
    if recipe.metrics.profile_steps is not None:
        profiler = process_group.on_all(
            "profile", lambda: make_profiler(recipe, stages, groups, folder)
        )
    has_documents = recipe.data.packing != "none"
    peers = peer_groups(recipe.mesh, recipe.parallel, has_documents=has_documents)
    log.say_phases()
    return Run(
        recipe=recipe,
        resolved_toml=resolved_toml,
        claim=claim,
        stages=stages,
        optimizer=optimizer,
        loader=loader,
        epochs_begun=loader.loader.epochs_begun,
        held_out=held_out,
        store=store,
        metrics=metrics,
        timeline=timeline,
        profiler=profiler,
        stragglers=StragglerWatch(recipe.reliability, mesh, peers),
        replicas=ReplicaCheck(recipe, stages, optimizer, corpus)
        if recipe.reliability.digest_every
        else None,
        history=history,
        ledger=ledger,
        step=steps_done or 0,
    )


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
    model = model_of.build(shape, dtype=getattr(torch, recipe.precision.params), device="meta")
    if recipe.optim.train is not None:
        freeze_others(model, recipe.optim.train)
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


def _log_attention(recipe: Recipe, device: torch.device) -> None:
    """Log the kernel of attention if sequences are cut over cp, or queries do not see all keys."""
    description = describe_attention(recipe, device)
    if description is not None:
        log.get().info(f"attention: {description}")


def _log_epochs(recipe: Recipe, loader: Loader) -> None:
    """Log how often the whole run sees each part of the training data."""
    for seen in loader.epochs_in(recipe.run.steps):
        line = f"data: {seen.name} has {seen.n_samples:,} samples of {recipe.data.seq_len} tokens"
        if seen.filled is not None:
            line += f", of which documents fill {seen.filled:.1%}"
        if seen.n_cut:
            line += f"; documents that are longer than a sample, and cut: {seen.n_cut:,}"
        log.get().info(f"{line}; {recipe.run.steps:,} steps see it {seen.epochs:.2f} times")


def describe_attention(recipe: Recipe, device: torch.device) -> str | None:
    """Return how attention is computed, or None if torch computes it on whole sequences.

    The kernel that is named computes the blocks in which each query sees all keys before it.
    """
    cp, parallel = recipe.mesh.cp, recipe.parallel
    window = getattr(recipe.model, "window", 0)  # a user's shape may lack it
    sees_all = recipe.data.packing == "none" and not 0 < window < recipe.data.seq_len
    if cp == 1 and sees_all:
        return None
    if cp == 1:
        place = "whole sequences"
    else:
        place = f"{parallel.cp_method} over cp {cp}, {parallel.cp_balance}"
    if parallel.cp_method == "ulysses" and sees_all:
        return f"{place}; its kernel: scaled_dot_product_attention of torch"
    dtype = getattr(torch, recipe.precision.computes_in)
    queries = torch.empty(0, recipe.model.head_width, dtype=dtype, device=device)
    return f"{place}; its kernel: {kernels.kernel_of(queries).value}"


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
    recipe: Recipe, mesh: Mesh, folder: Path, claim: Claim | None, *, start_step: int
) -> Metrics:
    row = hardware.find(_device_name(mesh.device))
    model_of = architecture(recipe.model.architecture)
    return Metrics(
        folder,
        recipe.metrics,
        total_steps=recipe.run.steps,
        tokens_per_step=recipe.data.global_batch * recipe.data.seq_len,
        world_size=mesh.world_size,
        flops_per_token=model_of.count_flops(recipe.model, recipe.data.seq_len),
        peak_flops=hardware.peak_flops(row, recipe.precision.computes_in) if row else None,
        device_type=mesh.device.type,
        main=mesh.rank == 0,
        may_write=claim.is_held if claim is not None else None,
        start_step=start_step,
    )
