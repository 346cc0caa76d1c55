"""How sure a prediction is: 80% intervals, and whether a layout fits, or is as fast as the best.

An error is the logarithm of predicted / measured. Its spread grows with what a prediction knows
little of: the visible time of collectives, waiting for a pipeline, more than one node, experts, a
device that no training run was seen on. ``tools/planner_fit.py --spreads`` estimates each spread
from the errors on published runs that were left out of the fit, source by source. No torch here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import erf, exp, hypot, log, sqrt
from random import Random
from typing import NamedTuple

from composer3d.planner.memory import RankMemory
from composer3d.planner.setup import Setup
from composer3d.planner.time import StepTime


class Interval(NamedTuple):
    """Where four of five measured values are expected."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Spreads:
    """One value for each spread. ``MEANING`` says what they mean."""

    source: float
    layout: float
    collectives: float
    bubble: float
    host: float
    nodes: float
    experts: float
    kin: float
    unseen: float
    quantile: float
    states: float
    activations: float
    allocator: float
    ours: float
    memory_quantile: float

    def as_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


class Spread(NamedTuple):
    """What a spread means.

    Attributes:
        low, high: its plausible range; an estimate cannot leave it.
        meaning: what it is the spread of, as a share.
        pinned_by: the errors that determine it.
    """

    low: float
    high: float
    meaning: str
    pinned_by: str


MEANING: dict[str, Spread] = {
    "source": Spread(
        0.01, 0.1, "of a whole run: software and machine, the same for all layouts", "all rows"
    ),
    "layout": Spread(
        0.005, 0.1, "of a layout, beside another one of the same job", "sweeps of layouts"
    ),
    "collectives": Spread(
        0.02, 0.6, "of the visible time of the collectives of an axis", "rows with tp, cp, ep, dp"
    ),
    "bubble": Spread(0.02, 0.6, "of the time that a pipeline waits", "rows with pp"),
    "host": Spread(0.05, 1.0, "of the time of the host, and of stragglers", "rows of short steps"),
    "nodes": Spread(0.002, 0.1, "of runs on several nodes", "rows on one node, and on several"),
    "experts": Spread(0.02, 0.8, "of layouts of a model with experts", "published_moe.csv"),
    "kin": Spread(
        0.02, 0.3, "of a device of a generation that few runs were seen on", "rows on B200, GB200"
    ),
    "unseen": Spread(
        0.05,
        0.5,
        "of a device of a generation without rows, whose products doctor has not measured",
        "the first predictions of A100 and H100, 7% and 4% wrong, and of B200, 31%",
    ),
    "quantile": Spread(
        1.0, 2.5, "the spreads that an 80% interval has to each side", "the errors of time"
    ),
    "states": Spread(
        0.005, 0.1, "of the peak of memory: what is counted exactly, and buffers", "rows of memory"
    ),
    "activations": Spread(
        0.02, 0.6, "of the part of the peak that is no state of a parameter", "rows of memory"
    ),
    "allocator": Spread(
        0.05, 1.0, "of what the allocator and CUDA's context add", "rows of reserved memory"
    ),
    "ours": Spread(
        0.01,
        0.1,
        "of the peak of a recipe of ours, whose moments are counted",
        "steps in docs/gpu.md, and the 5% of tools/memory_agreement.py",
    ),
    "memory_quantile": Spread(
        1.0, 2.5, "the spreads that an 80% interval has to each side", "the errors of memory"
    ),
}

# Estimated by ``tools/planner_fit.py --spreads`` from the published measurements.
SHIPPED_SPREADS = Spreads(
    source=0.0233,
    layout=0.0272,
    collectives=0.189,
    bubble=0.145,
    host=0.377,
    nodes=0.0154,
    experts=0.26,
    kin=0.0455,
    unseen=0.16,
    quantile=1.44,
    states=0.005,
    activations=0.0997,
    allocator=0.323,
    ours=0.03,
    memory_quantile=1.52,
)

_QUANTILE_80 = 1.2816  # of a normal distribution: 80% of it are nearer to its centre
# Layouts that are compared with the first one, and the draws of their errors: more change nothing.
_MOST_COMPARED = 32
_DRAWS = 1000
_AXES = ("tp", "cp", "ep", "dp")
# Generations with published runs, if not on this very device.
_SEEN = ("ampere", "hopper", "blackwell")


def shares(setup: Setup, time: StepTime) -> dict[str, float]:
    """Return how much of each spread of time a prediction has, by name.

    Spreads of collectives are those of the axes, each with its own.
    """
    hardware, layout = setup.machine.hardware, setup.layout
    step_s = time.step_s
    found = {axis: min(1.0, time.exposed_s.get(axis, 0.0) / step_s) for axis in _AXES}
    found |= {
        "source": 1.0,
        "layout": 1.0,
        "bubble": time.bubble_s / step_s,
        "host": time.overhead_s / step_s,
        "nodes": float(layout.world_size > setup.machine.devices_per_node),
        "experts": float(setup.sizes.expert_blocks > 0),
        "kin": 0.0,
        "unseen": 0.0,
    }
    if not hardware.is_fitted:
        is_kin = hardware.generation in _SEEN or hardware.is_measured
        found["kin" if is_kin else "unseen"] = 1.0
    return found


