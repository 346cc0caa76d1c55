"""Log how often a run sees its data."""

from collections.abc import Iterator
from contextlib import contextmanager

from composer3d.data import Loader
from composer3d.recipe.schema import Recipe
from composer3d.runtime import log
from composer3d.training.observers.observer import Observer


class EpochLog(Observer):
    """Logs that a step begins another epoch of a part of the data."""

    def __init__(self, loader: Loader) -> None:
        self._epochs_begun = loader.epochs_begun

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        for name, epoch in self._epochs_begun(number - 1):
            log.get().info(f"step {number} begins epoch {epoch + 1} of {name}")
        yield


def log_epochs(recipe: Recipe, loader: Loader) -> None:
    """Log how often the whole run sees each part of the training data."""
    for seen in loader.epochs_in(recipe.run.steps):
        line = f"data: {seen.name} has {seen.n_samples:,} samples of {recipe.data.seq_len} tokens"
        if seen.filled is not None:
            line += f", of which documents fill {seen.filled:.1%}"
        if seen.n_cut:
            line += f"; documents that are longer than a sample, and cut: {seen.n_cut:,}"
        # Two digits of a small share: "0.00 times" would say that it is not seen.
        epochs = f"{seen.epochs:.2f}" if seen.epochs >= 0.1 else f"{seen.epochs:.2g}"
        log.get().info(f"{line}; {recipe.run.steps:,} steps see it {epochs} times")


def log_held_out(recipe: Recipe, loader: Loader, held_out: Loader) -> None:
    """Log if a validation sees a text more than once, or the text that is trained on.

    Args:
        recipe: the whole recipe.
        loader: that of the training.
        held_out: that of the validation.
    """
    (seen,) = held_out.epochs_in(recipe.validation.steps)
    if seen.epochs > 1:
        log.get().info(
            f"data: {seen.name} has {seen.n_samples:,} samples; each validation of "
            f"{recipe.validation.steps:,} steps sees it {seen.epochs:.2f} times"
        )
    if any(seen.digest == trained.digest for trained in loader.epochs_in(0)):
        log.get().warning(
            f"data: {seen.name} is trained on, so its loss says nothing about other text; give "
            "validation.path a text that is not trained on"
        )
