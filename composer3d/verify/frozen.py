"""Which parameters of a small model train, and their rates, so that it represents a full one."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from composer3d.models.registry import architecture
from composer3d.parallel.freeze import freeze_others
from composer3d.recipe.schema import Model, OptimGroup, OptimTable

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
T = TypeVar("T")


def train_in_small(
    train: Sequence[str], full: Model, small: Model, stages: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Return the names of the parameters that train in the small model.

    Each block of the small model stands for a run of blocks of the full one. It trains what the
    one of them does that trains most. In each stage, the first run with frozen blocks and others
    gives a frozen one, if all other blocks of the stage train, or if it has no other block, but an
    end that trains: so a proof sees frozen blocks, if there are any. A stage that would train
    nothing trains its last block, as each stage must train.

    Args:
        train: the recipe's ``optim.train``.
        full, small: the shapes of both models.
        stages: the blocks of each stage of the small model; without a pipeline, there is one stage.

    Raises:
        PlanError: a glob matches no parameter of the full model.
    """
    trains = _trains(full, train)
    names = _trains(small, None)
    of_blocks = _by_block(trains, full.all_layers)

    runs = [of_blocks[_run_of_blocks(index, full, small)] for index in range(small.all_layers)]
    # What trains of the embedding, and of the head.
    ends = [
        {name: trains[name] for name in trains if name.startswith(end)}
        for end in ("first.", "last.")
    ]
    chosen = _choose_blocks(runs, ends, stages)

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


def _choose_blocks(
    runs: Sequence[Sequence[Mapping[str, bool]]],
    ends: Sequence[Mapping[str, bool]],
    stages: Sequence[Sequence[int]],
) -> list[Mapping[str, bool]]:
    """Choose for each block of the small model the one of its run that it trains as.

    Args:
        runs: for each block of the small model, the blocks of the full one that it stands for.
        ends: what trains of the embedding, and of the head.
        stages: as for ``train_in_small``.
    """
    of_count = [sorted(run, key=_count_trained) for run in runs]
    chosen = [run[-1] for run in of_count]
    for number, stage in enumerate(stages):
        own_ends = [ends[0]] * (number == 0) + [ends[1]] * (number == len(stages) - 1)
        end_trains = any(map(_count_trained, own_ends))
        trained = [index for index in stage if _count_trained(chosen[index])]
        mixed = [index for index in trained if not _count_trained(of_count[index][0])]
        if mixed and len(trained) == len(stage) and (len(stage) > 1 or end_trains):
            chosen[mixed[0]] = of_count[mixed[0]][0]
        elif not trained and not end_trains:
            chosen[stage[-1]] = max((block for run in runs for block in run), key=_count_trained)
    return chosen


def groups_in_small(optim: OptimTable, full: Model, small: Model) -> tuple[OptimGroup, ...] | None:
    """Return groups of the small model's parameters that represent those of the full one.

    Each block of the small model stands for a run of blocks of the full one, and is in the groups
    of one of them: the first that has most different ones. A group that no parameter would be in
    gets one of its kind. A group whose parameters do not train is left out.

    Args:
        optim: the recipe's ``[optim]``, whose ``train`` is that of the small model already.
        full, small: the shapes of both models.
    """
    groups = optim.groups or ()
    # By parameter, the numbers of all groups that match it: the first one counts, and a proof must
    # see that.
    matching = {
        name: tuple(number for number, group in enumerate(groups) if _matches(name, group.train))
        for name in _trains(full, None)
    }
    of_blocks = _by_block(matching, full.all_layers)
    chosen = [
        max(
            of_blocks[_run_of_blocks(index, full, small)],
            key=_count_groups,
        )
        for index in range(small.all_layers)
    ]
    in_small: dict[str, tuple[int, ...]] = {}
    for name, does_train in _trains(small, None).items():
        if does_train and (optim.train is None or _matches(name, optim.train)):
            found = _BLOCK.fullmatch(name)
            in_small[name] = chosen[int(found[1])].get(found[2], ()) if found else matching[name]

    for number in range(len(groups)):
        if not any(numbers[:1] == (number,) for numbers in in_small.values()):
            kinds = {_kind(name) for name, numbers in matching.items() if numbers[:1] == (number,)}
            of_kinds = [name for name in in_small if _kind(name) in kinds]
            in_small |= dict.fromkeys(of_kinds[-1:], (number,))
    kept = []
    for number, group in enumerate(groups):
        if any(numbers[:1] == (number,) for numbers in in_small.values()):
            names = tuple(name for name, numbers in in_small.items() if number in numbers)
            kept.append(replace(group, train=names))
    return tuple(kept) or None


def _count_trained(block: Mapping[str, bool]) -> int:
    return sum(block.values())


def _count_groups(block: Mapping[str, tuple[int, ...]]) -> int:
    return len({number for numbers in block.values() for number in numbers})


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _kind(name: str) -> str:
    """Return the name within its block, or the whole name outside of blocks."""
    found = _BLOCK.fullmatch(name)
    return found[2] if found else name


def _by_block(values: Mapping[str, T], n_blocks: int) -> list[dict[str, T]]:
    """Return the values of each block, by the name of the parameter within the block."""
    of_blocks: list[dict[str, T]] = [{} for _ in range(n_blocks)]
    for name, value in values.items():
        if found := _BLOCK.fullmatch(name):
            of_blocks[int(found[1])][found[2]] = value
    return of_blocks


def _run_of_blocks(index: int, full: Model, small: Model) -> slice:
    """Return the blocks of the full model that block ``index`` of the small one stands for.

    A depth of multi-token prediction stands for the same one.
    """
    if index >= small.n_layers:
        index += full.n_layers - small.n_layers
        return slice(index, index + 1)
    first = index * full.n_layers // small.n_layers
    return slice(first, max(first + 1, (index + 1) * full.n_layers // small.n_layers))


def _trains(shape: Model, train: Sequence[str] | None) -> dict[str, bool]:
    """Whether each parameter of a model trains, by name. ``train`` None: those that can."""
    model = architecture(shape.architecture).build(shape, dtype=torch.float32, device="meta")
    if train is not None:
        freeze_others(model, train)
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
