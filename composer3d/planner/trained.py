"""The share of each part of a model that ``optim.train`` trains. No torch here."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from composer3d.models.llama.shape import ModelShape
from composer3d.models.parameters import (
    Parameter,
    block_parameters,
    first_parameters,
    last_parameters,
)
from composer3d.recipe.schema import Recipe


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


def is_trained(recipe: Recipe, name: str) -> bool:
    """Return whether the recipe trains the parameter with this name in the whole model."""
    globs = recipe.optim.train
    return globs is None or any(fnmatchcase(name, glob) for glob in globs)


def trained_of(recipe: Recipe) -> Trained:
    """Return what a recipe trains. The parameters of a user's own architecture count as trained."""
    shape = recipe.model
    if recipe.optim.train is None or not isinstance(shape, ModelShape):
        return EVERYTHING

    def share(
        unit: str, parameters: Iterable[Parameter], wanted: Callable[[Parameter], bool]
    ) -> float:
        matrices = [p for p in parameters if len(p.shape) > 1 and wanted(p)]
        trained = sum(p.elements for p in matrices if is_trained(recipe, f"{unit}.{p.name}"))
        return trained / max(1, sum(p.elements for p in matrices))

    first = share("first", first_parameters(shape), lambda _: True)
    last = share("last", last_parameters(shape, sequence_parallel=False), lambda _: True)
    blocks = []
    for layer in range(shape.n_layers):
        parameters = block_parameters(shape, layer, tp=1, sequence_parallel=False)
        dense = share(f"blocks.{layer}", parameters, lambda p: p.cut != "experts")
        experts = share(f"blocks.{layer}", parameters, lambda p: p.cut == "experts")
        blocks.append(Share(dense, experts))
    # A tied head is the embedding, under the embedding's name.
    return Trained(first, first if shape.tied else last, tuple(blocks))
