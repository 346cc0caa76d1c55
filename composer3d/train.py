"""Training: ``build`` makes a ``Run`` of a recipe, ``run`` is the loop, top to bottom."""

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer3d import dist as distributed
from composer3d import hardware, log
from composer3d.checkpoint import Store
from composer3d.data import Batch, Corpus, Loader, open_corpus
from composer3d.errors import CheckpointError, TrainingError
from composer3d.mesh import Mesh
from composer3d.metrics import Metrics
from composer3d.models import Llama
from composer3d.optim import build_optimizer, learning_rate, set_lr
from composer3d.parallel import Stages, StepShape, clip, compose
from composer3d.parallel.plans import llama_plan
from composer3d.planner import counts
from composer3d.recipe.schema import Recipe
from composer3d.shape import IGNORE_INDEX


@dataclass(kw_only=True)
class Run:
    """One rank's whole run. ``step`` is the number of optimizer steps that are done."""

    recipe: Recipe
    mesh: Mesh
    stages: Stages
    optimizer: torch.optim.AdamW
    loader: Loader
    held_out: Corpus | None
    store: Store
    metrics: Metrics
    step: int


def build(recipe: Recipe, device: torch.device, resolved_toml: str = "") -> Run:
    """Build the run on this rank, and resume it where the recipe says so. Collective over the default group.

    Args:
        resolved_toml: the recipe with the origin of each value, kept in the run's folder.

    Raises:
        UserError: data or checkpoint do not fit the recipe.
    """
    mesh = Mesh.build(recipe.mesh, device)
    data = recipe.data
    corpus = open_corpus(data.source, data.path, split="train")
    held_out = None
    if recipe.validation.every:
        held_out = open_corpus(data.source, data.path, split="validation", held_out_path=recipe.validation.path)
    distributed.check_same("the data", {"train": corpus.digest, "validation": held_out and held_out.digest})
    stages = build_stages(recipe, mesh)
    optimizer = build_optimizer(stages.named_parameters(), recipe.optim)
    loader = make_loader(recipe, mesh, corpus, seed=data.seed)
    folder = Path(recipe.run.out_dir) / recipe.run.name
    store = Store(folder / "checkpoints", keep=recipe.checkpoint.keep)
    step = resume(recipe, store, stages, optimizer, loader)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    row = hardware.find(name)
    metrics = Metrics(
        folder,
        recipe.metrics,
        total_steps=recipe.run.steps,
        tokens_per_step=data.global_batch * data.seq_len,
        world_size=mesh.world_size,
        flops_per_token=counts.flops_per_token(recipe.model, data.seq_len),
        peak_flops=hardware.peak_flops(row, recipe.precision.params) if row else None,
        device_type=device.type,
        main=mesh.rank == 0,
        start_step=step,
    )
    if mesh.rank == 0 and resolved_toml:
        (folder / "recipe.toml").write_text(resolved_toml)
    return Run(
        recipe=recipe,
        mesh=mesh,
        stages=stages,
        optimizer=optimizer,
        loader=loader,
        held_out=held_out,
        store=store,
        metrics=metrics,
        step=step,
    )


def build_stages(recipe: Recipe, mesh: Mesh) -> Stages:
    """This rank's part of the recipe's model."""
    model = Llama(recipe.model, dtype=getattr(torch, recipe.precision.params))
    step = StepShape(
        micro_batch=recipe.data.micro_batch, micro_batches=recipe.micro_batches, seq_len=recipe.data.seq_len
    )
    return compose(model, llama_plan(recipe.model), mesh, parallel=recipe.parallel, step=step, seed=recipe.run.seed)


def make_loader(recipe: Recipe, mesh: Mesh, corpus: Corpus, *, seed: int) -> Loader:
    return Loader(
        corpus,
        seq_len=recipe.data.seq_len,
        global_batch=recipe.data.global_batch,
        seed=seed,
        batch_rank=mesh.batch_rank,
        batch_ranks=mesh.batch_ranks,
    )


def resume(recipe: Recipe, store: Store, stages: Stages, optimizer: torch.optim.AdamW, loader: Loader) -> int:
    """Load what ``checkpoint.resume`` names and return the number of steps done; 0 for a new run."""
    wanted = recipe.checkpoint.resume
    newest = store.newest()
    if wanted == "none" and newest is not None:
        raise CheckpointError(
            f'checkpoint.resume = "none" starts anew, but {store.folder} holds {newest.name}; '
            "give the run another run.name, or remove the folder"
        )
    path = newest if wanted in ("auto", "none") else Path(wanted)
    distributed.check_same("the newest checkpoint", str(path))
    if path is None:
        return 0
    progress = store.load(path, stages, optimizer)
    loader.load_state_dict(progress["data"])
    step: int = progress["step"]
    log.get().info(f"resumed from {path}: {step} of {recipe.run.steps} steps are done")
    return step


