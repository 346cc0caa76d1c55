"""When a run saves a checkpoint, and what its manifest says."""

import time
from dataclasses import asdict

from composer3d.checkpoint import Store
from composer3d.checkpoint import manifest as manifests
from composer3d.checkpoint.manifest import Manifest, model_of
from composer3d.data import BatchesAhead
from composer3d.parallel import Stages
from composer3d.recipe.schema import Recipe
from composer3d.reliability.bad_steps import StepHistory
from composer3d.reliability.lock import Claim
from composer3d.training.observers.observer import Observer
from composer3d.training.optim import learning_rate
from composer3d.training.optimizers import Optimizer


class Saver:
    """Saves the checkpoints of a run: every so many steps, and every so many minutes.

    The minutes count from the last save, or from the creation of this object.

    Args:
        recipe: the whole recipe.
        resolved_toml: the recipe as text, with the origin of each value: a part of each manifest.
        store: the run's checkpoints.
        claim: the lock on the run's folder; None on all ranks but 0.
    """

    def __init__(
        self, recipe: Recipe, resolved_toml: str, store: Store, claim: Claim | None
    ) -> None:
        self.store = store
        self._recipe, self._toml, self._claim = recipe, resolved_toml, claim
        self._saved_at_s = time.monotonic()

    def is_due_by_clock(self) -> bool:
        """Return whether ``checkpoint.every_minutes`` have passed, by the clock of this rank."""
        minutes = self._recipe.checkpoint.every_minutes
        return minutes > 0 and time.monotonic() - self._saved_at_s >= 60 * minutes

    def is_due_by_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``: the last, or one of every so many."""
        every = self._recipe.checkpoint.every
        return step == self._recipe.run.steps or (every > 0 and step % every == 0)

    def save(
        self,
        step: int,
        stages: Stages,
        optimizer: Optimizer,
        loader: BatchesAhead,
        history: StepHistory,
        observers: Observer,
    ) -> None:
        """Save the run after ``step`` steps. Collective over all ranks: see ``Store.save``.

        The observers are told of the checkpoint once it is whole: a save in the background may
        fail, or be killed.

        Raises what ``Store.save`` raises.
        """

        def tell(stopped_s: float) -> None:
            text = f"checkpoint of step {step}"
            observers.event(step, "save", text, seconds=round(stopped_s, 3))

        self.store.save(self._manifest(step, loader, history), stages, optimizer, tell)
        self._saved_at_s = time.monotonic()

    def require_readable(self, loader: BatchesAhead, history: StepHistory) -> None:
        """Raise CheckpointError if a checkpoint of this run could not be read. No collective."""
        manifests.require_readable(self._manifest(1, loader, history))

    def _manifest(self, step: int, loader: BatchesAhead, history: StepHistory) -> Manifest:
        recipe = self._recipe
        return Manifest(
            step=step,
            world_size=recipe.world_size,
            layout=asdict(recipe.mesh),
            model=model_of(recipe.model, recipe.precision.params),
            recipe=self._toml,
            data=loader.state_dict(),
            lr=learning_rate(step - 1, recipe.optim, recipe.run.steps),
            history=history.state_dict(),
        )

    def release_folder(self) -> None:
        """Let another job use the run's folder. Without it, the end of this process does."""
        if self._claim is not None:
            self._claim.close()
