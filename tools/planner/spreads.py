"""Estimates how large errors are, and with what they grow, from rows that no fit has seen.

The spreads are those of a heavy-tailed distribution: a few rows are far off, and must not widen the
interval of all. Then a quantile makes the interval: as many spreads to each side as hold 80% of the
rows, counting one more row than there are, as in conformal prediction.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from composer3d.planner.intervals import MEANING, SHIPPED_SPREADS, Spreads

_TAIL = 4.0  # degrees of freedom of Student's t
_COVERED = 0.8
_TIME = ("source", "collectives", "bubble", "host", "nodes", "experts", "kin")
_MEMORY = ("states", "activations", "allocator")


class Error(NamedTuple):
    """The error of a row that was left out.

    Attributes:
        family: of its source.
        job: the rows of a job differ in their layout alone.
        log: log(predicted / measured).
        shares: of each spread, by name.
    """

    family: str
    job: object
    log: float
    shares: Mapping[str, float]


def estimate(time: Sequence[Error], memory: Sequence[Error]) -> Spreads:
    """Return the spreads that these errors have. Two stay, which no published row pins."""
    values = SHIPPED_SPREADS.as_dict()
    values |= _most_likely(time, _TIME)
    values["layout"] = _layout_spread(time, values)
    # All rows together have the spread of a source and of a layout.
    values["source"] = math.sqrt(
        max(MEANING["source"].low ** 2, values["source"] ** 2 - values["layout"] ** 2)
    )
    values |= _most_likely(memory, _MEMORY)
    with_experts = [error for error in time if error.shares.get("experts")]
    without = [error for error in time if not error.shares.get("experts")]
    values["quantile"] = _quantile(without, values)
    values["memory_quantile"] = _quantile(memory, values)
    if with_experts:
        values["experts"] = _experts_spread(with_experts, values)
    return Spreads(**values)


def _most_likely(errors: Sequence[Error], names: Sequence[str]) -> dict[str, float]:
    squares = _squares(errors, names)
    sizes = np.array([error.log for error in errors]) ** 2
    weights = _weights(errors)

    def loss(x: np.ndarray) -> float:
        variances = squares @ np.exp(2 * x)
        tails = (_TAIL + 1) * np.log1p(sizes / variances / _TAIL)
        return float((weights * (np.log(variances) + tails)).sum())

    low = np.log([MEANING[name].low for name in names])
    high = np.log([MEANING[name].high for name in names])
    x = _descend(loss, low, high)
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def _descend(loss: Callable[[np.ndarray], float], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Minimise by steps along each axis, within the ranges."""
    x = (low + high) / 2
    best, step = loss(x), 0.5
    while step > 0.005:
        improved = False
        for axis in range(len(x)):
            for sign in (1, -1):
                moved = x.copy()
                moved[axis] = np.clip(x[axis] + sign * step, low[axis], high[axis])
                found = loss(moved)
                if found < best:
                    x, best, improved = moved, found, True
        if not improved:
            step /= 2
    return x


def _squares(errors: Sequence[Error], names: Sequence[str]) -> np.ndarray:
    """Return the squared shares of each error, (rows, names). Axes add up their squares."""

    def square(shares: Mapping[str, float], name: str) -> float:
        if name == "collectives":
            return sum(shares.get(axis, 0.0) ** 2 for axis in ("tp", "cp", "ep", "dp"))
        return shares.get(name, 0.0) ** 2

    return np.array([[square(error.shares, name) for name in names] for error in errors])


def _layout_spread(errors: Sequence[Error], values: Mapping[str, float]) -> float:
    """Return the spread that is a layout's own, from pairs of layouts of one job.

    What collectives and pipelines explain of their difference is no part of it.
    """
    jobs: dict[object, list[Error]] = defaultdict(list)
    for error in errors:
        jobs[error.job].append(error)
    known = ("tp", "cp", "ep", "dp", "bubble", "host")
    found: list[tuple[float, float, float]] = []
    for members in jobs.values():
        for one, other in combinations(members, 2):
            explained = sum(
                ((one.shares[part] - other.shares[part]) * values[_of(part)]) ** 2 for part in known
            )
            explained += 2 * (one.shares["experts"] * values["experts"]) ** 2
            found.append(((one.log - other.log) ** 2, explained, 2 / len(members)))
    sizes, explained_by, weights = np.array(found).T

    def loss(x: np.ndarray) -> float:
        variances = 2 * math.exp(2 * x[0]) + explained_by
        tails = (_TAIL + 1) * np.log1p(sizes / variances / _TAIL)
        return float((weights * (np.log(variances) + tails)).sum())

    low, high = MEANING["layout"].low, MEANING["layout"].high
    return math.exp(_descend(loss, np.log([low]), np.log([high]))[0])


def _of(part: str) -> str:
    return "collectives" if part in ("tp", "cp", "ep", "dp") else part


def _quantile(errors: Sequence[Error], values: Mapping[str, float]) -> float:
    """Return how many spreads hold 80% of the rows."""
    held = _held_by_80(np.abs([error.log for error in errors]) / _widths(errors, values))
    return float(np.clip(held, MEANING["quantile"].low, MEANING["quantile"].high))


def _experts_spread(errors: Sequence[Error], values: Mapping[str, float]) -> float:
    """Return the spread of experts with which the same quantile holds 80% of their rows.

    They are few, and of other software, so that they do not make the quantile of all.
    """
    known = _widths(errors, {**values, "experts": 0.0})
    needed = (np.abs([error.log for error in errors]) / values["quantile"]) ** 2 - known**2
    held = math.sqrt(max(0.0, _held_by_80(needed)))
    return float(np.clip(held, MEANING["experts"].low, MEANING["experts"].high))


def _held_by_80(scores: np.ndarray) -> float:
    """Return what 80% of the scores do not exceed; the next one counts as one that does."""
    place = min(math.ceil(_COVERED * (len(scores) + 1)), len(scores)) - 1
    return float(np.sort(scores)[place])


def _widths(errors: Sequence[Error], values: Mapping[str, float]) -> np.ndarray:
    names = (*_TIME, "layout", "unseen", *_MEMORY)
    return np.sqrt(_squares(errors, names) @ np.array([values[name] for name in names]) ** 2)


def _weights(errors: Sequence[Error]) -> np.ndarray:
    """Weigh a row less if many others come from its source, as the fit of the constants does."""
    counts = Counter(error.family for error in errors)
    weights = np.array([counts[error.family] ** -0.35 for error in errors])
    return weights / weights.mean()
