"""Improves fast layouts by keys that the enumeration of layouts leaves unchanged.

Each further key would multiply the number of layouts. So these keys are tried only on layouts that
may become one of the fastest: the loss in chunks, checkpointing of some blocks, a larger
micro-batch, units of FSDP and the method of cp, then other cuts of the stages, and then
checkpointing of some stages. No torch here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from composer3d.planner.cut import Cutter
from composer3d.planner.intervals import Candidate
from composer3d.planner.layouts import Choices, is_legal
from composer3d.planner.memory import memory_of_ranks
from composer3d.planner.predict import fits, predict_speed
from composer3d.planner.setup import Setup
from composer3d.recipe.schema import Recipe
from composer3d.recipe.values import variant

# The most layouts whose stages are cut again, the most families that are tried with other keys, and
# the most layouts that are tried with checkpointing of some stages, in up to ten cuts each.
_MOST_CUT = 500
_MOST_FAMILIES = 16
_MOST_IN_PARTS = 48
# How many times as fast a cut must make a layout; and other keys, which make it more complex.
_LEAST_GAIN = 1.001
_LEAST_GAIN_OF_KEYS = 1.005
# How many stages of a pipeline to checkpoint, as parts of all.
_PARTS_OF_STAGES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)

_CHECKPOINT = "memory.activation_checkpoint"


class Timed(NamedTuple):
    """A layout, and its predicted speed."""

    recipe: Recipe
    setup: Setup
    speed: Candidate

    @property
    def tokens_s(self) -> float:
        """The predicted tokens per second per device."""
        return self.speed.tokens_s

    @property
    def fits(self) -> bool:
        """Whether it fits in memory. Each access predicts it again."""
        return fits(self.setup, memory_of_ranks(self.setup))

    @property
    def family(self) -> Recipe:
        """The recipe without checkpointing: equal for layouts that differ in nothing else."""
        return variant(self.recipe, {_CHECKPOINT: "none"})


class Levers:
    """Makes the fastest of some layouts faster.

    Args:
        setup_of: returns the setup of a recipe.
        top: the number of layouts that count. Layouts that cannot become one stay as they are.
        choices: the values to try.
        report: is called for each layout or family that is tried.
    """

    def __init__(
        self,
        setup_of: Callable[[Recipe], Setup],
        top: int,
        choices: Choices,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self._setup_of = setup_of
        self._top = top
        self._choices = choices
        self._report = report

    def improve(self, fitting: Iterable[Timed], near: Iterable[Timed] = ()) -> list[Timed]:
        """Return layouts that fit, the fastest first, improved by other keys and cuts.

        Args:
            fitting: layouts that fit.
            near: layouts that almost fit, which other keys may make fit.
        """
        with_keys = self.with_other_keys(_ranked(fitting), _ranked(near))
        return self.with_checkpointing_of_some_stages(self.with_other_cuts(with_keys))

    def with_other_keys(self, fitting: list[Timed], near: list[Timed]) -> list[Timed]:
        """Return the fitting layouts and faster ones of their families, the fastest first.

        A family is tried if its fastest layout that fits, or almost fits, is among the fastest.
        """
        found = {one.recipe: one for one in fitting}
        fastest: dict[Recipe, Timed] = {}
        for one in fitting:
            fastest.setdefault(one.family, one)
        families = list(fastest)[:_MOST_FAMILIES]
        families += list(dict.fromkeys(one.family for one in near))[:_MOST_FAMILIES]
        for family in dict.fromkeys(families):
            self._report()
            own = fastest.get(family)
            needed = self._needed(found.values())
            if own is not None:
                needed = max(needed, own.tokens_s * _LEAST_GAIN_OF_KEYS)
            better = self._fastest_of(family)
            if better is not None and better.tokens_s >= needed:
                found[better.recipe] = better
        return _ranked(found.values())

    def with_other_cuts(self, timed: list[Timed]) -> list[Timed]:
        """Return layouts, the fastest first, with better cuts of their stages where they help.

        Args:
            timed: layouts that fit, the fastest first, whose stages are cut by parameters.
        """
        found = list(timed)
        for index, one in enumerate(timed[:_MOST_CUT]):
            if one.setup.layout.pp == 1:
                continue
            needed = max(one.tokens_s * _LEAST_GAIN, self._needed(found))
            cutter = Cutter(one.setup)
            if one.tokens_s * cutter.most_gain(main_cut(one.setup)) < needed:
                continue
            self._report()
            cuts = ({"parallel.stages": cut} for cut in cutter.cuts())
            found[index] = self._fastest(one.recipe, cuts, one.tokens_s * _LEAST_GAIN) or one
        return _ranked(found)

    def with_checkpointing_of_some_stages(self, timed: list[Timed]) -> list[Timed]:
        """Return layouts, the fastest first; some of them now checkpoint only their first stages.

        The first stages keep the activations of the most micro-batches. If the others have memory
        for theirs, they compute nothing again, and take more blocks in the same time.

        Args:
            timed: layouts that fit, the fastest first.
        """
        found = list(timed)
        bounds = {
            index: self._bound_without_checkpointing(one)
            for index, one in enumerate(timed[:_MOST_CUT])
            if one.setup.layout.pp > 1 and one.recipe.memory.checkpointing.mode != "none"
        }
        for index in sorted(bounds, key=lambda index: -bounds[index])[:_MOST_IN_PARTS]:
            one = found[index]
            needed = max(one.tokens_s * _LEAST_GAIN_OF_KEYS, self._needed(found))
            if bounds[index] < needed:
                continue
            self._report()
            changes = self._changes_of_stages(one)
            found[index] = self._fastest(one.recipe, changes, needed) or one
        return _ranked(found)

    def _bound_without_checkpointing(self, one: Timed) -> float:
        """Return the tokens/s that no cut of a layout would exceed if it checkpointed nothing."""
        recipe = variant(one.recipe, {_CHECKPOINT: "none", "parallel.stages": None})
        setup = self._setup_of(recipe)
        gain = Cutter(setup).most_gain(main_cut(setup))
        return gain * predict_speed(setup).tokens_s

    def _changes_of_stages(self, one: Timed) -> list[dict[str, Any]]:
        """Return values of keys that checkpoint a part of a layout's stages, with cuts to match."""
        stages, checkpointing = one.setup.layout.stages, one.recipe.memory.checkpointing
        counts = {round(stages * part) for part in _PARTS_OF_STAGES}
        changes = []
        for count in sorted(counts & {*range(1, stages)}):
            change = {_CHECKPOINT: str(checkpointing.in_first(count)), "parallel.stages": None}
            cutter = Cutter(self._setup_of(variant(one.recipe, change)))
            changes += [change | {"parallel.stages": cut} for cut in cutter.cuts()]
        return changes

    def _needed(self, found: Iterable[Timed]) -> float:
        """Return the tokens/s that a layout needs to be among the fastest ``top``."""
        speeds = sorted((one.tokens_s for one in found), reverse=True)
        return speeds[self._top - 1] if len(speeds) >= self._top else 0.0

    def _fastest_of(self, family: Recipe) -> Timed | None:
        """Return the fastest layout of a family with other keys; None if none fits."""
        choices, parallel, memory = self._choices, family.parallel, family.memory
        micro_batch = family.data.micro_batch
        is_largest = micro_batch == max(choices.micro_batches)
        values = {
            "data.micro_batch": (micro_batch, 2 * micro_batch)[: 1 + is_largest],
            _CHECKPOINT: (*choices.checkpoints, *choices.further_checkpoints),
            "memory.loss_chunks": (memory.loss_chunks, *choices.loss_chunks),
            "parallel.cp_method": (parallel.cp_method, *choices.cp_methods * (family.mesh.cp > 1)),
        }
        found = self._fastest(family, _combinations(values))
        if found is None:
            return None
        # Larger units need memory that the other keys must leave free.
        units = _combinations({"parallel.fsdp_blocks": choices.fsdp_blocks})
        faster = self._fastest(found.recipe, units, found.tokens_s * _LEAST_GAIN_OF_KEYS)
        return faster or found

    def _fastest(
        self, recipe: Recipe, changes: Iterable[Mapping[str, Any]], needed: float = 0.0
    ) -> Timed | None:
        """Return the fastest legal variant that fits and reaches ``needed`` tokens/s; else None.

        Memory takes longer to predict than time. So memory is predicted for the fastest variants
        first, until one fits.
        """
        timed = []
        for change in changes:
            other = variant(recipe, change)
            if is_legal(other):
                setup = self._setup_of(other)
                timed.append(Timed(other, setup, predict_speed(setup)))
        fast = (one for one in _ranked(timed) if one.tokens_s >= needed)
        return next((one for one in fast if one.fits), None)


def main_cut(setup: Setup) -> tuple[int, ...]:
    """Return the cut of a setup in the form of ``parallel.stages``."""
    *others, last = setup.layout.stage_blocks
    return (*others, last - setup.sizes.mtp_layers)


def _combinations(values: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    for chosen in product(*(dict.fromkeys(of_key) for of_key in values.values())):
        yield dict(zip(values, chosen, strict=True))


def _ranked(timed: Iterable[Timed]) -> list[Timed]:
    return sorted(timed, key=lambda one: -one.tokens_s)
