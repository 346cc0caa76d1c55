"""The share of each part of a model that ``optim.train`` trains. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from composer3d.models.table import Row
from composer3d.recipe.schema import OptimTable, Recipe


class Share(NamedTuple):
    """The shares of a block's parameters that train: of its dense ones, and of its experts."""

    dense: float = 1.0
    experts: float = 1.0


@dataclass(frozen=True)
class Trained:
    """The shares of a model's parameters that train, without norms and biases.

    Attributes:
        first: of the embedding.
        last: of the head.
        blocks: of each block; empty: all parameters of blocks train.
    """

    first: float = 1.0
    last: float = 1.0
    blocks: tuple[Share, ...] = ()

    def of_block(self, layer: int) -> Share:
        """Return the shares of block ``layer``, counted from 0."""
        return self.blocks[layer] if self.blocks else Share()


EVERYTHING = Trained()


def is_trained(optim: OptimTable, name: str) -> bool:
    """Return whether ``[optim]`` trains the parameter with this name in the whole model."""
    globs = optim.train
    return globs is None or any(fnmatchcase(name, glob) for glob in globs)


def has_frozen(recipe: Recipe) -> bool:
    """Return whether ``optim.train`` leaves out a parameter that could train."""
    if recipe.optim.train is None:
        return False
    names = [name for unit in recipe.parameters.trainable_names() for name in unit]
    return not all(is_trained(recipe.optim, name) for name in names)


def trained_of(recipe: Recipe) -> Trained:
    """Return what a recipe trains."""
    optim = recipe.optim
    if optim.train is None:
        return EVERYTHING

    def share(unit: str, rows: Iterable[Row]) -> float:
        matrices = [row for row in rows if row.is_matrix]
        trained = sum(row.elements for row in matrices if is_trained(optim, f"{unit}.{row.name}"))
        return trained / max(1, sum(row.elements for row in matrices))

    table = recipe.parameters
    untied = [row for row in table.last if not row.tied_to]
    first, last = share("first", table.first), share("last", untied)
    blocks = []
    for layer, rows in enumerate(table.blocks):
        dense = share(f"blocks.{layer}", (row for row in rows if row.style != "experts"))
        experts = share(f"blocks.{layer}", (row for row in rows if row.style == "experts"))
        blocks.append(Share(dense, experts))
    # A tied head is the embedding, under the embedding's name.
    return Trained(first, first if recipe.model.tied else last, tuple(blocks))
