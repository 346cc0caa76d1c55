"""Fits the constants of the cost model to published runs.

The logarithms of predictions are nearly linear in the logarithms of the constants. So a fit is a
few rounds: linearise all rows, solve, repeat. To leave a family of sources out, the linearised rows
of the others are solved again, which takes no time.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from composer3d.planner.constants import FITTED, PRIORS, Constants
from composer3d.planner.pipeline import Compiled, Path, critical_path
from composer3d.planner.simulate import StageTimes
from tools.planner.rows import Row, memory_gib, tokens_s

MEMORY_CONSTANTS = ("activation_share", "context_gib", "slack_share")
TIME_CONSTANTS = tuple(name for name in FITTED if name not in MEMORY_CONSTANTS)

_SCALE = 0.08  # errors above it count linearly, not by their square
_ROUNDS = 3
_STEP = 1e-3  # of a logarithm, for derivatives


class Linear(NamedTuple):
    """Errors of rows as linear functions of the logarithms of some constants.

    Attributes:
        rows: the rows.
        names: the constants.
        x: the logarithms of the constants at which the errors were computed.
        errors: log(predicted / measured) of each row at x.
        jacobian: the derivatives, (rows, constants).
    """

    rows: Sequence[Row]
    names: tuple[str, ...]
    x: np.ndarray
    errors: np.ndarray
    jacobian: np.ndarray

    def without(self, family: str) -> "Linear":
        """Return the rows of all other families."""
        kept = [index for index, row in enumerate(self.rows) if row.family != family]
        return self._replace(
            rows=[self.rows[index] for index in kept],
            errors=self.errors[kept],
            jacobian=self.jacobian[kept],
        )


class _LocalLengths:
    """Lengths of pipelines from their critical paths, which are found once for each row.

    The length is exact where the constants are those of the first call, and so is its gradient.
    """

    def __init__(self) -> None:
        self._paths: dict[tuple[str, int], Path] = {}
        self.row = ""

    def __call__(
        self, schedule: Compiled, times: Sequence[StageTimes], send_s: Sequence[float]
    ) -> float:
        key = (self.row, id(schedule))
        if key not in self._paths:
            self._paths[key] = critical_path(schedule, times, send_s)
        return self._paths[key].length_s(times, send_s)


def fit(rows: Sequence[Row]) -> Constants:
    """Fit all constants: those of time to tokens/s, and those of memory to peaks."""
    time, memory = linearised_fit(rows)
    return _constants([(time, time.x), (memory, memory.x)])


def fit_without_each_family(rows: Sequence[Row]) -> Mapping[str, Constants]:
    """Return the constants that the rows of all other families give, by family."""
    time, memory = linearised_fit(rows)
    found = {}
    for family in sorted({row.family for row in rows}):
        parts = [(part, solve(part.without(family))) for part in (time, memory)]
        found[family] = _constants(parts)
    return found


def linearised_fit(rows: Sequence[Row]) -> tuple[Linear, Linear]:
    """Return the rows linearised at the best constants, for time and for memory."""

    def time_error(row: Row, constants: Constants, lengths: _LocalLengths) -> float:
        return math.log(tokens_s(row, constants, lengths) / (row.tokens_s or 1))

    def memory_error(row: Row, constants: Constants, lengths: _LocalLengths) -> float:
        return math.log(memory_gib(row, constants) / (row.memory_gib or 1))

    found = []
    for names, error, measured in (
        (TIME_CONSTANTS, time_error, [row for row in rows if row.tokens_s]),
        (MEMORY_CONSTANTS, memory_error, [row for row in rows if row.memory_gib]),
    ):
        part = linearise(measured, names, np.log([FITTED[name].prior for name in names]), error)
        for _ in range(_ROUNDS - 1):
            part = linearise(measured, names, solve(part), error)
        found.append(part)
    time, memory = found
    return time, memory


def linearise(
    rows: Sequence[Row],
    names: tuple[str, ...],
    x: np.ndarray,
    error: Callable[[Row, Constants, _LocalLengths], float],
) -> Linear:
    """Compute the errors of rows, and their derivatives by finite differences, at ``x``."""
    lengths = _LocalLengths()

    def errors(at: np.ndarray) -> np.ndarray:
        constants = _with(names, at)
        found = []
        for row in rows:
            lengths.row = row.id
            found.append(error(row, constants, lengths))
        return np.array(found)

    now = errors(x)
    jacobian = np.empty((len(rows), len(names)))
    for column in range(len(names)):
        moved = x.copy()
        moved[column] += _STEP
        jacobian[:, column] = (errors(moved) - now) / _STEP
    return Linear(rows, names, x, now, jacobian)


def solve(part: Linear) -> np.ndarray:
    """Minimise soft errors and the distance from the priors, within the ranges.

    A range is two standard deviations to each side, so that little known constants move freely.

    Returns:
        The logarithms of the constants.
    """
    low = np.log([FITTED[name].low for name in part.names])
    high = np.log([FITTED[name].high for name in part.names])
    centre = np.log([FITTED[name].prior for name in part.names])
    width = (high - low) / 4
    weights = _weights(part.rows)
    x = np.clip(part.x, low, high)
    for _ in range(200):
        errors = (part.errors + part.jacobian @ (x - part.x)) / _SCALE
        # The loss 2 (sqrt(1 + e^2) - 1) has the weight 1 / sqrt(1 + e^2) of a square.
        soft = weights**2 / np.sqrt(1 + errors**2)
        scaled = part.jacobian / _SCALE
        gradient = scaled.T @ (soft * errors) + (x - centre) / width**2
        normal = scaled.T @ (soft[:, None] * scaled) + np.diag(1 / width**2)
        # Constants at the end of their range that would leave it stay there.
        stays = ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))
        free = np.flatnonzero(~stays)
        step = np.zeros_like(x)
        step[free] = -np.linalg.solve(normal[np.ix_(free, free)], gradient[free])
        moved = np.clip(x + step, low, high)
        if np.abs(moved - x).max() < 1e-6:
            break
        x = moved
    return x


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Weigh a row less if many others come from the same source and class of layouts."""
    counts = Counter((row.source, row.layout_class) for row in rows)
    weights = np.array([counts[row.source, row.layout_class] ** -0.35 for row in rows])
    return weights / weights.mean()


def _with(names: Sequence[str], x: np.ndarray) -> Constants:
    values = PRIORS.as_dict()
    values.update(zip(names, np.exp(x).tolist(), strict=True))
    return Constants(**values)


def _constants(parts: Sequence[tuple[Linear, np.ndarray]]) -> Constants:
    values = PRIORS.as_dict()
    for part, x in parts:
        values.update(zip(part.names, np.exp(x).tolist(), strict=True))
    return Constants(**values)
