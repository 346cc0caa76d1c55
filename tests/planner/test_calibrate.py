"""A run on a machine moves the predictions of its other runs, as far as they have in common."""

from math import log
from random import Random

import pytest

from composer3d.facts.calibration import PARTS, Observation
from composer3d.planner.calibrate import Calibration, observe
from composer3d.planner.intervals import SHIPPED_SPREADS, spread
from composer3d.planner.predict import predict
from composer3d.planner.time import predict_time
from tests.planner.setups import setup_on


def run_with(**parts: float) -> dict[str, float]:
    return {**dict.fromkeys(PARTS, 0.0), "source": 1.0, "layout": 1.0, **parts}


def test_the_error_of_another_run_is_what_draws_of_all_parts_say() -> None:
    """The formula is compared with draws of the parts' errors in which two runs err as observed."""
    values = SHIPPED_SPREADS.as_dict()
    runs = [run_with(tp=0.3), run_with(bubble=0.4, kin=1.0), run_with(tp=0.2, bubble=0.2)]
    observed = (0.05, -0.02)
    draw, kept = Random(0), []
    for _ in range(400_000):
        parts = {
            "tp": draw.gauss(0, values["collectives"]),
            "bubble": draw.gauss(0, values["bubble"]),
            "kin": draw.gauss(0, values["kin"]),
            "source": draw.gauss(0, values["source"]),
        }
        errors = [
            sum(run[part] * error for part, error in parts.items())
            + draw.gauss(0, values["layout"])
            for run in runs
        ]
        if all(abs(e - seen) < 0.008 for e, seen in zip(errors, observed, strict=False)):
            kept.append(errors[2])
    calibration = Calibration(tuple(map(Observation, observed, runs)))
    mean = sum(kept) / len(kept)
    deviation = (sum((error - mean) ** 2 for error in kept) / len(kept)) ** 0.5
    assert len(kept) > 2000
    assert calibration.expected(runs[2]) == pytest.approx(mean, abs=0.002)
    assert calibration.spread(runs[2]) == pytest.approx(deviation, rel=0.06)
    assert calibration.spread(runs[2]) < spread(runs[2])


def test_what_a_run_has_no_share_of_stays() -> None:
    calibration = Calibration((Observation(0.1, run_with(kin=1.0)),))
    assert calibration.error_of("tp") == 0
    assert 0 < calibration.error_of("source") < calibration.error_of("kin") < 0.1


def test_parts_move_and_add_up() -> None:
    setup = setup_on("B200", "llama3-70b-64-fsdp-tp")
    time = predict_time(setup)
    slow = observe(setup, 0.8 * setup.step_tokens / (time.step_s * setup.layout.world_size))
    assert slow.error == pytest.approx(0.2231, abs=1e-4)
    calibration = Calibration((slow,))
    moved = calibration.moved(time)
    # In the first order, the moved parts make up the expected error.
    assert log(moved.step_s / time.step_s) == pytest.approx(
        calibration.expected(slow.shares), rel=0.05
    )
    for part in ("recompute_s", "products_s", "attention_s", "head_s"):
        share = getattr(moved, part) / getattr(time, part)
        assert share == pytest.approx(moved.compute_s / time.compute_s)
    # What is exposed for long is blamed more than the rest.
    assert moved.exposed_s["dp"] / time.exposed_s["dp"] > moved.step_s / time.step_s
    assert 1.1 < moved.step_s / time.step_s < 1.25


def test_a_row_without_runs_changes_nothing() -> None:
    setup = setup_on("H100", "llama3-8b-8-fsdp")
    assert predict(setup).time == predict_time(setup)
