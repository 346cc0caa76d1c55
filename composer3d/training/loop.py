"""The training loop, in the order in which a step happens."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch

from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.data import Batch
from composer3d.data.loader import number_documents
from composer3d.parallel import Stages
from composer3d.parallel.context.ownership import parts_of_all_ranks
from composer3d.parallel.expert.balance import RouterLoad
from composer3d.recipe.advice import way_to_go_on
from composer3d.recipe.schema import CheckpointTable, Recipe
from composer3d.reliability.report import RankReport
from composer3d.reliability.signals import STOP_SIGNALS, stop_signals
from composer3d.runtime import log
from composer3d.spec.errors import TrainingError
from composer3d.training.build import Run
from composer3d.training.optim import learning_rate
from composer3d.training.step import compute_gradients, update, validate

# How many flags travel with the loss of a step: one for each signal, a failed save, and the clock.
FLAGS = len(STOP_SIGNALS) + 2


def train(run: Run) -> int:
    """Train to the last step, or until a signal asks to stop. The last step done is saved.

    Collective over all ranks.

    Returns:
        0, or the number of the signal.

    Raises:
        TrainingError: a loss or a gradient is not finite, or the run's folder was removed or
            replaced.
        CheckpointError: a checkpoint could not be saved.
    """
    total_steps = run.recipe.run.steps
    if run.step >= total_steps:
        log.get().info(
            f"nothing to do: {run.step} of {total_steps} steps are done; raise run.steps to train "
            "on"
        )
    try:
        with stop_signals() as signals, run.stragglers.watching():
            stopped_by = _loop(run, total_steps, signals)
            _report(run, run.stragglers.finish())
            with run.metrics.timer("checkpoint"):
                run.store.wait()
    finally:
        run.loader.close()
        run.metrics.close()
    if run.claim is not None:
        run.claim.close()
    return stopped_by


def _loop(run: Run, total_steps: int, signals: list[int]) -> int:
    recipe, stages, metrics = run.recipe, run.stages, run.metrics
    mesh = stages.mesh
    cadence = Cadence(recipe.checkpoint, time.monotonic())

    def flags() -> list[float]:  # as many as FLAGS
        # A save is collective, so all ranks must agree on it. But their clocks differ, and a signal
        # may reach only one rank.
        return [
            *(signals[:1] == [number] for number in STOP_SIGNALS),
            run.store.failed,
            mesh.rank == 0 and cadence.is_time(),
        ]

    while run.step < total_steps:
        # Seeded by the number of the step, random numbers are the same on all layouts and after a
        # resume. Only 63 bits of the seed are kept.
        torch.manual_seed(((recipe.run.seed << 32) + run.step) & (2**63 - 1))

        run.stragglers.begin_step()
        with metrics.timer("data"):
            batch = next(run.loader)

        with nullcontext() if run.timeline is None else run.timeline.step(run.step + 1):
            sums = compute_gradients(stages, batch, flags)

        lr = learning_rate(run.step, recipe.optim, total_steps)
        values = update(stages, run.optimizer, sums, max_norm=recipe.optim.clip, lr=lr)
        straggler_report = run.stragglers.end_step()
        loss, norm = values.loss, values.norm
        if not (math.isfinite(loss) and math.isfinite(norm)):
            # Both values come from sums over all ranks, so all ranks take this branch or none does.
            # The update has changed nothing.
            raise TrainingError(_not_finite(run, loss, norm))
        *ranks_with_signal, save_failed, time_is_up = values.flags
        received = zip(STOP_SIGNALS, ranks_with_signal, strict=True)
        signal_seen = next((number for number, ranks in received if ranks), 0)
        run.step += 1
        is_last = run.step == total_steps

        metrics.step(
            run.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            extra=partial(_further_metrics, recipe, batch, stages),
        )
        _report(run, straggler_report)
        if run.replicas is not None and run.step % recipe.reliability.digest_every == 0:
            with metrics.timer("replicas"):
                _report(run, run.replicas.check(run.step))

        if save_failed:
            # This raises the error of the save.
            run.store.wait()

        # Save before validation, so that a validation that fails or is cut off loses no step.
        if is_last or signal_seen or time_is_up or cadence.is_step(run.step):
            with metrics.timer("checkpoint"):
                run.store.save(_manifest(run, lr), stages, run.optimizer)
            cadence.saved()

        if signal_seen and not is_last:
            log.get().info(
                f"stopped by signal {signal_seen} after step {run.step}; "
                f"{way_to_go_on(recipe)} from there"
            )
            return signal_seen

        if run.held_out is not None and (is_last or run.step % recipe.validation.every == 0):
            with metrics.timer("validation"):
                order = run.loader.order
                validation_loss = validate(recipe, stages, run.held_out, order=order)
            metrics.validation(run.step, validation_loss)
    return 0


def _report(run: Run, report: RankReport | None) -> None:
    if report is not None:
        run.metrics.report(run.step, report.lines, report.values)


@dataclass
class Cadence:
    """The times at which checkpoints are due, by steps and by minutes.

    Attributes:
        table: the recipe's ``[checkpoint]``.
        saved_at_s: ``time.monotonic()`` at the last save, or at the start.
    """

    table: CheckpointTable
    saved_at_s: float

    def is_time(self) -> bool:
        """Return whether ``every_minutes`` have passed since the last save (local clock)."""
        minutes = self.table.every_minutes
        return minutes > 0 and time.monotonic() - self.saved_at_s >= 60 * minutes

    def is_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after step ``step``: a multiple of ``every``."""
        return self.table.every > 0 and step % self.table.every == 0

    def saved(self) -> None:
        """Count the minutes from now on."""
        self.saved_at_s = time.monotonic()


