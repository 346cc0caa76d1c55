"""A run on a machine moves the predictions of its other runs, as far as they have in common."""

from math import log
from random import Random

import pytest

from composer3d.facts.calibration import PARTS, Observation
from composer3d.planner.calibrate import Calibration, observe
from composer3d.planner.intervals import (
    SHIPPED_SPREADS,
    Candidate,
    close_probability,
    faster_probability,
    spread,
)
from composer3d.planner.layouts import Choices
from composer3d.planner.predict import predict
from composer3d.planner.search import Device, search
from composer3d.planner.time import predict_time
from tests.planner.setups import device, recipe_of, setup_on


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


def test_the_closeness_of_layouts_is_that_of_the_spread_that_is_left() -> None:
    """Runs with collectives of tp tell layouts with and without them apart."""
    runs = tuple(Observation(0.0, run_with(tp=share)) for share in (0.1, 0.3, 0.5, 0.5))
    first, second = (
        Candidate(100.0, run_with(experts=0.0, host=0.1)),
        Candidate(96.0, run_with(experts=0.0, tp=0.4)),
    )
    found = []
    for seen in ((), runs):
        calibration = Calibration(seen)
        draws = close_probability([first, second], 0.0, draw_errors=calibration.draw_errors)
        spread_between = calibration.spread_between(first.shares, second.shares)
        assert draws == pytest.approx(faster_probability(100 / 96, spread_between), abs=0.03)
        found.append(draws)
    assert found[1] > found[0] + 0.05
    assert found[0] == pytest.approx(close_probability([first, second], 0.0), abs=0.05)


def test_a_plan_is_surer_of_its_first_layout_after_runs_with_collectives_and_bubbles() -> None:
    sets = ("data.seq_len=1024", "mesh.dp_shard=64", "data.global_batch=64")
    recipe = recipe_of("llama3-8b-8-fsdp", *sets)
    choices = Choices(
        schedules=("1F1B",),
        checkpoints=("none",),
        micro_batches=(1,),
        further_checkpoints=(),
        loss_chunks=(1,),
        fsdp_blocks=(1,),
    )
    many = [Observation(0.0, run_with(**{part: 0.6})) for part in ("tp", "dp", "bubble")] * 4
    close = []
    for runs in ((), tuple(many)):
        place = Device(hardware=device("A100-80GB")._replace(calibration=runs))
        found = search(recipe, 64, place, 1, choices).close
        assert found is not None
        close.append(found)
    assert close[1] > close[0] + 0.04


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
