"""Moves predictions by what runs on the same machine measured. No torch here.

Each part of a prediction has an error of its own, with a known spread (``intervals``). A run
measures their weighted sum, and its own chance. So the expected error of each part follows, as does
the spread that is left: parts that made up most of the run's spread are known now, the others are
as unknown as before. This is the conditional distribution of normal errors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, sqrt
from random import Random

from composer3d.facts.calibration import MOST_ERROR, PARTS, Observation
from composer3d.facts.errors import UserError
from composer3d.planner.intervals import SHIPPED_SPREADS, Spreads, deviation, name_of, shares
from composer3d.planner.setup import Setup
from composer3d.planner.time import StepTime, predict_time
from composer3d.planner.trained import has_frozen
from composer3d.recipe.schema import Recipe

_AXES = ("tp", "cp", "ep", "dp")
_OF_LAYOUT = ("layout", "experts")
# What a machine's runs have in common.
_OF_MACHINE = tuple(part for part in PARTS if part not in _OF_LAYOUT)
# These make all parts of a step longer or shorter.
_OF_ALL = ("source", "nodes", "kin", "unseen")


@dataclass(frozen=True)
class Calibration:
    """What some runs on a machine say of its other runs.

    Attributes:
        observed: the runs.
        spreads: those of errors before any run was seen.
    """

    observed: tuple[Observation, ...]
    spreads: Spreads = SHIPPED_SPREADS

    @cached_property
    def _variances(self) -> dict[str, float]:
        values = self.spreads.as_dict()
        return {part: values[name_of(part)] ** 2 for part in PARTS}

    def _shared(self, one: Mapping[str, float], other: Mapping[str, float]) -> float:
        """Return the covariance of the errors of two runs on the machine."""
        return sum(one[part] * other[part] * self._variances[part] for part in _OF_MACHINE)

    def _own(self, run: Mapping[str, float]) -> float:
        return sum(run[part] ** 2 * self._variances[part] for part in _OF_LAYOUT)

    def _solve(self, right: Sequence[float]) -> list[float]:
        """Multiply by the inverse of the covariances of the observed runs."""
        rows = [
            [
                self._shared(one.shares, other.shares) + (self._own(one.shares) if i == j else 0.0)
                for j, other in enumerate(self.observed)
            ]
            + [right[i]]
            for i, one in enumerate(self.observed)
        ]
        return _eliminate(rows)

    @cached_property
    def _weights(self) -> list[float]:
        return self._solve([observation.error for observation in self.observed])

    def error_of(self, part: str) -> float:
        """Return the expected log(predicted / measured) of a part, as tokens per second."""
        return self._variances[part] * sum(
            weight * observation.shares[part]
            for weight, observation in zip(self._weights, self.observed, strict=True)
        )

    def expected(self, run: Mapping[str, float]) -> float:
        """Return the expected log(predicted / measured) of another run."""
        return sum(run[part] * self.error_of(part) for part in _OF_MACHINE if run[part])

    def spread(self, run: Mapping[str, float]) -> float:
        """Return the spread that the error of another run has left."""
        return sqrt(self._variance_left(run) + self._own(run))

    def spread_between(self, one: Mapping[str, float], other: Mapping[str, float]) -> float:
        """Return the spread of the error of the ratio of two runs, each with its ``shares``.

        What both have in common cancels: the machine, and the collectives of an axis, the bubble
        and the host, as far as both spend the same share of a step on them.
        """
        apart = {part: one[part] - other[part] for part in _OF_MACHINE}
        return sqrt(self._variance_left(apart) + self._own(one) + self._own(other))

    def _variance_left(self, run: Mapping[str, float]) -> float:
        """Return the variance of what a run has of the machine's errors, beside the known part."""
        known = [self._shared(run, observation.shares) for observation in self.observed]
        explained = sum(a * b for a, b in zip(known, self._solve(known), strict=True))
        return max(0.0, self._shared(run, run) - explained)

    @cached_property
    def _gains(self) -> dict[str, list[float]]:
        """By part, how much of the error of each observed run is taken for an error of the part."""
        return {
            part: self._solve([self._variances[part] * run.shares[part] for run in self.observed])
            for part in _OF_MACHINE
        }

    def draw_errors(self, draw: Random) -> dict[str, float]:
        """Draw the errors of the machine's parts that are left when their known part is taken out.

        Errors are drawn as if no run was seen, and with them what the observed runs would show.
        What these would then say of each part is taken off: the rest has the spread that is left.
        """
        scale = deviation(1.0, self.spreads.quantile)

        def error(variance: float) -> float:
            return scale * sqrt(variance) * draw.gauss(0, 1)

        errors = {part: error(self._variances[part]) for part in _OF_MACHINE}
        shown = [
            sum(run.shares[part] * errors[part] for part in _OF_MACHINE)
            + error(self._own(run.shares))
            for run in self.observed
        ]
        return {
            part: errors[part] - sum(a * b for a, b in zip(self._gains[part], shown, strict=True))
            for part in _OF_MACHINE
        }

    def moved(self, time: StepTime) -> StepTime:
        """Return a predicted time with the expected error of each part taken out."""
        # Too many tokens/s are too short a time.
        factor = {part: exp(self.error_of(part)) for part in (*_AXES, "bubble", "host")}
        all_of_it = exp(sum(map(self.error_of, _OF_ALL)))
        exposed = {axis: seconds * factor[axis] for axis, seconds in time.exposed_s.items()}
        bubble_s, overhead_s = time.bubble_s * factor["bubble"], time.overhead_s * factor["host"]
        added_s = sum(exposed.values()) - sum(time.exposed_s.values())
        added_s += bubble_s - time.bubble_s + overhead_s - time.overhead_s
        return replace(
            time,
            step_s=all_of_it * (time.step_s + added_s),
            compute_s=all_of_it * time.compute_s,
            recompute_s=all_of_it * time.recompute_s,
            bubble_s=all_of_it * bubble_s,
            exposed_s={axis: all_of_it * seconds for axis, seconds in exposed.items()},
            optimizer_s=all_of_it * time.optimizer_s,
            overhead_s=all_of_it * overhead_s,
            uneven_s=all_of_it * time.uneven_s,
            products_s=all_of_it * time.products_s,
            attention_s=all_of_it * time.attention_s,
            head_s=all_of_it * time.head_s,
            host_s=all_of_it * factor["host"] * time.host_s,
        )


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Solve a positive definite system by Gauss's method; each row ends with its right side."""
    size = len(rows)
    for pivot in range(size):
        for row in rows[pivot + 1 :]:
            factor = row[pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                row[column] -= factor * rows[pivot][column]
    found = [0.0] * size
    for pivot in reversed(range(size)):
        known = sum(rows[pivot][column] * found[column] for column in range(pivot + 1, size))
        found[pivot] = (rows[pivot][size] - known) / rows[pivot][pivot]
    return found


def problem_of(recipe: Recipe) -> str:
    """Return in words why a run of a recipe says nothing of its machine; empty if it does.

    Such a run does less than is predicted, so that the machine would look faster than it is.
    """
    if has_frozen(recipe):
        return "optim.train leaves parameters out, but the prediction is for training all of them"
    packing = recipe.data.packing
    if packing != "none":
        words = "attention then stays within documents, but the prediction is for whole samples"
        return f'data.packing = "{packing}": {words}'
    return ""


def observe(setup: Setup, tokens_s: float) -> Observation:
    """Return what a run says that reached ``tokens_s`` tokens per second and device.

    Raises:
        UserError: it is so far from the prediction that it must be another unit or another run.
    """
    time = predict_time(setup)
    predicted = setup.step_tokens / (time.step_s * setup.layout.world_size)
    error = log(predicted / tokens_s)
    if abs(error) > MOST_ERROR:
        devices = setup.layout.world_size
        raise UserError(
            f"{tokens_s * devices:,.6g} tokens/s of {devices:,} devices are {1 / exp(error):.3g} "
            f"times the predicted {predicted * devices:,.6g}; give those of all devices together, "
            "of a run of this recipe on this device"
        )
    return Observation(error, shares(setup, time))


def learned(setup: Setup, time: StepTime) -> tuple[StepTime, float]:
    """Return a predicted time and its spread, after the runs that the row of the device has."""
    observed = setup.machine.hardware.calibration
    calibration = Calibration(observed)
    run = shares(setup, time)
    return calibration.moved(time) if observed else time, calibration.spread(run)