def spread(found: Mapping[str, float], spreads: Spreads = SHIPPED_SPREADS) -> float:
    """Return the spread of a prediction of time, as a share, from its ``shares``."""
    values = spreads.as_dict()
    return sqrt(sum((share * values[name_of(part)]) ** 2 for part, share in found.items()))


def name_of(part: str) -> str:
    """Return the name of the spread of a part: the axes share one."""
    return "collectives" if part in _AXES else part


def memory_shares(rank: RankMemory, counted_bytes: float) -> dict[str, float]:
    """Return how much of each spread of memory a peak of another program has, by name.

    ``counted_bytes`` are those that were measured: allocated, reserved, or all of the device's.
    """
    exact = rank.weights + rank.gradients + rank.optimizer
    counted = max(1.0, counted_bytes)
    return {
        "states": 1.0,
        "activations": (rank.allocated_bytes - exact) / counted,
        "allocator": max(0.0, counted_bytes - rank.allocated_bytes) / counted,
    }


def around(value: float, spread_of_it: float, quantile: float) -> Interval:
    """Return the 80% interval around a predicted value with this spread."""
    factor = exp(quantile * spread_of_it)
    return Interval(value / factor, value * factor)


def fits_probability(needed: float, limit: float, spreads: Spreads = SHIPPED_SPREADS) -> float:
    """Return the probability that a recipe of ours fits.

    Args:
        needed: what the rank that needs most needs, in the unit of ``limit``. The others run the
            same program, so that all err alike.
        limit: the memory of the device.
        spreads: the spreads.
    """
    return _normal(log(limit / needed) / deviation(spreads.ours, spreads.memory_quantile))


def faster_probability(
    ratio: float, spread_of_it: float, spreads: Spreads = SHIPPED_SPREADS
) -> float:
    """Return the probability that a layout is faster than another one.

    Args:
        ratio: the predicted time of the other one, as a multiple of its own.
        spread_of_it: the spread of the error of ``ratio``.
        spreads: the spreads.
    """
    if spread_of_it == 0:
        return 0.5 * (1 + (ratio > 1) - (ratio < 1))
    return _normal(log(ratio) / deviation(spread_of_it, spreads.quantile))


def deviation(spread_of_it: float, quantile: float) -> float:
    """Return the standard deviation of a normal error whose 80% interval is as wide."""
    return spread_of_it * quantile / _QUANTILE_80


def _normal(z: float) -> float:
    return 0.5 * (1 + erf(z / sqrt(2)))


class Candidate(NamedTuple):
    """A layout in a comparison: its predicted tokens/s, and its ``shares``."""

    tokens_s: float
    shares: Mapping[str, float]


def close_probability(
    candidates: Sequence[Candidate],
    within: float = 0.03,
    spreads: Spreads = SHIPPED_SPREADS,
    *,
    draw_errors: Callable[[Random], Mapping[str, float]] | None = None,
) -> float:
    """Return the probability that the first candidate is at most ``within`` slower than the best.

    What all layouts of a job have in common cancels. The spread of an axis is the same for all:
    layouts with the same visible time of its collectives err alike. What is left is each layout's
    own. The draws are the same in every call.

    Args:
        candidates: the layouts; the first one is the one in question.
        within: how much slower it may be.
        spreads: the spreads.
        draw_errors: draws errors of the parts of the machine; None: each by its spread alone.
    """
    values = spreads.as_dict()
    draw = Random(0)
    scale = deviation(1.0, spreads.quantile)
    chosen = candidates[:_MOST_COMPARED]
    speeds = [log(one.tokens_s) for one in chosen]
    own = [
        scale * hypot(values["layout"], one.shares["experts"] * values["experts"]) for one in chosen
    ]
    common = [part for part in (*_AXES, "bubble", "host") if any(c.shares[part] for c in chosen)]

    def by_spreads(draw: Random) -> dict[str, float]:
        return {part: scale * values[name_of(part)] * draw.gauss(0, 1) for part in common}

    hits = 0
    for _ in range(_DRAWS):
        errors = (draw_errors or by_spreads)(draw)
        real = [
            speed + sum(one.shares[part] * errors[part] for part in common) + draw.gauss(0, width)
            for speed, one, width in zip(speeds, chosen, own, strict=True)
        ]
        hits += real[0] >= max(real) + log(1 - within)
    return hits / _DRAWS
