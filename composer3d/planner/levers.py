"""Improves layouts that are fast already by what the enumeration of layouts leaves out.

Each further lever would multiply the number of layouts. So it is tried on those layouts alone that
it may make one of the fastest. No torch here.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

from composer3d.planner.cut import Cutter
from composer3d.planner.intervals import Candidate
from composer3d.planner.layouts import is_legal
from composer3d.planner.memory import memory_of_ranks
from composer3d.planner.predict import fits, predict_speed
from composer3d.planner.setup import Setup
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant

_MOST_TRIED = 500
_LEAST_GAIN = 1.001


class Timed(NamedTuple):
    """A layout that fits, and its predicted speed."""

    recipe: Recipe
    setup: Setup
    speed: Candidate

    @property
    def tokens_s(self) -> float:
        """The predicted tokens per second and device."""
        return self.speed.tokens_s


def improve(
    timed: Sequence[Timed],
    setup_of: Callable[[Recipe], Setup],
    top: int,
    report: Callable[[], None] = lambda: None,
) -> list[Timed]:
    """Return the layouts, the fastest first, with better cuts of their stages where they help.

    Args:
        timed: layouts that fit, the fastest first, whose stages are cut by their parameters.
        setup_of: returns the setup of a recipe.
        top: the number of layouts that count. What cannot become one of them stays as it is.
        report: is called for each layout that is tried.
    """
    speeds = sorted(one.tokens_s for one in timed)
    found = list(timed)
    for index, one in enumerate(timed[:_MOST_TRIED]):
        if one.setup.layout.pp == 1:
            continue
        needed = max(one.tokens_s * _LEAST_GAIN, speeds[-top] if len(speeds) >= top else 0.0)
        cutter = Cutter(one.setup)
        if one.tokens_s * cutter.most_gain(main_cut(one.setup)) < needed:
            continue
        report()
        better = _with_faster_cut(one, cutter, setup_of)
        if better is not None:
            found[index] = better
            insort(speeds, better.tokens_s)
    return sorted(found, key=lambda one: -one.tokens_s)


def main_cut(setup: Setup) -> tuple[int, ...]:
    """Return the cut of a setup, as ``parallel.stages`` would say it."""
    *others, last = setup.layout.stage_blocks
    return (*others, last - setup.sizes.mtp_layers)


def _with_faster_cut(
    one: Timed, cutter: Cutter, setup_of: Callable[[Recipe], Setup]
) -> Timed | None:
    """Return a layout with the fastest cut of those that fit; None: its own is as fast."""
    faster = []
    for cut in cutter.cuts():
        recipe = variant(one.recipe, {"parallel.stages": cut})
        if is_legal(recipe):
            setup = setup_of(recipe)
            speed = predict_speed(setup)
            if speed.tokens_s > _LEAST_GAIN * one.tokens_s:
                faster.append(Timed(recipe, setup, speed))
    faster.sort(key=lambda other: -other.tokens_s)
    return next(
        (other for other in faster if fits(other.setup, memory_of_ranks(other.setup))), None
    )
