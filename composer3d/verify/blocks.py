"""Choose few blocks for a small model, with the kinds of blocks that a large model has."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

from composer3d.recipe.schema import Model

# Depths of multi-token prediction in a small model: one reads the main model, one another depth.
MOST_DEPTHS = 2
# Longer periods than this are tried only as they are in the large model, to keep the search short.
_LONGEST_PERIOD = 12


class Traits(NamedTuple):
    """What a block has; the blocks of a model can differ in this by their number."""

    window: bool
    positions: bool
    experts: bool

    def __str__(self) -> str:
        """Say it in words, such as "with a window, without positions, with experts"."""
        names = ("a window", "positions", "experts")
        return ", ".join(
            f"{'with' if has else 'without'} {name}" for has, name in zip(self, names, strict=True)
        )


class Blocks(NamedTuple):
    """The blocks of a small model.

    Attributes:
        stages: the number of blocks of each stage; without a pipeline there is one stage.
        sizes: the keys of the model that make its blocks differ, with their values.
    """

    stages: tuple[int, ...]
    sizes: dict[str, int]


def _has_window(model: Any, block: int, seq_len: int) -> bool:
    return bool(0 < model.window_of(block) < seq_len)


def _has_positions(model: Any, block: int, seq_len: int) -> bool:
    return not hasattr(model, "is_rotary") or model.is_rotary(block)


def _has_experts(model: Any, block: int, seq_len: int) -> bool:
    return model.experts > 0 and (not hasattr(model, "has_experts") or model.has_experts(block))


# In the order of ``Traits``: the keys of a model that decide by a block's number whether it has
# something, and the function that says so.
_TRAITS: tuple[tuple[tuple[str, ...], Callable[[Any, int, int], bool]], ...] = (
    (("full_every",), _has_window),
    (("nope_every",), _has_positions),
    (("dense_layers", "moe_every"), _has_experts),
)


def kinds_of_blocks(model: Model, seq_len: int) -> list[Traits]:
    """Return the kind of each block of a model. A window as long as ``seq_len`` is none."""
    return _kinds_of(range(model.n_layers), model, seq_len)


def kinds_of_predicting_blocks(model: Model, seq_len: int) -> list[Traits]:
    """Return the kind of each block of multi-token prediction, as ``kinds_of_blocks``."""
    return _kinds_of(range(model.n_layers, model.all_layers), model, seq_len)


def _kinds_of(blocks: Iterable[int], model: Model, seq_len: int) -> list[Traits]:
    return [Traits(*(has(model, block, seq_len) for _, has in _TRAITS)) for block in blocks]


def by_stage(kinds: Sequence[Any], stages: Iterable[int]) -> set[frozenset[Any]]:
    """Return the sets of kinds that stages have, each once."""
    ends = accumulate(stages, initial=0)
    return {frozenset(kinds[begin:end]) for begin, end in pairwise(ends)}


def _keys(model: Any, seq_len: int) -> dict[str, int]:
    """Return the keys that make blocks differ. They are 0 if no block is another one by them."""
    names = {entry.name for entry in fields(model)}
    found: dict[str, int] = {
        name: getattr(model, name) for keys, _ in _TRAITS for name in keys if name in names
    }
    for name in ("full_every", "nope_every"):
        if found.get(name, 0) > model.n_layers:
            found[name] = 0
    if "full_every" in found and not 0 < model.window < seq_len:
        found["full_every"] = 0
    return found


@cache
def few_blocks(
    model: Model, seq_len: int, stages: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]
) -> Blocks:
    """Choose the blocks of a small model that have the kinds of those of ``model``.

    It tries all small values of the keys for one cut after another. It returns the first choice of
    a cut and values that has all of this:

    1. the kinds of ``model`` and no others;
    2. in each stage, the kinds that one of ``stages`` has; and all such sets of kinds, or as many
       as there are small stages;
    3. blocks of multi-token prediction of the same kinds;
    4. stages that all begin at the same place of each period, or do not, as ``stages``.

    If none has, it returns the first of those that differ least: an earlier line counts first.

    Args:
        model: the large model.
        seq_len: the number of tokens of a sequence.
        stages: the number of blocks of each stage of ``model``; one number if the small model has
            no pipeline.
        cuts: the numbers of blocks of the small stages, for each choice to try; the best first.
    """
    keys = _keys(model, seq_len)
    kinds = kinds_of_blocks(model, seq_len)
    kinds_of_stages = by_stage(kinds, stages)
    predicting = kinds_of_predicting_blocks(model, seq_len)
    places = _places(keys, stages)

    least: tuple[float, ...] = (math.inf,)
    chosen = None
    for cut in cuts:
        for sizes, small_kinds, small_predicting in _choices(model, seq_len, keys, cut):
            invented_and_lost = _differences(small_kinds, kinds)
            if invented_and_lost > least[:2]:
                continue
            small_stages = by_stage(small_kinds, cut)
            invented, lost = _differences(small_stages, kinds_of_stages)
            # More sets of kinds than small stages cannot be kept.
            lost -= max(0, len(kinds_of_stages) - len(cut))
            of_depths = sum(_differences(small_predicting, predicting))
            moved = _places(sizes, cut) != places
            difference = (*invented_and_lost, invented + max(0, lost), of_depths, moved)
            if difference < least:
                least, chosen = difference, Blocks(cut, sizes)
            if not any(difference):
                return Blocks(cut, sizes)
    assert chosen is not None
    return chosen


def _differences(small: Iterable[Any], full: Iterable[Any]) -> tuple[int, int]:
    """Return how many things ``small`` has that ``full`` lacks, and how many it lacks."""
    ours, theirs = set(small), set(full)
    return len(ours - theirs), len(theirs - ours)


def _places(keys: dict[str, int], stages: Iterable[int]) -> dict[str, bool]:
    """Return for each period whether all stages begin at the same place of it."""
    *begins, _ = accumulate(stages, initial=0)
    return {
        name: all(begin % every == 0 for begin in begins)
        for name, every in keys.items()
        if name != "dense_layers" and every > 0
    }


def _choices(
    model: Any, seq_len: int, keys: dict[str, int], cut: tuple[int, ...]
) -> Iterator[tuple[dict[str, int], list[tuple[bool, ...]], list[tuple[bool, ...]]]]:
    """Yield values of ``keys`` for a small model, the smallest first, and the kinds of its blocks.

    The last list has the kinds of the blocks of multi-token prediction. Of values that make the
    same blocks differ, the smallest are tried alone.
    """
    n_blocks, depths = sum(cut), min(model.mtp_layers, MOST_DEPTHS)
    # Whether each block has something, and the values with which it has.
    traits: list[dict[tuple[bool, ...], dict[str, int]]] = []
    for names, has in _TRAITS:
        own = [name for name in names if name in keys]
        by_marks: dict[tuple[bool, ...], dict[str, int]] = {}
        for values in product(*(_small_values(name, keys[name], cut) for name in own)):
            sizes = dict(zip(own, values, strict=True))
            small = replace(model, n_layers=n_blocks, **sizes)
            marks = tuple(has(small, block, seq_len) for block in range(n_blocks + depths))
            by_marks.setdefault(marks, sizes)
        traits.append(by_marks)

    choices = [
        ({key: value for _, sizes in choice for key, value in sizes.items()}, choice)
        for choice in product(*(by_marks.items() for by_marks in traits))
    ]
    for sizes, choice in sorted(choices, key=lambda each: sum(each[0].values())):
        all_kinds = list(zip(*(marks for marks, _ in choice), strict=True))
        yield sizes, all_kinds[:n_blocks], all_kinds[n_blocks:]


def _small_values(name: str, value: int, cut: tuple[int, ...]) -> list[int]:
    """Return the values of a key to try, of which none is above ``value``.

    A key that is 0, or a period of 1, stays so. No other one becomes so.
    """
    least = min(value, 1 if name == "dense_layers" else 2)
    # With a period that is longer than a stage, some stages lack such a block.
    most = min(value, 2 * max(cut) + 1, _LONGEST_PERIOD)
    values = [each for each in (*range(least, most + 1), value) if each <= sum(cut)]
    return sorted({*values}) or [least]
