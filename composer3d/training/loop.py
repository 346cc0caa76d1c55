"""The training loop, in the order in which a step happens."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch

from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.data import Batch
from composer3d.data.loader import number_documents
from composer3d.parallel import Stages
from composer3d.parallel.context.ownership import parts_of_all_ranks
from composer3d.parallel.expert.balance import RouterLoad
from composer3d.recipe.advice import nothing_to_do, way_to_go_on
from composer3d.recipe.schema import CheckpointTable, Recipe
from composer3d.reliability.bad_steps import BadStep
from composer3d.reliability.report import RankReport
from composer3d.reliability.signals import STOP_SIGNALS, StopSignals, stop_signals
from composer3d.runtime import collector, log, process_group
from composer3d.spec.errors import DataError, TrainingError, UserError
from composer3d.training.build import Run
from composer3d.training.optim import learning_rate
from composer3d.training.owed import METRICS, owes_validation
from composer3d.training.step import compute_gradients, update, validate

# How many flags travel with the loss of a step: one for each signal, a failed save, and the clock.
FLAGS = len(STOP_SIGNALS) + 2

# Characters of the reason of a failure in the run's events.
_REASON_LIMIT = 1000


def train(run: Run) -> int:
    """Train to the last step, or until a signal asks to stop. The last step done is saved.

    Collective over all ranks.

    Returns:
        0, or the number of the signal.

    Raises:
        TrainingError: a step is bad and ``reliability.on_bad_step`` does not go on after it, or the
            run's folder was removed or replaced, or a file that the run needs cannot be written.
        SaveError: a checkpoint could not be saved.
    """
    with stop_signals() as signals:
        return _train(run, signals)


def _train(run: Run, signals: StopSignals) -> int:
    total_steps, first_step = run.recipe.run.steps, run.step
    owes = process_group.on_main("metrics", lambda: _owes_validation(run))
    if run.step >= total_steps and not owes:
        log.get().info(nothing_to_do(run.recipe, run.step))
    collector.set_aside()
    try:
        with run.stragglers.watching():
            if owes:
                # A signal ends the process at once: nothing is lost, and the next start does it.
                log.get().info(f"the validation after step {run.step} was cut off: it is done now")
                _validate(run, signals)
            stopped_by = _loop(run, total_steps, signals)
            _report(run, run.stragglers.finish())
            with run.metrics.timer("checkpoint"):
                run.store.wait()
            if run.step == total_steps and (owes or run.step > first_step):
                run.metrics.event(run.step, "end", f"all {total_steps} steps are done")
    except Exception as error:
        run.metrics.event(run.step, "stop", _reason(error))
        # Whatever fails now is no wrong recipe. Data that has changed since the start is.
        if (
            isinstance(error, UserError)
            and error.status == UserError.status
            and not isinstance(error, DataError)
        ):
            raise TrainingError(error.lines) from error
        raise
    finally:
        if run.profiler is not None:
            run.profiler.close()
        run.loader.close()
        run.metrics.close()
    if run.claim is not None:
        run.claim.close()
    return stopped_by


def _reason(error: Exception) -> str:
    """Return why a training has failed, in one line."""
    if isinstance(error, UserError):
        return " ".join(error.lines)[:_REASON_LIMIT]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_REASON_LIMIT]


def _loop(run: Run, total_steps: int, signals: StopSignals) -> int:
    recipe, metrics = run.recipe, run.metrics
    mesh = run.stages.mesh
    cadence = Cadence(recipe.checkpoint, time.monotonic())

    def flags() -> list[float]:  # as many as FLAGS
        # A save is collective, so all ranks must agree on it. But their clocks differ, and a signal
        # may reach only one rank.
        return [
            *_flags_of(signals),
            run.store.failed,
            mesh.rank == 0 and cadence.is_time(),
        ]

    while run.step < total_steps:
        for name, epoch in run.epochs_begun(run.step):
            log.get().info(f"step {run.step + 1} begins epoch {epoch + 1} of {name}")
        bad_step = run.ledger.leaves_out(run.step + 1)
        requests = do_step(run, flags) if bad_step is None else _pass_over(run, bad_step)
        # From now on, there are steps that a signal must not lose.
        signals.catch()
        is_last = run.step == total_steps

        if run.replicas is not None and run.step % recipe.reliability.digest_every == 0:
            with metrics.timer("replicas"):
                _report(run, run.replicas.check(run.step))

        if requests.save_failed:
            # This raises the error of the save.
            run.store.wait()

        # Save before validation, so that a validation that fails or is cut off loses no step.
        stopped_by = requests.signal
        must_save = is_last or requests.time_is_up or cadence.is_step(run.step)
        if must_save or stopped_by:
            _save(run, cadence)
            # A save can take minutes.
            stopped_by = stopped_by or _agree_on_signal(signals)

        must_validate = run.held_out is not None and (
            is_last or run.step % recipe.validation.every == 0
        )
        if must_validate and not stopped_by:
            must_validate = not _validate(run, signals)
            stopped_by = _agree_on_signal(signals)
            if stopped_by and not must_save:
                _save(run, cadence)

        if stopped_by and is_last and must_validate:
            metrics.event(run.step, "stop", f"stopped by signal {stopped_by} in the validation")
            log.get().info(
                f"stopped by signal {stopped_by} in the validation after the last step; all "
                f"{run.step} steps are saved"
            )
            return stopped_by
        if stopped_by and not is_last:
            metrics.event(run.step, "stop", f"stopped by signal {stopped_by}")
            log.get().info(
                f"stopped by signal {stopped_by} after step {run.step}; "
                f"{way_to_go_on(recipe)} from there"
            )
            return stopped_by
    return 0


def _flags_of(signals: StopSignals) -> list[float]:
    """Return a number for each of ``STOP_SIGNALS``: 1 for the first that this rank received."""
    return [float(signals.received[:1] == [number]) for number in STOP_SIGNALS]


def _agreed_signal(flags: Sequence[float]) -> int:
    """Return the signal that asks to stop, or 0, from the flags of all ranks, summed or maximal."""
    received = zip(STOP_SIGNALS, flags, strict=True)
    return next((number for number, is_received in received if is_received), 0)


def _agree_on_signal(signals: StopSignals) -> int:
    """Return the signal that asks to stop, the same on all ranks; 0 for none.

    Collective over all ranks: one all-reduce in host memory.
    """
    return _agreed_signal(process_group.max_over_ranks(_flags_of(signals)))


def _save(run: Run, cadence: "Cadence") -> None:
    begin_s = time.perf_counter()
    with run.metrics.timer("checkpoint"):
        run.store.save(_manifest(run), run.stages, run.optimizer)
    cadence.saved()
    stopped_s = round(time.perf_counter() - begin_s, 3)
    run.metrics.event(run.step, "save", f"checkpoint of step {run.step}", seconds=stopped_s)


def _owes_validation(run: Run) -> bool:
    """Return whether this run saved its last step, and then was ended before its validation."""
    loaded = run.store.loaded
    if run.step != run.recipe.run.steps or loaded is None or loaded.parent != run.store.folder:
        return False
    return owes_validation(run.metrics.run_dir / METRICS, run.recipe.validation, run.step)


def _validate(run: Run, signals: StopSignals) -> bool:
    """Validate, and log the loss. Returns False if a signal has cut the validation off."""
    assert run.held_out is not None
    with run.metrics.timer("validation"):
        loss = validate(
            run.recipe,
            run.stages,
            run.held_out,
            order=run.loader.order,
            must_stop=lambda: _agree_on_signal(signals) != 0,
        )
    if loss is not None:
        run.metrics.validation(run.step, loss)
    return loss is not None


class Requests(NamedTuple):
    """What ranks have asked for during a step, the same on all ranks.

    Attributes:
        signal: the number of the signal that asks to stop; 0 for none.
        save_failed: whether the save in the background has failed.
        time_is_up: whether a checkpoint is due by the clock.
    """

    signal: int = 0
    save_failed: bool = False
    time_is_up: bool = False


def do_step(run: Run, flags: Callable[[], list[float]]) -> Requests:
    """Do one step, and log it. Collective over all ranks.

    Args:
        run: the run, whose stragglers are being watched (``run.stragglers.watching()``).
        flags: returns what this rank asks for, ``FLAGS`` numbers. It is called once.
    """
    recipe, stages, metrics = run.recipe, run.stages, run.metrics

    # Seeded by the number of the step, random numbers are the same on all layouts and after a
    # resume. Only 63 bits of the seed are kept.
    torch.manual_seed(((recipe.run.seed << 32) + run.step) & (2**63 - 1))

    run.stragglers.begin_step()
    with metrics.timer("data"):
        batch = next(run.loader)

    with nullcontext() if run.profiler is None else run.profiler.step(run.step + 1):
        with nullcontext() if run.timeline is None else run.timeline.step(run.step + 1):
            sums = compute_gradients(stages, batch, flags, metrics.is_due(run.step + 1))

        lr = learning_rate(run.step, recipe.optim, recipe.run.steps)
        limits = run.history.limits()
        values = update(
            stages, run.optimizer, sums, max_norm=recipe.optim.clip, lr=lr, limits=limits
        )
    straggler_report = run.stragglers.end_step()

    # The values come from sums over all ranks, so all ranks find the same problem, or none.
    problem = limits.problem(values.loss, values.norm)
    if problem is None:
        run.history.add_good(values.loss, values.norm)
    else:
        # The update has changed nothing.
        run.history.add_bad()
        _require_going_on(run, problem)
    run.step += 1

    metrics.step(
        run.step,
        loss=values.loss,
        grad_norm=values.norm,
        lr=lr,
        extra=partial(_further_metrics, recipe, batch, stages, values.norm_by_part),
    )
    if problem is not None:
        with metrics.timer("checkpoint"):
            _leave_out(run, problem)
    _report(run, straggler_report)

    *ranks_with_signal, save_failed, time_is_up = values.flags
    return Requests(_agreed_signal(ranks_with_signal), save_failed > 0, time_is_up > 0)


def _pass_over(run: Run, bad_step: BadStep) -> Requests:
    """Leave out the next batch, as this run did when it met ``bad_step`` before it was killed."""
    next(run.loader)
    run.step += 1
    if bad_step.action == "skip":
        run.history.add_bad()
    return Requests()


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


def _further_metrics(
    recipe: Recipe, batch: Batch, stages: Stages, norm_by_part: Mapping[str, float]
) -> dict[str, float]:
    tokens = recipe.data.global_batch * recipe.data.seq_len
    return {
        **{f"grad_norm/{part}": norm for part, norm in norm_by_part.items()},
        **cp_imbalance(recipe, batch),
        **expert_metrics(stages.router_loads, tokens),
    }


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


def _require_going_on(run: Run, problem: str) -> None:
    """Raise TrainingError unless the recipe lets the run go on after the bad step that it is in."""
    table = run.recipe.reliability
    in_a_row = run.history.bad_in_a_row
    if table.on_bad_step == "skip" and in_a_row < table.max_bad_steps:
        return
    if table.on_bad_step == "rollback" and run.ledger.rollbacks < table.max_rollbacks:
        return
    parts = [f"step {run.step + 1}: {problem}"]
    if table.on_bad_step == "skip":
        parts.append(f"it is bad step {in_a_row} in a row (reliability.max_bad_steps)")
    if table.on_bad_step == "rollback":
        parts.append(
            f"the run has gone back {run.ledger.rollbacks} of {table.max_rollbacks} times "
            "(reliability.max_rollbacks)"
        )
    parts += [
        f"the newest checkpoint is {run.store.newest() or 'none'}",
        "lower optim.lr, lengthen optim.warmup or set optim.clip, and start again",
    ]
    raise TrainingError("; ".join(parts))


def _leave_out(run: Run, problem: str) -> None:
    """Leave out the batch of the bad step that is done, or go back to the newest checkpoint.

    Going back leaves ``run.step`` and the loader as they are: the batches since the checkpoint are
    left out, and step n still has batch n. Collective over all ranks.

    Raises:
        TrainingError: there is no checkpoint to go back to.
        CheckpointError: the checkpoint cannot be loaded.
    """
    if run.recipe.reliability.on_bad_step == "skip":
        entry = BadStep(run.step, "skip", run.step, problem)
        _write_to_ledger(run, entry)
        _tell(run, f"{problem}; its batch is left out")
        return

    run.store.wait()
    # A newer one was damaged or out of sight when the run started, and is not of this training.
    found = run.store.newest_whole(before=run.step)
    if found is None:
        raise TrainingError(
            f'step {run.step}: {problem}; reliability.on_bad_step = "rollback", but there is no '
            "checkpoint to go back to; lower optim.lr or checkpoint.every, and start again"
        )
    path, manifest = found
    entry = BadStep(run.step, "rollback", manifest.step + 1, problem)
    _write_to_ledger(run, entry)
    run.store.load(path, run.stages, run.optimizer)
    run.history.load_state_dict(manifest.history)
    _tell(
        run,
        f"{problem}; went back to {path}, and left out the batches of steps {entry.first} to "
        f"{entry.step}",
    )


def _write_to_ledger(run: Run, entry: BadStep) -> None:
    is_main = run.stages.mesh.rank == 0
    # Nobody goes on before the line is on the disk.
    process_group.on_all(run.ledger.path.name, lambda: run.ledger.write(entry) if is_main else None)
    run.ledger.lines.append(entry)


def _tell(run: Run, line: str) -> None:
    run.metrics.report(
        run.step, [line], {"left_out_steps": float(run.ledger.left_out)}, tag="bad steps"
    )


def _manifest(run: Run) -> Manifest:
    recipe = run.recipe
    return Manifest(
        step=run.step,
        world_size=recipe.world_size,
        layout=asdict(recipe.mesh),
        model=model_of(recipe.model, recipe.precision.params),
        recipe=run.resolved_toml,
        data=run.loader.state_dict(),
        lr=learning_rate(run.step - 1, recipe.optim, recipe.run.steps),
        history=run.history.state_dict(),
    )
