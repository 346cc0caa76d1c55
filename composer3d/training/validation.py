"""The validation of a run: when it is due, and the loss on the held-out text."""

from collections.abc import Callable

from torch import Tensor

from composer3d.data import Batch, BatchesAhead, Corpus, Loader
from composer3d.data.order import Order
from composer3d.facts.errors import DataError
from composer3d.facts.remote import Place
from composer3d.parallel import Stages
from composer3d.recipe.schema import Recipe
from composer3d.runtime import process_group
from composer3d.runtime.mesh import Mesh
from composer3d.training.batches import make_loader, move_to_device
from composer3d.training.owed import METRICS, owes_validation


class Validation:
    """Validates a run every so many steps and after its last one.

    To make it is collective over all ranks.

    Args:
        recipe: the whole recipe.
        stages: this rank's stages.
        held_out: the text to validate on; None if the recipe does not validate.
        loaded: the checkpoint that this process has loaded; None if the run is new.
        order: as in ``make_held_out_loader``.

    Attributes:
        loader: of the text; None if the recipe does not validate.

    Raises:
        DataError: the text has no sample, or cannot be read.
    """

    def __init__(
        self,
        recipe: Recipe,
        stages: Stages,
        held_out: Corpus | None,
        loaded: Place | None,
        order: Order,
    ) -> None:
        self._recipe, self._stages, self._loaded = recipe, stages, loaded
        self.loader: Loader | None = None
        if held_out is not None:
            # Once, as samples of whole documents may take long; and here, where ranks agree.
            self.loader = process_group.on_all(
                "data", lambda: make_held_out_loader(recipe, stages.mesh, held_out, order)
            )

    def is_due(self, step: int) -> bool:
        """Return whether the run is validated after ``step``."""
        if self.loader is None:
            return False
        return step == self._recipe.run.steps or step % self._recipe.validation.every == 0

    def is_owed(self, step: int) -> bool:
        """Return whether this run saved its last step, and was then ended before its validation.

        A run whose weights come from another run's checkpoint owes nothing.

        Args:
            step: the number of steps done.
        """
        recipe, loaded = self._recipe, self._loaded
        if step != recipe.run.steps or loaded is None or loaded.parent != recipe.checkpoint_folder:
            return False
        return owes_validation(recipe.run.folder / METRICS, recipe.validation, step)

    def run(self, must_stop: Callable[[], bool]) -> float | None:
        """Validate: see ``validate``. Collective over all ranks."""
        assert self.loader is not None
        return validate(self._recipe, self._stages, self.loader, must_stop)


def make_held_out_loader(
    recipe: Recipe, mesh: Mesh, held_out: Corpus, order: Order = "feistel"
) -> Loader:
    """Make the loader of this rank's part of a validation.

    Its batches are drawn from the whole held-out text. They are the same in every run with the same
    ``order``, that of the training's loader, whatever ``data.seed`` is.

    Raises:
        DataError: the text has no sample, or cannot be read.
    """
    return make_loader(recipe, mesh, held_out, seed=0, order=order, is_training=False)


def validate(
    recipe: Recipe,
    stages: Stages,
    loader: Loader,
    must_stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Compute the mean loss over the valid tokens of the first ``validation.steps`` batches.

    Args:
        recipe: the recipe.
        stages: this rank's stages.
        loader: from ``make_held_out_loader``. It begins anew.
        must_stop: is called before each batch, and returns the same on all ranks: whether the
            validation is cut off.

    Returns:
        Nats per valid token, the same on all ranks; None if the validation was cut off.

    Raises:
        DataError: no token is valid.

    Collectives: those of ``Stages.evaluate`` for each batch, and one all-reduce over all ranks.
    """
    loader.next_step = 0
    batches = BatchesAhead(loader, stages.mesh.device, stop=recipe.validation.steps)
    losses, valid_tokens = [], []
    for _ in range(recipe.validation.steps):
        if must_stop():
            batches.close()
            return None
        local_loss, local_valid = evaluate_batch(stages, next(batches))
        losses.append(local_loss)
        valid_tokens.append(local_valid)
    batches.close()
    loss, tokens = stages.mesh.sum_over_world(sum(losses), sum(valid_tokens))
    if tokens == 0:
        raise DataError(
            f"validation.steps = {recipe.validation.steps}: no token of these batches of "
            f"{loader.corpus.name} is learned; use more steps, or other text"
        )
    return loss / tokens


def evaluate_batch(stages: Stages, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute this rank's shares of a batch's summed loss and of its number of valid tokens.

    Returns:
        Two scalars on the mesh's device: the loss in float64, and the number in int64.

    Collectives: those of ``Stages.evaluate``. ``Mesh.sum_over_world`` adds up the shares.
    """
    tokens_BT, labels_BT, positions_BT, documents_BT, _, (valid, *_) = move_to_device(stages, batch)
    return stages.evaluate(tokens_BT, labels_BT, positions_BT, documents_BT), valid
