"""Which parameters of a small model train, so that it represents a full one that trains a part."""

import re
from collections.abc import Sequence

import torch

from composer3d.models.registry import architecture
from composer3d.parallel.freeze import freeze_others
from composer3d.recipe.schema import Model

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def train_in_small(
    train: Sequence[str], full: Model, small: Model, *, has_pipeline: bool
) -> tuple[str, ...]:
    """Return the names of the parameters that train in the small model.

    Each block of the small model stands for a run of blocks of the full one. It trains what the
    one of them does that trains most. So a pipeline stage that trains something still does. Without
    a pipeline, the first run with frozen blocks and others gives a frozen one: so a proof sees
    frozen blocks, if there are any.

    Args:
        train: the recipe's ``optim.train``.
        full, small: the shapes of both models.
        has_pipeline: whether the layout has pipeline stages.

    Raises:
        PlanError: a glob matches no parameter of the full model.
    """
    trains = _trains(full, train)
    names = _trains(small, None)
    of_blocks: list[dict[str, bool]] = [{} for _ in range(full.n_layers)]
    for name, does_train in trains.items():
        if found := _BLOCK.fullmatch(name):
            of_blocks[int(found[1])][found[2]] = does_train

    chosen: list[dict[str, bool]] = []
    wants_frozen = not has_pipeline
    for index in range(small.n_layers):
        first = index * full.n_layers // small.n_layers
        last = max(first + 1, (index + 1) * full.n_layers // small.n_layers)
        by_count = sorted(of_blocks[first:last], key=lambda block: sum(block.values()))
        is_mixed = not any(by_count[0].values()) and any(by_count[-1].values())
        takes_frozen = wants_frozen and is_mixed
        wants_frozen = wants_frozen and not takes_frozen
        chosen.append(by_count[0 if takes_frozen else -1])
    if not any(any(block.values()) for block in chosen):
        chosen[-1] = max(of_blocks, key=lambda block: sum(block.values()))

    trained = []
    for name in names:
        if found := _BLOCK.fullmatch(name):
            block, rest = chosen[int(found[1])], found[2]
            # The block that it stands for may be of another kind, such as one without experts.
            does_train = block.get(rest, any(other.get(rest, False) for other in of_blocks))
        else:
            does_train = trains.get(name, False)
        if does_train:
            trained.append(name)
    return tuple(trained)


def _trains(shape: Model, train: Sequence[str] | None) -> dict[str, bool]:
    """Whether each parameter of a model trains, by name. ``train`` None: those that can."""
    model = architecture(shape.architecture).build(shape, dtype=torch.float32, device="meta")
    if train is not None:
        freeze_others(model, train)
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
