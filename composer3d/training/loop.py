"""The training loop, in the order in which a step happens."""

from collections.abc import Callable

import torch

from composer3d.facts.flags import StepFlags
from composer3d.recipe.advice import nothing_to_do, stopped_by_signal
from composer3d.reliability.signals import StopSignals, stop_signals
from composer3d.runtime import collector, log, process_group
from composer3d.training.build import Run
from composer3d.training.ending import Tell, closing
from composer3d.training.observers.observer import StepResult
from composer3d.training.step import compute_gradients, update, update_rule


def train(run: Run, tell: Tell = lambda error: None) -> int:
    """Train to the last step, or until a signal asks to stop. The last step done is saved.

    Collective over all ranks. ``tell`` is called with a UserError before anything is closed.

    Returns:
        0, or the number of the signal that stopped the run before all was done.

    Raises:
        TrainingError: a step is bad and ``reliability.on_bad_step`` does not go on after it; the
            run's folder was removed or replaced; or a UserError of status 2 came up.
        DataError: data cannot be read any more, or no token of a validation is valid.
        SaveError: a checkpoint could not be saved.
    """
    with stop_signals() as signals, closing(run, tell):
        stopped_by = _train(run, signals)
    run.saver.release_folder()
    return stopped_by


def _train(run: Run, signals: StopSignals) -> int:
    observers, total_steps, first_step = run.observers, run.recipe.run.steps, run.step
    owes_validation = process_group.on_main("metrics", lambda: run.validation.is_owed(run.step))
    if run.step >= total_steps and not owes_validation:
        log.get().info(nothing_to_do(run.recipe, run.step))
    collector.set_aside()  # Python's garbage collector need not look at what is there now

    with observers.training():
        if owes_validation:
            # A signal ends the process at once: nothing is lost, and the next start does it.
            log.get().info(f"the validation after step {run.step} was cut off: it is done now")
            _validate(run, signals)
        stopped_by = _loop(run, signals)
    with observers.phase("checkpoint"):
        run.saver.store.wait()
    if stopped_by:
        # Only now a save in the background is done.
        cause, line = stopped_by_signal(run.recipe, run.step, stopped_by)
        observers.event(run.step, "stop", cause)
        log.get().info(line)
    if run.step == total_steps and (owes_validation or run.step > first_step):
        observers.event(run.step, "end", f"all {total_steps} steps are done")
    return stopped_by


def _loop(run: Run, signals: StopSignals) -> int:
    """Do steps until the last one is done, or a signal asks to stop: return its number, or 0."""
    recipe, saver, mesh = run.recipe, run.saver, run.stages.mesh

    def own_flags() -> StepFlags:
        save_is_due = mesh.rank == 0 and saver.is_due_by_clock()
        return StepFlags(signals.first, saver.store.failed, save_is_due)

    while run.step < recipe.run.steps:
        if run.recovery.was_left_out(run.step + 1):
            next(run.loader)  # an earlier run has found this batch bad
            run.step += 1
            flags = StepFlags()
        else:
            flags = do_step(run, own_flags)
        # From the first step on, a signal must not end the process before the steps are saved.
        signals.catch()
        is_last = run.step == recipe.run.steps
        run.observers.check_state(run.step)

        if flags.save_failed:
            # This raises the error of the save.
            saver.store.wait()

        # Save before validation, so that a validation that fails or is cut off loses no step.
        stopped_by = flags.stop_signal
        must_save = saver.is_due_by_step(run.step) or flags.save_is_due_by_clock
        if must_save or stopped_by:
            _save(run)
            # A save can take minutes.
            stopped_by = stopped_by or signals.agree()

        owes_validation = run.validation.is_due(run.step)
        if owes_validation and not stopped_by:
            owes_validation = not _validate(run, signals)  # a signal may have cut it off
            stopped_by = signals.agree()
            if stopped_by and not must_save:
                _save(run)

        if stopped_by and (owes_validation or not is_last):
            return stopped_by
    return 0


def do_step(run: Run, own_flags: Callable[[], StepFlags] = StepFlags) -> StepFlags:
    """Do one step. Collective over all ranks.

    Args:
        run: the run, within the context ``run.observers.training()``.
        own_flags: returns the flags of this rank. It is called once, after backward has been
            launched.

    Returns:
        The flags that any rank has raised.
    """
    recipe, stages, observers, recovery = run.recipe, run.stages, run.observers, run.recovery
    number = run.step + 1

    # A user's model may draw random numbers, the same on all ranks and in a run that is resumed.
    torch.manual_seed(((recipe.run.seed << 32) + run.step) & (2**63 - 1))

    with observers.step(number):
        with observers.phase("data"):
            batch = next(run.loader)
        with observers.phase("gradients"):
            by_part = observers.wants_norm_by_part(number)
            sums = compute_gradients(stages, batch, own_flags, by_part=by_part)
        rule = update_rule(recipe, run.step, recovery.limits())
        # A bad step changes no weight.
        values = update(stages, run.optimizer, sums, **rule._asdict())

    # First of all: the metrics also have a step that ends the run.
    observers.end_step(StepResult(number, batch, values, rule.lr))
    problem = recovery.judge(number, values, rule.limits)
    run.step = number
    if problem is not None:
        recovery.leave_out(number, problem)
    return values.flags


def _save(run: Run) -> None:
    """Save a checkpoint. The observers are told once it is whole."""
    history, observers = run.recovery.history, run.observers
    with observers.phase("checkpoint"):
        run.saver.save(run.step, run.stages, run.optimizer, run.loader, history, observers)


def _validate(run: Run, signals: StopSignals) -> bool:
    """Validate. Return False if a signal has cut the validation off."""
    with run.observers.phase("validation"):
        loss = run.validation.run(lambda: signals.agree() != 0)
    if loss is not None:
        run.observers.end_validation(run.step, loss)
    return loss is not None
