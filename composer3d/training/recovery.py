"""How a run goes on after a bad step: it leaves out batches, or goes back to a checkpoint."""

from composer3d.checkpoint import Store
from composer3d.facts.errors import TrainingError
from composer3d.parallel import Stages
from composer3d.recipe.schema import ReliabilityTable
from composer3d.reliability.bad_steps import BadStep, Ledger, Limits, StepHistory
from composer3d.reliability.report import Report
from composer3d.runtime import process_group
from composer3d.training.observers.observer import Observer
from composer3d.training.optimizers import Optimizer
from composer3d.training.step_values import StepValues


class Recovery:
    """Decides which steps are bad, and what the run does after one.

    All ranks decide alike: the values of a step are sums over all ranks.

    Args:
        table: the recipe's ``[reliability]``.
        history: the good steps before, from which limits follow.
        ledger: the bad steps whose batches this run leaves out.
        store: the run's checkpoints.
        stages: this rank's stages.
        optimizer: of their parameters.
        observers: are told of bad steps.
    """

    def __init__(
        self,
        table: ReliabilityTable,
        history: StepHistory,
        ledger: Ledger,
        store: Store,
        stages: Stages,
        optimizer: Optimizer,
        observers: Observer,
    ) -> None:
        self.history = history
        self._table, self._ledger, self._store = table, ledger, store
        self._stages, self._optimizer, self._observers = stages, optimizer, observers

    def limits(self) -> Limits:
        """Return the largest loss and norm with which the next step is good."""
        return self.history.limits()

    def judge(self, step: int, values: StepValues, limits: Limits) -> str | None:
        """Return what is wrong with ``step``, which has just been done; None if it is good.

        Args:
            step: its number.
            values: its values, the same on all ranks.
            limits: those that ``update`` was called with.

        Raises:
            TrainingError: the step is bad, and the recipe does not let the run go on.
        """
        problem = limits.problem(values.loss, values.norm)
        if problem is None:
            self.history.add_good(values.loss, values.norm)
            return None
        # The update has changed nothing.
        self.history.add_bad()
        self._require_going_on(step, problem)
        return problem

    def leave_out(self, step: int, problem: str) -> None:
        """Leave out the batch of ``step``, which was bad, or go back to the newest checkpoint.

        Going back leaves the number of the step and the loader as they are: the batches since the
        checkpoint are left out, and step n still has batch n. Collective over all ranks.

        Raises:
            TrainingError: there is no checkpoint to go back to.
            CheckpointError: the checkpoint cannot be loaded.
        """
        with self._observers.phase("checkpoint"):
            if self._table.on_bad_step == "skip":
                self._remember(BadStep(step, "skip", step, problem))
                line = f"{problem}; its batch is left out"
            else:
                line = self._roll_back(step, problem)
        self._tell(step, line)

    def was_left_out(self, step: int) -> bool:
        """Return whether this run left out the batch of ``step``, before it was killed.

        The observers are told again: the metrics after the checkpoint are dropped at the start.
        """
        bad_step = self._ledger.leaves_out(step)
        if bad_step is None:
            return False
        what = f"the batches of steps {bad_step.first} to {step} are"
        if bad_step.action == "skip":
            self.history.add_bad()
            what = "its batch is"
        if step == bad_step.step:
            self._tell(step, f"{bad_step.reason}; {what} left out again")
        return True

    def _tell(self, step: int, line: str) -> None:
        values = {"left_out_steps": float(self._ledger.left_out(step))}
        self._observers.report(step, Report([line], values, "bad steps"))

    def _roll_back(self, step: int, problem: str) -> str:
        self._store.wait()
        # A newer one was damaged or out of sight when the run started: it is of another training.
        found = self._store.newest_whole(before=step)
        if found is None:
            raise TrainingError(
                f'step {step}: {problem}; reliability.on_bad_step = "rollback", but there is no '
                "checkpoint to go back to; lower optim.lr or checkpoint.every, and start again"
            )
        path, manifest = found
        first = manifest.step + 1
        self._remember(BadStep(step, "rollback", first, problem))
        self._store.load(path, self._stages, self._optimizer)
        self.history.load_state_dict(manifest.history)
        return (
            f"{problem}; went back to {path}, and left out the batches of steps {first} to {step}"
        )

    def _remember(self, bad_step: BadStep) -> None:
        is_main = self._stages.mesh.rank == 0
        # Nobody goes on before the line is on the disk.
        process_group.on_all(
            self._ledger.path.name, lambda: self._ledger.write(bad_step) if is_main else None
        )
        self._ledger.lines.append(bad_step)

    def _require_going_on(self, step: int, problem: str) -> None:
        table, in_a_row = self._table, self.history.bad_in_a_row
        if table.on_bad_step == "skip" and in_a_row < table.max_bad_steps:
            return
        rollbacks = self._ledger.rollbacks
        if table.on_bad_step == "rollback" and rollbacks < table.max_rollbacks:
            return
        parts = [f"step {step}: {problem}"]
        if table.on_bad_step == "skip":
            parts.append(f"it is bad step {in_a_row} in a row (reliability.max_bad_steps)")
        if table.on_bad_step == "rollback":
            parts.append(
                f"the run has gone back {rollbacks} of {table.max_rollbacks} times "
                "(reliability.max_rollbacks)"
            )
        parts += [
            f"the newest checkpoint is {self._store.newest() or 'none'}",
            "lower optim.lr, lengthen optim.warmup or set optim.clip, and start again",
        ]
        raise TrainingError("; ".join(parts))