def run(run: Run) -> int:
    """Train to the last step, or until a signal asks to stop; either way the last step is saved.

    Returns:
        0, or the number of the signal.
    """
    recipe, mesh, metrics = run.recipe, run.mesh, run.metrics
    total = recipe.run.steps
    if run.step >= total:
        log.get().info(f"nothing to do: {run.step} of {total} steps are done; raise run.steps to train on")
    stop = StopSignal()
    while run.step < total:
        with metrics.timer("data"):
            batch = next(run.loader)
        lr = learning_rate(run.step, recipe.optim, total)
        loss, norm = compute_gradients(run.stages, batch)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # Both are sums over the whole job: every rank comes to the same verdict.
            raise TrainingError(
                f"step {run.step + 1}: loss {loss}, gradient norm {norm} are not finite; the weights of step "
                f"{run.step} were not touched; lower optim.lr or lengthen optim.warmup, and start again from the last "
                "checkpoint"
            )
        update(run.stages, run.optimizer, norm=norm, max_norm=recipe.optim.clip, lr=lr)
        run.step += 1
        metrics.step(run.step, loss=loss, grad_norm=norm, lr=lr)
        stopping = int(mesh.max_over_world(stop.number))
        if run.held_out is not None and (run.step % recipe.validation.every == 0 or run.step == total):
            with metrics.timer("validation"):
                validation_loss = validate(run, run.held_out)
            metrics.validation(run.step, validation_loss)
        every = recipe.checkpoint.every
        if (every and run.step % every == 0) or run.step == total or stopping:
            with metrics.timer("checkpoint"):
                path = run.store.save(run.step, run.stages, run.optimizer, {"data": run.loader.state_dict()})
            log.get().info(f"saved {path}")
        if stopping and run.step < total:
            log.get().info(f"stopped by signal {stopping} after step {run.step}; the same command goes on from there")
            break
    else:
        stopping = 0
    metrics.close()
    return stopping


def compute_gradients(stages: Stages, batch: Batch) -> tuple[float, float]:
    """Leave one step's gradients in ``.grad``; return the job's loss (mean over valid tokens) and gradient norm."""
    mesh = stages.mesh
    tokens, labels, positions = (
        part.to(mesh.device, non_blocking=True) for part in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)
    )
    valid = (labels != IGNORE_INDEX).sum()
    (valid_tokens,) = mesh.sum_over_world(valid if stages.counts_loss else torch.zeros_like(valid))
    share = stages.forward_backward(tokens, labels, positions, max(valid_tokens, 1.0))
    loss, square = mesh.sum_over_world(share, clip.square_share(stages.parameters(), mesh))
    return loss, math.sqrt(square) if square >= 0 else math.nan


def update(stages: Stages, optimizer: torch.optim.Optimizer, *, norm: float, max_norm: float, lr: float) -> None:
    """Clip the gradients to ``max_norm`` and take the optimizer's step."""
    clip.scale_gradients(stages.parameters(), norm=norm, max_norm=max_norm)
    set_lr(optimizer, lr)
    optimizer.step()


def validate(run: Run, held_out: Corpus) -> float:
    """Mean loss over the valid tokens of ``validation.steps`` global batches of the held-out text.

    They are drawn from all of it, and are the same at every validation of every run.
    """
    loader = make_loader(run.recipe, run.mesh, held_out, seed=0)
    sums: list[Tensor] = [torch.zeros((), dtype=torch.float64, device=run.mesh.device)] * 2
    for _ in range(run.recipe.validation.steps):
        share, valid = evaluate_batch(run.stages, next(loader))
        sums = [sums[0] + share, sums[1] + valid]
    loss, tokens = run.mesh.sum_over_world(*sums)
    return loss / tokens


def evaluate_batch(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor]:
    """This rank's shares of the summed loss and of the valid tokens of one batch."""
    device = stages.mesh.device
    tokens, labels, positions = (part.to(device) for part in (batch.tokens_BT, batch.labels_BT, batch.positions_BT))
    valid = (labels != IGNORE_INDEX).sum()
    return stages.evaluate(tokens, labels, positions), valid if stages.counts_loss else torch.zeros_like(valid)


class StopSignal:
    """Remembers SIGTERM and SIGINT, so that the loop can end between two steps."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.number = number
