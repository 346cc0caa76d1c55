"""Training: ``build`` makes a ``Run`` of a recipe, ``run`` is the loop, top to bottom."""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer3d import dist as distributed
from composer3d import files, hardware, log
from composer3d.checkpoint import Store
from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.claim import Claim, read_note
from composer3d.convert.assets import assets_of
from composer3d.convert.start import load_hf
from composer3d.data import Batch, Corpus, Loader, open_corpus
from composer3d.data.loader import number_documents
from composer3d.errors import CheckpointError, TrainingError, UserError
from composer3d.mesh import Mesh
from composer3d.metrics import Metrics
from composer3d.models import Llama
from composer3d.optim import build_optimizer, learning_rate, set_lr
from composer3d.parallel import Stages, StepShape, clip, compose, kernels
from composer3d.parallel.cp import cut
from composer3d.parallel.plans import llama_plan
from composer3d.parallel.tiles import spans
from composer3d.planner import counts
from composer3d.recipe.changes import Change, changes, values_of
from composer3d.recipe.schema import CheckpointTable, Recipe
from composer3d.shape import IGNORE_INDEX


@dataclass
class Run:
    """One rank's whole run."""

    recipe: Recipe
    resolved_toml: str  # the recipe with the origin of each value
    claim: Claim | None  # on the run's folder, on rank 0; it ends with ``run``, or with the process
    stages: Stages
    optimizer: torch.optim.AdamW
    loader: Loader
    held_out: Corpus | None
    store: Store
    metrics: Metrics
    step: int  # optimizer steps that are done


