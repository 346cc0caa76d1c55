"""Compares two layouts of a job term by term, in step time and in memory.

The terms of time add up to the step, so their differences add up to the difference in step time. No
torch here.
"""

from typing import NamedTuple

from composer3d.planner.calibrate import Calibration
from composer3d.planner.intervals import (
    SHIPPED_SPREADS,
    Interval,
    around,
    faster_probability,
    shares,
)
from composer3d.planner.memory import RankMemory
from composer3d.planner.predict import Prediction
from composer3d.planner.search import Device, Plan
from composer3d.planner.time import StepTime, predict_time

# The kinds that a dry run can count. All others are a share of them, or equal for all layouts.
MEMORY_KINDS = (
    "weights", "gradients", "optimizer", "gathered", "buffers", "activations", "logits",
)  # fmt: skip


class Comparison(NamedTuple):
    """Two layouts of the same job, and how they differ.

    Attributes:
        plans: both layouts, with their predictions.
        terms: the seconds of each term of a step, for both; they add up to the step.
        bytes: by kind, the bytes that the pipeline rank with the largest need allocates, for both.
        more_s: how many seconds longer a step of the second takes than one of the first.
        more_s_80: the 80% interval of ``more_s``, if a step of the first takes as long as
            predicted. Errors that both layouts share cancel.
        first_is_faster: the probability that the first is faster.
        decisive: the term whose difference makes up most of ``more_s``.
    """

    plans: tuple[Plan, Plan]
    terms: dict[str, tuple[float, float]]
    bytes: dict[str, tuple[float, float]]
    more_s: float
    more_s_80: Interval
    first_is_faster: float
    decisive: str


def compare(first: Plan, second: Plan, device: Device) -> Comparison:
    """Compare two layouts of the same job on the same devices.

    Raises:
        PlanError: a schedule cannot run with these numbers.
        DeviceError: the device has no rate for the type of the products.
    """
    times = first.prediction.time, second.prediction.time
    of_both = [terms_of(time) for time in times]
    terms = {name: (of_both[0][name], of_both[1][name]) for name in of_both[0]}
    more_s = times[1].step_s - times[0].step_s
    ratio = times[1].step_s / times[0].step_s
    spread = _spread_between(first, second, device)
    low, high = around(ratio, spread, SHIPPED_SPREADS.quantile)
    ranks = [_largest(plan.prediction) for plan in (first, second)]
    sign = 1 if more_s >= 0 else -1
    return Comparison(
        plans=(first, second),
        terms=terms,
        bytes={kind: (getattr(ranks[0], kind), getattr(ranks[1], kind)) for kind in MEMORY_KINDS},
        more_s=more_s,
        more_s_80=Interval(times[0].step_s * (low - 1), times[0].step_s * (high - 1)),
        first_is_faster=faster_probability(ratio, spread),
        decisive=max(terms, key=lambda name: sign * (terms[name][1] - terms[name][0])),
    )


def terms_of(time: StepTime) -> dict[str, float]:
    """Return the terms of a step in seconds, by name. They add up to the step time."""
    named_s = time.recompute_s + time.uneven_s + time.products_s + time.attention_s + time.head_s
    return {
        "products of blocks": time.products_s,
        "attention": time.attention_s,
        "other kernels of blocks": time.compute_s - named_s,
        "head and loss": time.head_s,
        "uneven stages": time.uneven_s,
        "recomputed": time.recompute_s,
        "collectives of tp": time.exposed_s["tp"],
        "keys and values of cp": time.exposed_s["cp"],
        "all-to-all of experts": time.exposed_s["ep"],
        "FSDP and replicas": time.exposed_s["dp"],
        "pipeline wait": time.bubble_s,
        "optimizer": time.optimizer_s,
        "host": time.host_s,
        "stragglers": time.overhead_s - time.host_s,
    }


def _spread_between(first: Plan, second: Plan, device: Device) -> float:
    """Return the spread of the ratio of both times; 0 if the layouts are equal."""
    if first.recipe == second.recipe:
        return 0.0
    runs = []
    for plan in (first, second):
        setup = device.setup(plan.recipe)
        # The calibration is applied below, so the shares are predicted without it.
        runs.append(shares(setup, predict_time(setup)))
    return Calibration(device.hardware.calibration).spread_between(*runs)


def _largest(prediction: Prediction) -> RankMemory:
    return prediction.memory[prediction.largest_rank]