def _further_metrics(recipe: Recipe, batch: Batch, stages: Stages) -> dict[str, float]:
    tokens = recipe.data.global_batch * recipe.data.seq_len
    return {**cp_imbalance(recipe, batch), **expert_metrics(stages.router_loads, tokens)}


def expert_metrics(loads: Mapping[str, RouterLoad], tokens: int) -> dict[str, float]:
    """Describe how the routers of a model spread a step of ``tokens`` tokens over experts.

    Returns:
        Empty without experts. Otherwise:

        - ``expert_load``: the tokens of the busiest expert of a layer over the mean of its experts,
          1 at best, the mean over layers; ``expert_load/blocks.3`` for each layer.
        - ``dropped_tokens``: the choices that tokens should have, minus those that routers counted.
          It is always 0, because there is no capacity.
        - ``router_entropy``: nats, the mean over tokens and layers; also for each layer.
        - ``balance_loss`` and ``z_loss``: what they add to the loss, summed over layers.
        - ``router_bias``: the largest bias minus the smallest, for each layer that has them.
    """
    if not loads:
        return {}
    metrics: dict[str, float] = {}
    shares = {name: load.tokens_E.max() / load.tokens_E.mean() for name, load in loads.items()}
    metrics["expert_load"] = torch.stack(list(shares.values())).mean().item()
    metrics["dropped_tokens"] = sum(
        load.per_token * tokens - load.tokens_E.sum().item() for load in loads.values()
    )
    metrics["router_entropy"] = sum(load.entropy for load in loads.values()) / (tokens * len(loads))
    metrics["balance_loss"] = sum(load.balance_loss for load in loads.values())
    metrics["z_loss"] = sum(load.z_loss for load in loads.values())
    for name, load in loads.items():
        layer = name.removesuffix(".moe.router")
        metrics[f"expert_load/{layer}"] = shares[name].item()
        metrics[f"router_entropy/{layer}"] = load.entropy / tokens
        if load.bias_high > load.bias_low:
            metrics[f"router_bias/{layer}"] = load.bias_high - load.bias_low
    return metrics


def cp_imbalance(recipe: Recipe, batch: Batch) -> dict[str, float]:
    """Measure how unevenly packed documents spread attention over context parallel ranks.

    No collective: only the rows of ``batch``, which are those of this rank, are counted.

    Returns:
        ``cp_balance``: the number of attention scores of the busiest rank, divided by the mean over
        the ranks; 1 at best. Empty without cp, without documents, and for Ulysses, where every rank
        has the same work.
    """
    cp, parallel, documents_BT = recipe.mesh.cp, recipe.parallel, batch.documents_BT
    if cp == 1 or documents_BT is None or parallel.cp_method == "ulysses":
        return {}
    _, position_BT = number_documents(documents_BT != documents_BT.roll(-1, 1))
    visible_keys_BT = (position_BT + 1).clamp(1, recipe.model.window or None)
    is_balanced = parallel.cp_balance == "zigzag"
    scores = parts_of_all_ranks(visible_keys_BT, 1, cp, is_balanced).sum((1, 2))
    return {"cp_balance": (scores.max() * cp / scores.sum()).item()}


def _not_finite(run: Run, loss: float, norm: float) -> str:
    return (
        f"step {run.step + 1}: loss {loss}, gradient norm {norm} are not finite; the newest "
        f"checkpoint is {run.store.newest() or 'none'}; lower optim.lr, lengthen optim.warmup or "
        "set optim.clip, and start again"
    )


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