def build(recipe: Recipe, device: torch.device, resolved_toml: str) -> Run:
    """Build the run on this rank, and resume it where the recipe says so. Collective over the default group.

    ``resolved_toml`` is kept in the run's folder and in its checkpoints.

    Raises:
        UserError: data or checkpoint do not fit the recipe, or another job has the run's folder.
    """
    mesh = Mesh.build(recipe.mesh, device)
    data = recipe.data
    folder = Path(recipe.run.out_dir) / recipe.run.name
    distributed.on_all("run.out_dir", lambda: _refuse_foreign_links(folder))
    claim = claim_folder(folder)
    corpus, held_out = distributed.on_all("data", lambda: open_data(recipe))
    distributed.check_same("the data", {"train": corpus.digest, "validation": held_out and held_out.digest})
    stages = build_stages(recipe, mesh)
    optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
    loader = make_loader(recipe, mesh, corpus, seed=data.seed)
    checkpoint = recipe.checkpoint
    store = Store(
        folder / "checkpoints",
        keep=checkpoint.keep,
        background=checkpoint.async_save,
        timeout_s=60 * checkpoint.timeout_minutes,
    )
    if claim is not None:
        store.guard = claim.check
    resumed = resume(recipe, store, stages, optimizer, loader)
    if resumed is None and recipe.model.hf is not None:
        load_hf(recipe.model.hf, stages)
    belongs = partial(assets_of, recipe, corpus.end_of_document, store.loaded)
    store.assets = distributed.on_all("assets", belongs if mesh.rank == 0 else dict)
    store.warm_up(stages, optimizer)
    # Not before: a recipe that cannot resume must not replace the one that made the run.
    keep_recipe = partial(write_recipe, folder, resolved_toml, step=resumed or 0)
    distributed.on_all("recipe.toml", keep_recipe if mesh.rank == 0 else lambda: None)
    if mesh.table.cp > 1 or data.packing != "none":
        queries = torch.empty(
            0, recipe.model.head_width, dtype=getattr(torch, recipe.precision.computes_in), device=device
        )
        how = f"{recipe.parallel.cp_method} over cp {mesh.table.cp}, {recipe.parallel.cp_balance}"
        log.get().info(f"attention: {how}; its kernel: {kernels.kernel_of(queries)}")
    row = hardware.find(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    measured = partial(
        Metrics,
        folder,
        recipe.metrics,
        total_steps=recipe.run.steps,
        tokens_per_step=data.global_batch * data.seq_len,
        world_size=mesh.world_size,
        flops_per_token=counts.flops_per_token(recipe.model, data.seq_len),
        peak_flops=hardware.peak_flops(row, recipe.precision.computes_in) if row else None,
        device_type=device.type,
        main=mesh.rank == 0,
        may_write=claim.is_held if claim is not None else lambda: True,
        start_step=resumed or 0,
    )
    metrics = distributed.on_all("metrics", measured)
    return Run(recipe, resolved_toml, claim, stages, optimizer, loader, held_out, store, metrics, step=resumed or 0)


def _refuse_foreign_links(folder: Path) -> None:
    for path in (folder, folder / "checkpoints"):
        try:
            files.refuse_foreign_link(path)
        except OSError as error:
            raise UserError(f"run.out_dir: {path} {error.strerror}") from None


def write_recipe(folder: Path, resolved_toml: str, *, step: int) -> None:
    """Write ``recipe.toml``. Where it replaces one with other values, keep that as ``recipe-STEP.toml``.

    ``step``: the steps that are done, which is how far the former recipe came. An earlier file of that name stays: it
    is the one that made those steps. Nothing is written through a link.
    """
    path = folder / "recipe.toml"
    if step:
        kept = folder / f"recipe-{step:08d}.toml"
        try:
            former = files.read_plain(path, limit=files.MIB, follow_links=False)
        except (FileNotFoundError, files.NotPlainFileError):
            former = resolved_toml.encode()
        if not _same_values(former, resolved_toml) and not os.path.lexists(kept):
            files.write_atomic(kept, former)
    files.write_atomic(path, resolved_toml)


def _same_values(former: bytes, resolved_toml: str) -> bool:
    try:
        return values_of(former.decode()) == values_of(resolved_toml)
    except ValueError:
        return False


def claim_folder(folder: Path) -> Claim | None:
    """Make the run's folder, claim it, and hold that every rank can read there what rank 0 writes. Collective.

    Rank 0 gets the claim.

    Raises:
        UserError: on every rank, where it cannot be written, another job has it, or the nodes do not share it.
    """
    main = dist.get_rank() == 0
    claim = distributed.on_all("run.out_dir", lambda: Claim(folder) if main else None)
    try:
        seen = read_note(folder)
    except OSError as error:
        seen = f"no note of the job ({error.strerror})"
    distributed.check_same(f"the folder {folder} (run.out_dir)", seen)
    return claim


def open_data(recipe: Recipe) -> tuple[Corpus, Corpus | None]:
    """The training text, and the held-out one where the recipe validates."""
    data, validation = recipe.data, recipe.validation
    part = partial(open_corpus, data.source, data.path, field=data.field)
    return part(split="train"), part(split="validation", held_out_path=validation.path) if validation.every else None


def build_stages(recipe: Recipe, mesh: Mesh) -> Stages:
    """This rank's part of the recipe's model."""
    data = recipe.data
    return compose(
        Llama(recipe.model, dtype=getattr(torch, recipe.precision.params)),
        llama_plan(recipe.model),
        mesh,
        parallel=recipe.parallel,
        memory=recipe.memory,
        precision=recipe.precision,
        compiling=recipe.compile,
        step=StepShape(micro_batch=data.micro_batch, micro_batches=recipe.micro_batches, seq_len=data.seq_len),
        seed=recipe.run.seed,
    )


def make_loader(recipe: Recipe, mesh: Mesh, corpus: Corpus, *, seed: int) -> Loader:
    """Of this rank's rows, the tokens that it holds."""
    cp, zigzag = recipe.mesh.cp, recipe.parallel.cp_balance == "zigzag"
    held = spans(mesh.at["cp"], cp, recipe.data.seq_len // cp, zigzag)
    return Loader(
        corpus,
        seq_len=recipe.data.seq_len,
        global_batch=recipe.data.global_batch,
        seed=seed,
        batch_rank=mesh.batch_rank,
        batch_ranks=mesh.batch_ranks,
        packing=recipe.data.packing,
        held=[(first, count) for _, first, count in held],
    )


def resume(recipe: Recipe, store: Store, stages: Stages, optimizer: torch.optim.AdamW, loader: Loader) -> int | None:
    """Load the run's newest whole checkpoint, or what ``checkpoint.resume`` seeds a new run with. Collective.

    What the recipe changes since the checkpoint was made goes to the log. Of a run's own checkpoint it may not change
    the seeds, the data or the model; what seeds a new run need not have its ``run.seed``.

    Returns:
        The number of steps done, 0 after a checkpoint of weights alone; None where there is nothing to load.

    Raises:
        CheckpointError: it is damaged or of another model, or the run is to start anew over checkpoints that it has.
        DataError: it was made with other data.
    """
    wanted, found = recipe.checkpoint.resume, store.find()
    # A path seeds a new run: started again, the run goes on from what it has done since.
    seed = None if wanted in ("auto", "none") else Path(wanted)
    back = seed is not None and seed.resolve().parent == store.folder.resolve()
    if found is not None and (wanted == "none" or (back and Path(wanted).name != found[0].name)):
        raise CheckpointError(
            f'checkpoint.resume = "{wanted}", but {store.folder} goes on from {found[0].name}; '
            f"give the run another run.name, or remove {'its checkpoints' if wanted == 'none' else 'what is newer'}"
        )
    if found is None and seed is not None:
        found = seed, store.check(seed)
    if found is None:
        log.get().info(f"no checkpoint in {store.folder}: starting anew")
        return None
    path, manifest = found
    lines = [
        f"{path} was made with {key} = {manifest.model.get(key)}, but the recipe says {value}"
        for key, value in model_of(recipe.model, recipe.precision.params).items()
        if manifest.model.get(key) != value
    ]
    if lines:
        raise CheckpointError([*lines, "a checkpoint goes on with the model it was made of; set it back"])
    changed = _changes_since(path, manifest, recipe)
    is_own = path.resolve().parent == store.folder.resolve()
    for change in changed:
        if change.key == "run.seed" and is_own:
            raise CheckpointError(
                f"{path} was made with run.seed = {change.then}, but the recipe says {change.now}: a run keeps its "
                "seed; set it back, or start anew under another run.name"
            )
    if manifest.data is not None:  # before anything is loaded: it refuses other data and another order of samples
        try:
            loader.load_state_dict(manifest.data)
        except KeyError as key:
            raise CheckpointError(f"{path}: the state of its loader has no {key}; it cannot be continued") from None
    store.load(path, stages, optimizer)
    if changed:
        shown = [f"  {change.key}: {change.then} -> {change.now}" for change in changed]
        log.get().info("\n".join([f"the recipe differs from that of {path}:", *shown]))
    if manifest.data is None:
        log.get().info(f"starting from the weights of {path}")
        return 0
    lr = learning_rate(manifest.step - 1, recipe.optim, recipe.run.steps)
    if manifest.lr is not None and lr != manifest.lr and stages.mesh.rank == 0:
        log.get().warning(
            f"step {manifest.step} was taken with a learning rate of {manifest.lr:.3g}, the recipe now gives it "
            f"{lr:.3g}: its schedule has changed (the decay ends at optim.decay, which is run.steps where it is absent)"
        )
    log.get().info(f"resumed from {path}: {manifest.step} of {recipe.run.steps} steps are done")
    return manifest.step


def _changes_since(path: Path, manifest: Manifest, recipe: Recipe) -> list[Change]:
    if not manifest.recipe:  # of weights that no run of ours has made
        return []
    try:
        return changes(manifest.recipe, recipe)
    except ValueError as error:
        raise CheckpointError(f"{path}: the recipe in its manifest cannot be read: {error}") from None


@dataclass
class Cadence:
    """When a checkpoint is due: every so many steps, or so many minutes after the last one, whichever is first."""

    table: CheckpointTable
    saved_at_s: float  # of ``time.monotonic``; at first that of the start

    def is_time(self) -> bool:
        """Whether the minutes are over, by this process's clock: one rank asks, and the others learn it from that."""
        minutes = self.table.every_minutes
        return minutes > 0 and time.monotonic() - self.saved_at_s >= 60 * minutes

    def is_step(self, step: int) -> bool:
        return self.table.every > 0 and step % self.table.every == 0

    def saved(self) -> None:
        self.saved_at_s = time.monotonic()


def run(run: Run) -> int:
    """Train to the last step, or until a signal asks to stop; either way the last step is saved.

    Returns:
        0, or the number of the signal.
    """
    total = run.recipe.run.steps
    if run.step >= total:
        log.get().info(f"nothing to do: {run.step} of {total} steps are done; raise run.steps to train on")
    try:
        with stop_signals() as stops:
            stopped = _loop(run, total, stops)
            with run.metrics.timer("checkpoint"):
                run.store.wait()
    finally:
        run.metrics.close()
    if run.claim is not None:
        run.claim.close()
    return stopped


def _loop(run: Run, total: int, stops: list[int]) -> int:
    recipe, mesh, metrics = run.recipe, run.stages.mesh, run.metrics
    cadence = Cadence(recipe.checkpoint, time.monotonic())
    while run.step < total:
        # Whatever draws random numbers draws those of the step, on any layout and after any resume.
        torch.manual_seed((recipe.run.seed << 32) + run.step & 2**63 - 1)
        with metrics.timer("data"):
            batch = next(run.loader)
        lr = learning_rate(run.step, recipe.optim, total)
        loss, norm = compute_gradients(run.stages, batch)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # Both are sums over the whole job: every rank comes to the same verdict.
            raise TrainingError(
                f"step {run.step + 1}: loss {loss}, gradient norm {norm} are not finite; the newest checkpoint is "
                f"{run.store.newest() or 'none'}; lower optim.lr, lengthen optim.warmup or set optim.clip, and start "
                "again"
            )
        update(run.stages, run.optimizer, norm=norm, max_norm=recipe.optim.clip, lr=lr)
        run.step += 1
        metrics.step(run.step, loss=loss, grad_norm=norm, lr=lr, more=partial(_balance, recipe, batch))
        # Clocks differ, and a save is collective: rank 0's decides.
        is_time = mesh.rank == 0 and cadence.is_time()
        seen = mesh.max_over_world(stops[0] if stops else 0, run.store.failed, is_time)
        stopping, failed, due = map(int, seen)
        if failed:
            run.store.wait()
        last = run.step == total
        # Saved before validation: a validation that fails, or that a signal leaves no time for, must lose nothing.
        if last or stopping or due or cadence.is_step(run.step):
            with metrics.timer("checkpoint"):
                run.store.save(_manifest(run, lr), run.stages, run.optimizer)
            cadence.saved()
        if stopping and not last:
            log.get().info(f"stopped by signal {stopping} after step {run.step}; the same command goes on from there")
            return stopping
        if run.held_out is not None and (last or run.step % recipe.validation.every == 0):
            with metrics.timer("validation"):
                validation_loss = validate(recipe, run.stages, run.held_out)
            metrics.validation(run.step, validation_loss)
    return 0


def _balance(recipe: Recipe, batch: Batch) -> dict[str, float]:
    """Scores of the busiest rank of cp over their mean, with documents; where heads are cut it is 1, and not said."""
    cp, how, documents_BT = recipe.mesh.cp, recipe.parallel, batch.documents_BT
    if cp == 1 or documents_BT is None or how.cp_method == "ulysses":
        return {}
    _, before_BT = number_documents(documents_BT != documents_BT.roll(-1, 1))
    seen_BT = (before_BT + 1).clamp(1, recipe.model.window or None)
    scores = cut(seen_BT, 1, cp, how.cp_balance == "zigzag").sum((1, 2))
    return {"cp_balance": (scores.max() * cp / scores.sum()).item()}


def _manifest(run: Run, lr: float) -> Manifest:
    recipe = run.recipe
    return Manifest(
        step=run.step,
        world_size=recipe.world_size,
        layout=asdict(recipe.mesh),
        model=model_of(recipe.model, recipe.precision.params),
        recipe=run.resolved_toml,
        data=run.loader.state_dict(),
        lr=lr,
    )


def compute_gradients(stages: Stages, batch: Batch) -> tuple[float, float]:
    """Leave one step's gradients in ``.grad``; return the job's loss (mean over valid tokens) and gradient norm."""
    mesh = stages.mesh
    tokens, labels, positions, documents, valid = take(stages, batch)
    (valid_tokens,) = mesh.sum_over_world(valid)
    share = stages.forward_backward(tokens, labels, positions, max(valid_tokens, 1.0), documents)
    loss, square = mesh.sum_over_world(share, clip.square_share(stages.parameters(), mesh))
    return loss, math.sqrt(square) if square >= 0 else math.nan


def update(stages: Stages, optimizer: torch.optim.Optimizer, *, norm: float, max_norm: float, lr: float) -> None:
    """Clip the gradients to ``max_norm`` and take the optimizer's step."""
    clip.scale_gradients(stages.parameters(), norm=norm, max_norm=max_norm)
    set_lr(optimizer, lr)
    optimizer.step()


def validate(recipe: Recipe, stages: Stages, held_out: Corpus) -> float:
    """Mean loss over the valid tokens of ``validation.steps`` global batches of the held-out text.

    They are drawn from all of it, and are the same at every validation of every run.
    """
    loader = make_loader(recipe, stages.mesh, held_out, seed=0)
    parts = [evaluate_batch(stages, next(loader)) for _ in range(recipe.validation.steps)]
    loss, tokens = stages.mesh.sum_over_world(*map(sum, zip(*parts, strict=True)))
    return loss / max(tokens, 1.0)


def evaluate_batch(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor]:
    """This rank's shares of the summed loss and of the valid tokens of one batch."""
    tokens, labels, positions, documents, valid = take(stages, batch)
    return stages.evaluate(tokens, labels, positions, documents), valid


def take(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """A batch on this rank's device, but for its documents, and this rank's share of the valid tokens."""
    tokens, labels, positions = (part.to(stages.mesh.device, non_blocking=True) for part in batch[:3])
    valid = (labels != IGNORE_INDEX).sum()
    return tokens, labels, positions, batch.documents_BT, valid if stages.counts_loss else torch.zeros_like(valid)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The SIGTERM and SIGINT that came, for the loop to end between two steps; one that insists ends the process.

    A terminal's Ctrl-C reaches a rank twice, by itself and through the launcher: only a later one insists.
    """
    came: list[int] = []
    first_s = 0.0

    def receive(number: int, frame: Any) -> None:
        nonlocal first_s
        came.append(number)
        if len(came) == 1:
            first_s = time.monotonic()
            log.get().info(f"signal {number}: ending this step; again in 5 s or later to end at once")
        elif time.monotonic() - first_s > 5.0:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
