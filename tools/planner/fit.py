"""Fits the constants of the cost model to published runs."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from composer3d.planner.constants import FITTED, PRIORS, Constants
from composer3d.planner.pipeline import Compiled, Path, critical_path
from composer3d.planner.simulate import StageTimes
from tools.planner.rows import Row, memory_gib, tokens_s

TIME_CONSTANTS = tuple(
    name
    for name in FITTED
    if name not in ("activation_share", "context_gib", "slack_share")
)
MEMORY_CONSTANTS = tuple(name for name in FITTED if name not in TIME_CONSTANTS)

_SCALE = 0.08  # errors above it count linearly, not by their square
_PRIOR_WIDTH = 0.25  # of the logarithm
_ROUNDS = 2
_STEPS = 5


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
    return fit_memory(rows, fit_time(rows))


def fit_time(rows: Sequence[Row], start: Constants = PRIORS) -> Constants:
    """Fit the constants of time to the rows that give tokens/s."""
    measured = [row for row in rows if row.tokens_s]

    def errors(constants: Constants, lengths: _LocalLengths) -> list[float]:
        found = []
        for row in measured:
            lengths.row = row.id
            found.append(math.log(tokens_s(row, constants, lengths) / (row.tokens_s or 1)))
        return found

    return _fit(TIME_CONSTANTS, errors, _weights(measured), start)


def fit_memory(rows: Sequence[Row], start: Constants = PRIORS) -> Constants:
    """Fit the constants of memory to the rows that give a peak."""
    measured = [row for row in rows if row.memory_gib]

    def errors(constants: Constants, lengths: _LocalLengths) -> list[float]:
        return [math.log(memory_gib(row, constants) / (row.memory_gib or 1)) for row in measured]

    return _fit(MEMORY_CONSTANTS, errors, _weights(measured), start)


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Weigh a row less if many others come from the same source and class of layouts."""
    counts = Counter((row.source, row.layout_class) for row in rows)
    weights = np.array([counts[row.source, row.layout_class] ** -0.35 for row in rows])
    return weights / weights.mean()


def _fit(
    names: Sequence[str],
    errors: Callable[[Constants, _LocalLengths], list[float]],
    weights: np.ndarray,
    start: Constants,
) -> Constants:
    """Minimise soft errors and the distance from the priors, by Levenberg and Marquardt.

    Args:
        names: the constants that move.
        errors: the logarithms of predicted over measured.
        weights: one for each error.
        start: the other constants, and the first values.
    """
    low = np.log([FITTED[name].low for name in names])
    high = np.log([FITTED[name].high for name in names])
    centre = np.log([FITTED[name].prior for name in names])
    width = np.minimum(_PRIOR_WIDTH, (high - low) / 4)
    values = start.as_dict()

    def residuals(x: np.ndarray, lengths: _LocalLengths) -> np.ndarray:
        constants = Constants(**{**values, **dict(zip(names, np.exp(x).tolist(), strict=True))})
        scaled = np.array(errors(constants, lengths)) / _SCALE
        soft = np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))
        return np.concatenate([weights * soft, (x - centre) / width])

    x = np.clip(np.log([values[name] for name in names]), low, high)
    for _ in range(_ROUNDS):
        # The critical paths of pipelines are found anew for each round.
        lengths = _LocalLengths()
        now = residuals(x, lengths)
        damping = 1e-2
        for _ in range(_STEPS):
            jacobian = np.empty((len(now), len(x)))
            for column in range(len(x)):
                moved = x.copy()
                step = 1e-3 if moved[column] + 1e-3 <= high[column] else -1e-3
                moved[column] += step
                jacobian[:, column] = (residuals(moved, lengths) - now) / step
            before = now @ now
            for _ in range(6):
                normal = jacobian.T @ jacobian
                normal += damping * np.diag(np.diag(normal))
                candidate = np.clip(x - np.linalg.solve(normal, jacobian.T @ now), low, high)
                found = residuals(candidate, lengths)
                if found @ found < before:
                    x, now, damping = candidate, found, damping / 4
                    break
                damping *= 4
            if before - now @ now < 1e-3 * before:
                break
    return Constants(**{**values, **dict(zip(names, np.exp(x).tolist(), strict=True))})
